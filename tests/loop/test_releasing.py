"""RELEASE: a candidate that harms is rolled back, one that does not owns the alias, and a kill changes neither."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from evergrad.envs import Taskset, content_hash
from evergrad.evals import CanaryConfig
from evergrad.inference import EngineUnavailable, place
from evergrad.loop._checking import check_inputs
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import LoopState, Stage
from evergrad.loop._releasing import begin_release, release
from evergrad.loop.auditing import State, audit, read_certificate
from evergrad.loop.certificate import signing_key
from evergrad.loop.config import RunConfig
from evergrad.loop.controller import _announcement
from evergrad.loop.placement import WorkerDied
from evergrad.loop.traffic import DealtSession, Redacted, ServedTraffic, TrafficStore
from evergrad.registry import Registry, base_model
from evergrad.rollouts import Renderer
from evergrad.types import (
    Completion,
    EvergradError,
    FinishReason,
    Message,
    ModelVersion,
    PolicySpan,
    Release,
    ReleaseState,
    Sampling,
    Side,
    Verdict,
)
from tests.loop.conftest import LETTERS, PATIENCE_S, TINY_RUN, Start, finish, half_written, workers


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(base_model("tiny")))


class Speaker:
    """An engine whose model always says one thing; it fails after so many requests."""

    def __init__(self, renderer: Renderer, says: str, lasts: int = 10**9) -> None:
        self._ids, self._left, self.asked = renderer.reply(says), lasts, 0

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        self.asked += 1
        if self.asked > self._left:
            raise EngineUnavailable("the engine died")
        await asyncio.sleep(0)
        spans = (PolicySpan(1, 0, len(self._ids)),)
        return Completion(self._ids, (-0.1,) * len(self._ids), FinishReason.STOP, spans)

    async def health(self) -> dict[str, str]:
        if self.asked > self._left:
            raise EngineUnavailable("the engine died")
        return {"status": "ok"}


class Loop:
    """As much of a session as a release needs: a registry, two engines that say what they are told to, and letters to ask."""

    def __init__(self, root: Path, renderer: Renderer, plan: CanaryConfig, candidate: Speaker) -> None:
        self.config = RunConfig.model_validate(
            {"environment": {"name": str(LETTERS)}, "watch": {"requests": 10}, "canary": plan}
        )
        self.registry = Registry(root / "registry.sqlite")
        if not self.registry.list():
            for name in ("v1", "v2"):
                self.registry.register(ModelVersion(name, None, 1, f"versions/{name}", "tiny", "r", "2026-01-01"))
            self.registry.promote("production", "v1", bootstrap=True)
        self.state = LoopState(stage=Stage.RELEASE, cycles=[{"candidate": "v2", "verdict": "passed"}])
        self.renderer, self.candidate = renderer, candidate
        self.serving: Any = SimpleNamespace(
            client=Speaker(renderer, "b"), stand_by=self._stand_by, load=self._load, end_standby=self._end
        )
        self.serving.version = SimpleNamespace(version_id="v1")
        self.engine, self.placement = Speaker(renderer, ""), SimpleNamespace(watch=self._watch)
        self.served_traffic: ServedTraffic | None = None
        self.dead: str | None = None
        self.loaded: list[str] = []
        self.standby: Any = None
        self.ended = 0
        self.told: list[str] = []
        self.console, self.clock = LoopConsole(), SimpleNamespace(phase=lambda name: nullcontext())
        self.spent: str | None = None
        self.checks: list[str] = []
        self.after_check: Callable[[], None] = lambda: None
        self._taskset = Taskset(str(LETTERS), {})

    def renderer_for(self, version: ModelVersion) -> Renderer:
        return self.renderer

    async def _stand_by(self, version: ModelVersion) -> Any:
        self.standby = SimpleNamespace(version=version, client=self.candidate, death=None, base_url="http://127.0.0.1:9")
        return self.standby

    async def _watch(self) -> None:
        if self.dead is None:
            await asyncio.Event().wait()
        raise WorkerDied(str(self.dead))

    async def _load(self, version: ModelVersion) -> None:
        self.loaded.append(version.version_id)

    async def _end(self) -> None:
        self.ended += 1

    async def follow(self) -> None: ...

    def event(self, text: str) -> None:
        self.told.append(text)

    def safe_point(self) -> None: ...

    def out_of_budget(self) -> str | None:
        return self.spent

    def taskset(self, settings: Any) -> Taskset:
        return self._taskset

    def suite(self, settings: Any) -> str:
        return "letters@v1"

    def record_rollouts(self, name: str, rollouts: Sequence[Any]) -> None:
        self.checks.append(name)
        self.after_check()

    def standing(self) -> Release:
        found = self.registry.releases.last("production")
        assert found is not None
        return found


VERDICT = Verdict(True, ("v2 wins",), {"n": 96}, "v2", "v1")


async def carried_out(loop: Loop) -> Release:
    session: Any = loop
    assert loop.config.canary is not None
    begin_release(session, loop.config.canary, VERDICT)
    ended = await release(session)
    assert ended.following is Stage.WATCH
    return loop.standing()


async def test_a_harmless_candidate_goes_through_every_stage(tmp_path: Path, renderer: Renderer) -> None:
    plan = CanaryConfig(shadow=15, shares=(0.2, 0.5), outcomes=12)
    loop = Loop(tmp_path, renderer, plan, Speaker(renderer, "b"))
    found = await carried_out(loop)
    assert found.state is ReleaseState.PROMOTED
    assert loop.registry.resolve("production") == "v2"
    assert loop.loaded == ["v2"], "loaded, and by the real engine proved, before the alias moves"
    assert [(each.state.value, each.share) for each in loop.registry.releases.events(1)] == [
        ("shadow", 0.0), ("canary", 0.2), ("canary", 0.5), ("promoted", 1.0),
    ]  # fmt: skip
    assert loop.checks[:3] == ["shadow-001-000", "shadow-001-001", "canary-001-000"]
    assert "20 copies answered in the shadow, 20 of them as the incumbent did" in loop.told[0]
    assert loop.told[-1].startswith("promoted v2: no harm in ")
    cycle = loop.state.cycles[0]
    assert (cycle["verdict"], cycle["release"]["share"], cycle["release"]["actor"]) == ("promoted", 0.5, "canary")
    assert json.dumps(cycle), "goes into state.json"
    assert loop.ended == 1


class Told(Speaker):
    """Says the right letter where the prompt tells it to be careful, and another one elsewhere."""

    def __init__(self, renderer: Renderer, careful: bool) -> None:
        super().__init__(renderer, "b")
        self._renderer, self._wrong, self._careful = renderer, renderer.reply("z"), careful
        self.prompts: list[str] = []

    async def __call__(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, session_id: str | None = None
    ) -> Completion:
        done = await super().__call__(prompt_token_ids, sampling, session_id=session_id)
        self.prompts.append(self._renderer.decode(prompt_token_ids))
        if ("Be careful." in self.prompts[-1]) == self._careful:
            return done
        return replace(done, token_ids=self._wrong)


@pytest.mark.parametrize("careful", [True, False])
async def test_each_side_of_a_canary_is_asked_under_its_own_system_prompt(
    tmp_path: Path, renderer: Renderer, careful: bool
) -> None:
    with Registry(tmp_path / "registry.sqlite") as registry:
        for name, text in (("v1", ""), ("v2", "Be careful.")):
            registry.register(ModelVersion(name, None, 1, "versions/v1", "tiny", name, "2026-01-01", system_prompt=text))
        registry.promote("production", "v1", bootstrap=True)
    candidate = Told(renderer, careful)
    loop = Loop(tmp_path, renderer, CanaryConfig(shadow=10, shares=(0.3, 0.6), outcomes=30), candidate)
    loop.serving.client = Told(renderer, False)
    found = await carried_out(loop)
    assert found.state is (ReleaseState.PROMOTED if careful else ReleaseState.ROLLED_BACK)
    assert len(candidate.prompts) > 20
    assert all("Be careful." in each for each in candidate.prompts), "copies in the shadow, too"
    assert not any("Be careful." in each for each in loop.serving.client.prompts)


async def test_a_harmful_candidate_is_rolled_back_and_never_owned_the_alias(tmp_path: Path, renderer: Renderer) -> None:
    loop = Loop(tmp_path, renderer, CanaryConfig(shares=(0.3, 0.6), outcomes=60), Speaker(renderer, "z"))
    found = await carried_out(loop)
    assert found.state is ReleaseState.ROLLED_BACK
    assert loop.registry.resolve("production") == "v1"
    assert loop.loaded == [], "the predecessor served all along: nothing is loaded to go back to it"
    last = loop.registry.releases.events(1)[-1]
    assert last.reason.startswith("harm at 0.3 of the sessions: candidate mean 0.000 of ")
    assert last.evidence["e_value"] >= 20
    assert last.evidence["candidate"]["sessions"] <= 20
    assert loop.state.cycles[0]["verdict"] == "rolled back"


async def test_an_engine_that_fails_the_candidate_is_harm_and_no_customer_sees_it(tmp_path: Path, renderer: Renderer) -> None:
    loop = Loop(tmp_path, renderer, CanaryConfig(shares=(0.5,), outcomes=100), Speaker(renderer, "b", lasts=12))
    found = await carried_out(loop)
    assert found.state is ReleaseState.ROLLED_BACK
    outcomes = loop.registry.releases.outcomes(found)
    evidence = loop.registry.releases.events(1)[-1].evidence
    assert (evidence["candidate"]["scored"], evidence["candidate"]["mean"]) == (12, 1.0)
    assert evidence["incumbent"]["mean"] == 1.0
    assert {each.score for each in outcomes} == {1.0, None}
    assert loop.serving.client.asked + 12 == len(outcomes), "every session had its answer"


async def test_what_a_dying_engine_left_unanswered_is_no_outcome(tmp_path: Path, renderer: Renderer) -> None:
    """The predecessor's engine is killed in a check: what came of that check is not put down, and it is made again."""
    plan = CanaryConfig(shares=(0.5,), outcomes=12)
    loop = Loop(tmp_path, renderer, plan, Speaker(renderer, "b"))
    loop.serving.client, loop.dead = Speaker(renderer, "b", lasts=8), "serving died (signal 9)"
    with pytest.raises(WorkerDied, match="signal 9"):
        await carried_out(loop)
    found = loop.standing()
    assert (found.state, found.share) == (ReleaseState.CANARY, 0.5)
    seen = loop.registry.releases.outcomes(found)
    assert len(seen) % 10 == 0
    assert all(each.score == 1.0 for each in seen)
    loop.registry.close()
    again = Loop(tmp_path, renderer, plan, Speaker(renderer, "b"))
    session: Any = again
    await release(session)
    assert again.checks[0] == f"canary-001-{len(seen) // 10:03d}"
    assert again.standing().state is ReleaseState.PROMOTED


