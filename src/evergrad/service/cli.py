"""The command ``evergrad``.

Commands are thin: each imports what it needs when it runs, so that ``evergrad --help`` loads neither torch nor a server and
answers at once. What goes wrong becomes one line and an exit code in ``_edge.py``.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from evergrad.service._edge import guarded

app = typer.Typer(
    name="evergrad",
    help="Keeps an open-weights agent in training for as long as it serves, and states what each promotion gained and cost.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
env_app = typer.Typer(name="env", help="Environments: list them, and test one before it is trained on.")
model_app = typer.Typer(name="model", help="Model versions of a run: list, show, promote, roll back.")
loop_app = typer.Typer(name="loop", help="The loop: run it, see what it does and why, pause it, go on.")
traffic_app = typer.Typer(name="traffic", help="Live traffic: what is kept of it, tasks made of it, forgetting it.")
rollouts_app = typer.Typer(name="rollouts", help="Rollouts of a run, token by token.")
data_app = typer.Typer(name="data", help="Data files: check one before it is trained on.")
app.add_typer(data_app)
app.add_typer(env_app)
app.add_typer(loop_app)
app.add_typer(model_app)
app.add_typer(rollouts_app)
app.add_typer(traffic_app)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of the run (TOML).", show_default=False)]


def _overrides(what: str, example: str) -> Any:
    return typer.Option(
        "--set", metavar="KEY=VALUE", help=f"Override {what}, such as {example}; repeatable.", show_default=False
    )


Overrides = Annotated[list[str] | None, _overrides("a key", "--set learn.rl.steps=20")]
PlanOverrides = Annotated[list[str] | None, _overrides("a key", "--set worth.usd_per_success=0.10")]
TrainOverrides = Annotated[list[str] | None, _overrides("a key", "--set schedule.lr=1e-4")]
Settings = Annotated[list[str] | None, _overrides("a setting of the environment", "--set contract=v2")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", metavar="DIR", help="Run folder; by default runs/NAME.", show_default=False)
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run", metavar="DIR", help="Run folder; by default the newest one under ./runs.", show_default=False),
]
Alias = Annotated[str, typer.Option("--alias", metavar="NAME", help="The alias.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Goes on record.", show_default=False)]
Tenant = Annotated[
    str, typer.Argument(metavar="TENANT", help="Its name; 'default' where no tenant has a key.", show_default=False)
]
VersionArgument = Annotated[str, typer.Argument(metavar="VERSION", help="Version id, or an alias.", show_default=False)]
OptionalVersion = Annotated[str, typer.Argument(metavar="[VERSION]", help="Version id, or an alias.")]


ONCE = ("budget.cycles=1", "watch.requests=0", "traffic.changes=[]")
"""What makes one training of a whole run: the first cycle, without customers."""


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; also after the command.")] = False,
) -> None:
    # --debug is taken off the command line before it is parsed, so that it may stand anywhere; here it has its line in --help.
    if version:
        from importlib.metadata import version as version_of

        typer.echo(f"evergrad {version_of('evergrad')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ── Running ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
@loop_app.command()
def run(
    config: ConfigFile,
    set_: Overrides = None,
    run_dir: RunDir = None,
    once: Annotated[
        bool, typer.Option("--once", help="Train, measure and rule once: no live traffic, no second cycle.")
    ] = False,
) -> None:
    """Turn the loop: train, evaluate, gate, promote, serve, watch, until the budget ends.

    In a folder that holds an unfinished run of the same configuration, go on from where it was.
    """
    from evergrad.loop import run_loop

    try:
        folder = run_loop(config, [*(set_ or []), *(ONCE if once else ())], run_dir)
    except KeyboardInterrupt:
        typer.echo("the same command goes on from where it was", err=True)
        raise
    typer.echo(f"report: {folder / 'report.html'}")


@loop_app.command("status")
def loop_status(run: RunFolder = None, as_json: AsJson = False) -> None:
    """Say what a run is doing, what it last decided and why, what it has spent, and what comes next."""
    from evergrad.service._loop import show_status
    from evergrad.service._runs import find_run

    show_status(find_run(run), as_json=as_json)


@loop_app.command("explain")
def loop_explain(
    step: Annotated[
        int | None,
        typer.Argument(
            metavar="[STEP]", min=1, help="Number of a decision; all in a line each when absent.", show_default=False
        ),
    ] = None,
    run: RunFolder = None,
    as_json: AsJson = False,
) -> None:
    """Show what the loop decided, and for one step all the evidence that it rests on."""
    from evergrad.service._loop import explain
    from evergrad.service._runs import find_run

    explain(find_run(run), step, as_json=as_json)


@loop_app.command("pause")
def loop_pause(run: RunFolder = None, reason: Reason = "") -> None:
    """Stop a run at its next safe point; it stays paused, whoever starts it again, until `resume`."""
    from evergrad.service._loop import pause
    from evergrad.service._runs import find_run

    pause(find_run(run), reason)


@loop_app.command("resume")
def loop_resume(run: RunFolder = None) -> None:
    """Lift a pause, and go on with the run if nobody does."""
    from evergrad.loop import run_loop
    from evergrad.service._loop import resume
    from evergrad.service._runs import find_run

    folder = find_run(run)
    config = resume(folder)
    if config is not None:
        run_loop(config, [], folder)
        typer.echo(f"report: {folder / 'report.html'}")


@app.command()
def train(config: ConfigFile, set_: TrainOverrides = None, run_dir: RunDir = None) -> None:
    """Train once, by any method, to an adapter or model that other tools load.

    A configuration with a table data learns from a file: supervised fine-tuning or preferences. One with a table environment
    learns there, by demonstrations, reinforcement or a teacher, and is measured and ruled on: it is evergrad run --once.

    In a folder that holds an unfinished run of the same configuration and data, go on from the last checkpoint.
    """
    from evergrad.config import read_config

    if "environment" in read_config(config, set_ or []):
        run(config, set_, run_dir, once=True)
        return
    from evergrad.loop.offline import train as train_offline

    train_offline(config, set_ or [], run_dir)


@app.command("eval")
def eval_(
    version: OptionalVersion = "production",
    run: RunFolder = None,
    n: Annotated[int, typer.Option("-n", "--tasks", min=1, help="Number of tasks.")] = 96,
    split: Annotated[
        str,
        typer.Option(
            "--split",
            metavar="NAME",
            help="heldout, gate, train, or traffic: live tasks kept aside. Looks at the gate are counted.",
        ),
    ] = "heldout",
    set_: Settings = None,
    seed: Annotated[int, typer.Option("--seed", help="Which tasks of the split are drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a version on tasks that training never saw: success with its interval, by slice and outcome."""
    from evergrad.service._evaluating import evaluate_version
    from evergrad.service._runs import find_run

    evaluate_version(find_run(run), version, tasks=n, split=split, overrides=set_ or [], seed=seed, as_json=as_json)