async def test_customers_are_heard_beside_the_loops_own_sessions(tmp_path: Path, renderer: Renderer) -> None:
    """The loop's own tasks find nothing wrong; customers do, once the candidate is asked; in the shadow nobody meets it."""
    loop = Loop(tmp_path, renderer, CanaryConfig(shadow=20, shares=(0.2, 0.5), outcomes=40), Speaker(renderer, "b"))
    releases, offered = loop.registry.releases, list[tuple[ReleaseState, str]]()
    with TrafficStore(tmp_path / "traffic.sqlite") as store:
        loop.served_traffic = ServedTraffic(store)

        def customers_come() -> None:
            found = loop.standing()
            offered.append((found.state, releases.offered(found)))
            if found.state is not ReleaseState.CANARY:
                return
            for index in range(10):
                session = f"{len(loop.checks)}-{index}"
                side = Side.CANDIDATE if place(found.salt, session) < found.share else Side.INCUMBENT
                number = store.canary.put_down(DealtSession(1, session, "default", None, side, found.share))
                system = loop.taskset({}).environment_class.system_prompt("v1")
                said = (Message("system", system), Message("user", session), Message("assistant", "b"))
                store.keep(Redacted(session, "default", None, "v", said, system_hash=content_hash(system), session=number))
                store.add_feedback("default", completion_id=session, score=float(side is Side.INCUMBENT))

        loop.after_check = customers_come
        found = await carried_out(loop)
        assert found.state is ReleaseState.ROLLED_BACK
        last = releases.events(1)[-1]
        assert "customers: candidate mean 0.000 of " in last.reason
        assert last.evidence["candidate"]["mean"] == 1.0
        assert last.evidence["customers"]["incumbent"]["mean"] == 1.0
        outcomes = releases.outcomes(found)
        heard = [each for each in outcomes if each.by_customer]
        assert len(heard) == len({each.session_id for each in heard}) > 10
        assert {url for state, url in offered if state is ReleaseState.SHADOW} == {""}
        assert {url for state, url in offered if state is ReleaseState.CANARY} == {"http://127.0.0.1:9"}
        assert releases.offered(found) == ""
        played = [each for each in loop.checks if each.startswith("canary")]
        assert played == [f"canary-001-{number:03d}" for number in range(len(played))], "customers are no check of the loop's"


async def test_the_candidates_engine_ends_when_customers_have_left_it(tmp_path: Path, renderer: Renderer) -> None:
    loop = Loop(tmp_path, renderer, CanaryConfig(shares=(0.5,), outcomes=200), Speaker(renderer, "z"))
    releases = loop.registry.releases

    def gateway_comes() -> None:
        releases.enter(loop.standing(), os.getpid())
        releases.enter(loop.standing(), 2**22 + 1)  # no process has this id: a gateway that was killed

    roll_back, ended = releases.roll_back, asyncio.Event()

    def and_tell(*arguments: Any, **more: Any) -> Release:
        found = roll_back(*arguments, **more)
        ended.set()
        return found

    releases.roll_back = and_tell  # type: ignore[method-assign]
    loop.after_check = gateway_comes
    carrying = asyncio.create_task(carried_out(loop))
    await ended.wait()
    await asyncio.sleep(0.3)
    assert loop.ended == 0, "a request may be under way"
    releases.leave(loop.standing(), os.getpid())
    assert (await carrying).state is ReleaseState.ROLLED_BACK
    assert loop.ended == 1


async def test_what_else_ends_a_release(tmp_path: Path, renderer: Renderer) -> None:
    plan = CanaryConfig(shares=(0.5,), outcomes=100)

    def dies(loop: Loop) -> None:
        loop.standby.death = "candidate died (signal 9)"

    def is_spent(loop: Loop) -> None:
        loop.spent = "the budget of $1 is spent"

    def by_hand(loop: Loop) -> None:
        loop.registry.releases.roll_back(loop.standing(), reason="complaints", actor="ann")

    def another(loop: Loop) -> None:
        loop.registry.promote("production", "v2", VERDICT, actor="ann")

    for number, (meddle, told) in enumerate(
        {
            dies: "rolled back v2: candidate died (signal 9); ",
            is_spent: "rolled back v2: the budget of $1 is spent before the canary was through; to promote it all the same:",
            by_hand: "rolled back v2 by ann: complaints",
            another: "promoted v2 by ann: production was moved to v2 meanwhile",
        }.items()
    ):
        loop = Loop(tmp_path / str(number), renderer, plan, Speaker(renderer, "b"))
        loop.after_check = lambda loop=loop, meddle=meddle: meddle(loop) if len(loop.checks) == 2 else None
        await carried_out(loop)
        assert loop.told[-1].startswith(told)
        assert len(loop.checks) == 2