@app.command()
def serve(
    run: RunFolder = None,
    alias: Alias = "production",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8000,
    record: Annotated[
        str | None,
        typer.Option(
            "--record",
            metavar="REDACTOR",
            help="Keep what is sent with store = true, redacted by presidio, or by your package.module:function.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve what an alias points at through OpenAI's API, and follow the alias when it moves."""
    from evergrad.service._runs import find_run
    from evergrad.service._serving import serve_alias

    raise typer.Exit(serve_alias(find_run(run), alias, port, record))


@traffic_app.command("list")
def traffic_list(run: RunFolder = None, as_json: AsJson = False) -> None:
    """List the conversations that are kept, with their feedback and what was made of them."""
    from evergrad.service._runs import find_run
    from evergrad.service._traffic import list_traffic

    list_traffic(find_run(run), as_json=as_json)


@traffic_app.command("tasks")
def traffic_tasks(
    run: RunFolder = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", metavar="NAME", help="Whose traffic; repeatable. All must be named when there are several."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make tasks of what is kept, for the next cycle to train on; says what became of each conversation."""
    from evergrad.service._runs import find_run
    from evergrad.service._traffic import make_tasks

    make_tasks(find_run(run), tenant or [], as_json=as_json)


@traffic_app.command("key")
def traffic_key(
    tenant: Tenant,
    run: RunFolder = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take all keys of the tenant back instead.")] = False,
) -> None:
    """Make an API key for a tenant, whose traffic is then told from that of others."""
    from evergrad.service._runs import find_run
    from evergrad.service._traffic import add_tenant_key

    add_tenant_key(find_run(run), tenant, revoke=revoke)


@traffic_app.command("forget")
def traffic_forget(
    tenant: Tenant,
    run: RunFolder = None,
    user: Annotated[
        str | None,
        typer.Option("--user", metavar="NAME", help="Only what one user of theirs has sent.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove all that is kept of a tenant; name each version that has learned from it, and what it costs to rebuild."""
    from evergrad.service._runs import find_run
    from evergrad.service._traffic import forget_tenant

    forget_tenant(find_run(run), tenant, user, as_json=as_json)


# ── Looking ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class CostView(StrEnum):
    """Which of a book's prices."""

    BILLED = "billed"
    LIST = "list"
    MARGINAL = "marginal"


class Overlong(StrEnum):
    """What becomes of a row above the limit."""

    REFUSE = "refuse"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_RIGHT = "truncate_right"
    DROP = "drop"


@data_app.command("check")
def data_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL file, one object a line.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Count its tokens and apply its chat template.", show_default=False),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="chat, prompt_completion, text, tokens, preference or preference_openai."
        ),
    ] = "auto",
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", min=2, metavar="N", help="Longest row; by default the model's.", show_default=False),
    ] = None,
    overlong: Annotated[Overlong, typer.Option("--overlong", help="What becomes of a longer row.")] = Overlong.REFUSE,
) -> None:
    """Check a data file line by line; then show its lengths, its trained share, and one row with what is trained marked.

    Exit code 1 when a line cannot be trained on.
    """
    from evergrad.service._data import check_data

    raise typer.Exit(check_data(file, model, format_, max_tokens, overlong.value))


@env_app.command("list")
def env_list() -> None:
    """List the built-in environments and what they ask of an agent."""
    from evergrad.service._environments import list_environments

    list_environments()


@env_app.command("test")
def env_test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name, or path of a .py file.", show_default=False)],
    set_: Settings = None,
    n: Annotated[int, typer.Option("-n", "--tasks", min=1, help="Tasks to try.")] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Which tasks are drawn.")] = 0,
) -> None:
    """Try an environment's rewards before a model is trained on them: gold passes, junk does not, twice is the same."""
    from evergrad.service._environments import try_environment

    raise typer.Exit(try_environment(name, set_ or [], n=n, seed=seed))


@model_app.command("list")
def model_list(run: RunFolder = None, as_json: AsJson = False) -> None:
    """List the versions of a run, their parents, and the aliases that point at them."""
    from evergrad.service._models import list_versions
    from evergrad.service._runs import find_run

    list_versions(find_run(run), as_json=as_json)


@model_app.command("show")
def model_show(version: OptionalVersion = "production", run: RunFolder = None, as_json: AsJson = False) -> None:
    """Show one version: where its weights are, its lineage, and how aliases came to it."""
    from evergrad.service._models import show_version
    from evergrad.service._runs import find_run

    show_version(find_run(run), version, as_json=as_json)


@model_app.command("promote")
def model_promote(version: VersionArgument, run: RunFolder = None, alias: Alias = "production", reason: Reason = "") -> None:
    """Point an alias at a version by hand; the registry records that no gate ruled on it."""
    from evergrad.service._models import promote_by_hand
    from evergrad.service._runs import find_run

    promote_by_hand(find_run(run), version, alias, reason)


@model_app.command("rollback")
def model_rollback(
    alias: Annotated[str, typer.Argument(metavar="[ALIAS]", help="The alias.")] = "production",
    run: RunFolder = None,
    reason: Reason = "",
) -> None:
    """Point an alias at the version that it served before, or end the release that is under way to it.

    A running `serve` follows within a second or two.
    """
    from evergrad.service._models import roll_back
    from evergrad.service._runs import find_run

    roll_back(find_run(run), alias, reason)


@rollouts_app.command("show")
def rollouts_show(
    rollout: Annotated[
        str | None, typer.Argument(metavar="[ROLLOUT]", help="Rollout id; the last ones when absent.", show_default=False)
    ] = None,
    run: RunFolder = None,
    n: Annotated[int, typer.Option("-n", "--last", min=1, help="How many of the last ones.")] = 3,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="NAME", help="Only train, eval or live.", show_default=False),
    ] = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            "--outcome",
            metavar="NAME",
            help="Only scored, policy_fault, environment_fault or verifier_fault.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Shade each sampled token by its log-probability.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show rollouts turn by turn: what the model was shown, what it sampled, and what that was worth.

    Works while the run goes on.
    """
    from evergrad.service._rollouts import show_rollouts
    from evergrad.service._runs import find_run

    show_rollouts(find_run(run), rollout, last=n, source=source, outcome=outcome, tokens=tokens, as_json=as_json)


@app.command()
def cost(
    run: RunFolder = None,
    focus: Annotated[
        Path | None,
        typer.Option("--focus", metavar="FILE", help="Also write all entries as a FOCUS table (CSV).", show_default=False),
    ] = None,
    price_book: Annotated[
        Path | None,
        typer.Option("--price-book", metavar="FILE", help="Show it at the prices of another book (TOML).", show_default=False),
    ] = None,
    view: Annotated[
        CostView, typer.Option("--view", help="What is billed, the list price, or what more of it would cost.")
    ] = CostView.BILLED,
    invoice: Annotated[
        str | None,
        typer.Option("--invoice", metavar="USD", help="Put the ledger beside what was invoiced.", show_default=False),
    ] = None,
    others: Annotated[
        Path | None,
        typer.Option("--others", metavar="FILE", help="Place other models (TOML) among the versions.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run has cost by phase, per million tokens and per success, and which version is dominated by which."""
    from evergrad.service._costs import show_costs
    from evergrad.service._runs import LEDGER, REGISTRY, find_run

    folder = find_run(run, holds=(REGISTRY, LEDGER))
    show_costs(folder, focus=focus, price_book=price_book, view=view.value, invoice=invoice, others=others, as_json=as_json)


@app.command()
def plan(
    budget: Annotated[
        float, typer.Option("--budget", metavar="USD", min=1e-9, help="Dollars for one more cycle.", show_default=False)
    ],
    run: RunFolder = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="For tasks that are yet to be learned; else the curve goes on where it ended.")
    ] = False,
    set_: PlanOverrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what a budget buys: steps, expected gain with its interval, break-even, and how much of it pays."""
    from evergrad.service._planning import show_plan
    from evergrad.service._runs import find_run

    show_plan(find_run(run), budget, anew=anew, overrides=set_ or [], as_json=as_json)


@app.command()
def audit(
    version: Annotated[
        str | None,
        typer.Argument(metavar="[VERSION]", help="Version id, or an alias; all when absent.", show_default=False),
    ] = None,
    run: RunFolder = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", help="Public key (PEM) that must have signed.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check certificates: signature, hashes of all they rest on, the ruling made again, the traffic since.

    Exit code 1 when something does not fit.
    """
    from evergrad.service._auditing import audit_certificates
    from evergrad.service._runs import find_run

    raise typer.Exit(audit_certificates(find_run(run), version, key=key, as_json=as_json))


@app.command()
def doctor() -> None:
    """Check this machine and this installation; exit 1 when something would fail."""
    from evergrad.service._doctor import examine

    raise typer.Exit(examine())


def main() -> None:
    """Entry point of the command; ends the process with the exit code."""
    sys.exit(command(sys.argv[1:]))


def command(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code; errors go to standard error."""
    debug = "--debug" in arguments or bool(os.environ.get("EVERGRAD_DEBUG"))
    rest = [argument for argument in arguments if argument != "--debug"]

    def call() -> Any:
        return app(args=rest, prog_name="evergrad", standalone_mode=False)

    return guarded(call, debug=debug)


if __name__ == "__main__":
    main()