async def test_a_shadow_that_fails_never_meets_a_customer(tmp_path: Path, renderer: Renderer) -> None:
    loop = Loop(tmp_path, renderer, CanaryConfig(shadow=30), Speaker(renderer, "b", lasts=14))
    assert (await carried_out(loop)).state is ReleaseState.ROLLED_BACK
    assert loop.told == ["rolled back v2: the engine died; 14 copies answered in the shadow, 14 of them as the incumbent did"]
    assert loop.registry.releases.outcomes(loop.standing()) == ()


async def test_a_candidate_that_cannot_be_loaded_is_rolled_back(tmp_path: Path, renderer: Renderer) -> None:
    loop = Loop(tmp_path, renderer, CanaryConfig(), Speaker(renderer, "b"))

    async def refuses(version: ModelVersion) -> None:
        raise EvergradError("the folder is missing")

    loop.serving.stand_by = refuses
    assert (await carried_out(loop)).state is ReleaseState.ROLLED_BACK
    assert loop.told == ["rolled back v2: the candidate cannot serve: the folder is missing"]


async def test_a_release_that_was_left_in_the_middle_goes_on_as_if_it_had_not_been(tmp_path: Path, renderer: Renderer) -> None:
    """Left in a check, before or after its outcomes are put down: the same outcomes, the same steps."""

    class Left(Exception):
        pass

    plan, found = CanaryConfig(shares=(0.2, 0.5), outcomes=8), []
    for at, put_down in ((None, False), *itertools.product((1, 3, 4, 5, 6), (False, True))):
        root = tmp_path / f"{at}-{put_down}"
        loop = Loop(root, renderer, plan, Speaker(renderer, "b"))

        def leave(loop: Loop = loop, at: int | None = at) -> None:
            if len(loop.checks) == at:
                raise Left

        if put_down:
            observe = loop.registry.releases.observe

            def and_leave(release: Release, outcomes: Any, observe: Any = observe, leave: Any = leave) -> None:
                observe(release, outcomes)
                leave()

            loop.registry.releases.observe = and_leave  # type: ignore[method-assign]
        else:
            loop.after_check = leave
        try:
            await carried_out(loop)
        except Left:
            before = loop.standing()
            loop.registry.close()
            loop = Loop(root, renderer, plan, Speaker(renderer, "b"))
            assert loop.standing() == before
            session: Any = loop
            await release(session)
        events = [(each.state, each.share, each.reason, each.evidence) for each in loop.registry.releases.events(1)]
        found.append((events, loop.registry.releases.outcomes(loop.standing())))
    assert all(each == found[0] for each in found)
    assert len(found[0][0]) == 3


def test_a_canary_needs_traffic_and_says_what_it_will_do(tmp_path: Path) -> None:
    base = {"environment": {"name": "reasoning"}, "canary": {}}
    without = RunConfig.model_validate({**base, "watch": {"requests": 0}})
    assert without.release_plan is None, "as with run --once"
    notes: list[str] = []
    console: Any = SimpleNamespace(note=lambda text, **_: notes.append(text))
    check_inputs(without.model_copy(update={"model": "tiny"}), console)
    assert any("no traffic could judge a canary" in note for note in notes)
    config = RunConfig.model_validate({**base, "watch": {"requests": 7}})
    with Registry(tmp_path / "registry.sqlite") as registry:
        for name in ("v1", "v2"):
            registry.register(ModelVersion(name, None, 1, f"versions/{name}", "tiny", "r", "2026-01-01"))
        registry.promote("production", "v1", bootstrap=True)
        session: Any = SimpleNamespace(
            config=config, recipe=config.learn, state=LoopState(stage=Stage.RELEASE), registry=registry
        )
        begin_release(session, CanaryConfig(), VERDICT)
        told = "release of v2: 7 requests a check; it answers 0.01, 0.05, 0.25 of the sessions, then all"
        assert _announcement(session) == told


# ── Whole runs, with engines ─────────────────────────────────────────────────────────────────────────────────────────────

WITH_CANARY = TINY_RUN.replace("requests = 4", "requests = 8") + "\n[canary]\nshares = [0.25, 0.5]\noutcomes = 12\n"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def trained(alone: Path, tmp_path: Path, start: Start) -> Path:
    """The folder of a run that is over."""
    (tmp_path / "canary.toml").write_text(WITH_CANARY)
    if not alone.exists():
        finish(start("run", str(tmp_path / "canary.toml"), "--run-dir", str(alone)))
    return alone


def planted(trained: Path, run: Path, plan: CanaryConfig, spoil: bool) -> Path:
    """A copy of the run in which a candidate has just passed the gate: what serves, or the base model, which knows nothing."""
    shutil.copytree(trained, run)
    with Registry(run / "registry.sqlite") as registry:
        serving = registry.find("production")
        source, target = run / serving.weights_uri, run / "versions" / "planted"
        shutil.copytree(source, target)
        if spoil:
            shutil.copy(base_model("tiny") / "model.safetensors", target / "model.safetensors")
        metadata = {key: value for key, value in serving.metadata.items() if key != "probe"}
        registry.register(replace(serving, version_id="planted", weights_uri="versions/planted", metadata=metadata))
        verdict = Verdict(True, ("planted",), {}, "planted", serving.version_id)
        registry.releases.begin(
            "production", verdict, plan.model_dump(mode="json"), state=ReleaseState.CANARY, share=plan.shares[0], actor="gate"
        )
    state = json.loads((run / "state.json").read_text())
    state["stage"] = "release"
    (run / "state.json").write_text(json.dumps(state))
    return run


@pytest.mark.slow
def test_a_run_learns_passes_the_gate_and_is_released(tmp_path: Path, start: Start) -> None:
    config = (
        WITH_CANARY.replace("steps = 3", "steps = 12").replace("n = 12", "n = 48").replace("group_size = 4", "group_size = 8")
    )
    (tmp_path / "whole.toml").write_text(config.replace("[canary]", "[canary]\nshadow = 8"))
    run = tmp_path / "whole"
    told = finish(start("run", str(tmp_path / "whole.toml"), "--run-dir", str(run)))
    assert re.search(
        r"passed t-c1-rl: .*t-c1-rl answers 0.25 of .*t-c1-rl answers 0.5 of .*promoted t-c1-rl: ", told, re.DOTALL
    )
    (cycle,) = json.loads((run / "report.json").read_text())["cycles"]
    assert (cycle["verdict"], cycle["release"]["share"]) == ("promoted", 0.5)
    assert record_of(run)["moves"] == [("bootstrap", "t-c1-sft", "loop"), ("promote", "t-c1-rl", "canary")]
    assert json.loads((run / "report.json").read_text())["cost"]["by_phase"]["shadow"] > 0
    found = audit(run, read_certificate(next((run / "certificates").glob("*.json"))), signing_key().public_key())
    assert [each for each in found if each.state is State.FAILS] == []


def record_of(run: Path) -> dict[str, Any]:
    with Registry(run / "registry.sqlite") as registry:
        found = registry.releases.last("production")
        assert found is not None
        return {
            "events": [(each.state.value, each.share, each.reason, each.evidence) for each in registry.releases.events(1)],
            "outcomes": registry.releases.outcomes(found),
            "moves": [(each.action, each.version_id, each.actor) for each in registry.history("production")],
        }


def test_a_planted_harmful_candidate_is_rolled_back_by_its_live_outcomes(trained: Path, tmp_path: Path, start: Start) -> None:
    run = planted(trained, tmp_path / "harmed", CanaryConfig(shares=(0.5,), outcomes=200), spoil=True)
    served = record_of(run)["moves"][-1][1]
    told = finish(start("run", str(tmp_path / "canary.toml"), "--run-dir", str(run)))
    assert "rolled back planted: harm at 0.5 of the sessions" in told
    record = record_of(run)
    assert record["events"][-1][0] == "rolled_back"
    assert record["events"][-1][3]["e_value"] >= 20
    assert record["moves"][-1][1] == served, "the alias was never moved"
    assert half_written(run) == []


@pytest.mark.slow
def test_killed_in_the_middle_of_a_canary_it_goes_on_at_the_same_share(trained: Path, tmp_path: Path, start: Start) -> None:
    plan = CanaryConfig(shares=(0.25, 0.5), outcomes=20)
    left, killed = (planted(trained, tmp_path / name, plan, spoil=False) for name in ("left", "killed"))
    configuration = str(tmp_path / "canary.toml")
    finish(start("run", configuration, "--run-dir", str(left)))
    process = start("run", configuration, "--run-dir", str(killed))
    deadline = time.monotonic() + PATIENCE_S
    with Registry(killed / "registry.sqlite") as registry:
        while True:
            found = registry.releases.last("production")
            assert found is not None
            here = [each for each in registry.releases.outcomes(found) if each.share == 0.5]
            if found.share == 0.5 and len(here) >= 16:
                break
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        children = workers(process.pid)
        process.kill()
        process.wait()
        psutil.wait_procs(children, timeout=15)
        after = registry.releases.last("production")
        assert after is not None
        assert (after.state, after.share) == (ReleaseState.CANARY, 0.5)
        seen = registry.releases.outcomes(after)
    told = finish(start("run", configuration, "--run-dir", str(killed)))
    assert "promoted planted: no harm in " in told
    record = record_of(killed)
    assert record == record_of(left)
    assert record["outcomes"][: len(seen)] == seen
    assert record["moves"][-1] == ("promote", "planted", "canary")
