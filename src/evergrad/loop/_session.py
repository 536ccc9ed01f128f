"""Everything that is alive in one process lifetime of a run: workers, clients, stores, tasks, clock.

Opening a session brings the workers to the saved state, whether that state is new, finished or what a crash left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from evergrad.envs import Taskset
from evergrad.inference import EngineConfig, InferenceClient
from evergrad.ledger import EnergyMeter, Ledger, PhaseClock, PriceBook
from evergrad.loop._console import LoopConsole
from evergrad.loop._folder import WAITING, LoopState, RunFolder, Stage, write_text
from evergrad.loop._probe import PROBE_TOKENS, require_equal
from evergrad.loop._prompting import TaskChoice
from evergrad.loop._replicas import Restarts
from evergrad.loop._scores import reward_interval
from evergrad.loop._serving import PRODUCTION, Serving
from evergrad.loop._teaching import scorer_of
from evergrad.loop._workers import Workers, renderer_on
from evergrad.loop.config import RecipeConfig, RunConfig
from evergrad.loop.decisions import Decision, take
from evergrad.loop.pausing import Paused, pause_of
from evergrad.loop.placement import LocalPlacement
from evergrad.loop.traffic import LiveTask, ServedTraffic, TrafficStore, traffic_path
from evergrad.registry import Registry, base_model
from evergrad.rollouts import (
    BufferState,
    Renderer,
    RolloutWriter,
    appraise,
    derive_seed,
    read_buffer_state,
    rollout_json,
    write_buffer_state,
)
from evergrad.training import LossConfig, TrainerClient, UpdatesConfig
from evergrad.training.sinks import RunInfo, SinkFan
from evergrad.types import EvergradError, ModelVersion, Rollout, Task, TrainingBatch


class Session:
    """Use as an async context manager; leaving it stops all workers."""

    def __init__(self, config: RunConfig, folder: RunFolder, console: LoopConsole, restarts: Restarts) -> None:
        self.config, self.folder, self.console = config, folder, console
        self.state = folder.load_state(LoopState(deployed=dict(config.environment.settings)))
        folder.write_metrics(self.state.steps)
        self.placement = LocalPlacement(folder.path / "logs", config.placement.stuck_after_s)
        self.writer = RolloutWriter(folder.rollouts)
        self.cores = config.placement.threads or len(os.sched_getaffinity(0))
        self._restarts = restarts
        self._started = time.monotonic()
        self._tasksets: dict[str, Taskset] = {}
        self._tasks: dict[str, Sequence[Task]] = {}
        self._live_tasks: dict[str, list[LiveTask]] = {}
        self._traffic: TrafficStore | None = None
        self._served_traffic: ServedTraffic | None = None
        self._exit = contextlib.AsyncExitStack()
        self.task_choice: TaskChoice | None = None
        """Of the phase that is under way, where it draws its tasks by what they teach."""
        self.registry: Registry
        self.ledger: Ledger
        self.clock: PhaseClock
        self.workers: Workers
        self.serving: Serving
        self._renderers: dict[str, Renderer] = {}
        self._sinks: SinkFan | None = None
        self.audited: list[Rollout] = []
        """Judged by gold since the last step was put down."""

    async def __aenter__(self) -> Session:
        try:
            path = self.folder.path
            book = PriceBook.load(Path(self.config.price_book) if self.config.price_book else None)
            self.registry = self._exit.enter_context(Registry(path / "registry.sqlite"))
            self.ledger = self._exit.enter_context(Ledger(path / "ledger.sqlite", book))
            self.clock = self._exit.enter_context(
                PhaseClock(self.ledger, cores=self.cores, subject=self.config.name, meter=EnergyMeter())
            )
            with self.clock.phase("setup"):
                await self._exit.enter_async_context(self.placement)
                self._exit.push_async_callback(self._end_workers)
                await self._start_workers()
                served = EngineConfig(model="", threads=self._threads, seed=self.config.seed)
                serving = Serving(self.placement, served, self.registry, path, self.console.note)
                self.serving = await self._exit.enter_async_context(serving)
                await self._restore()
                await self.follow()
            info = RunInfo(self.config.name, path, self.config.model_dump(mode="json"), len(self.state.steps))
            self._sinks = SinkFan([sink.build() for sink in self.config.sinks], info, self.console.note)
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # What happened since the last checkpoint is not saved: it is done again, from weights that match it.
        try:
            if self._sinks is not None:
                self._sinks.close(done=exc_info[0] is None)
            self.folder.save_wall_time(self.wall_s())
            self.writer.close()
        finally:
            await self._exit.aclose()

    @property
    def trainer(self) -> TrainerClient:
        return self.workers.trainer

    @property
    def engine(self) -> InferenceClient:
        """What rolls out: one engine, or several that look like one."""
        return self.workers.engines.client

    @property
    def renderer(self) -> Renderer:
        """Of chats with what this cycle trains."""
        return self.workers.renderer

    def renderer_for(self, version: ModelVersion) -> Renderer:
        """Of chats with a version, which may be on another base model than what this cycle trains."""
        base = version.base_model
        if base == self.workers.base:
            return self.workers.renderer
        if base not in self._renderers:
            self._renderers[base] = renderer_on(base_model(base))
        return self._renderers[base]

    # -- where the run stands --------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> RecipeConfig:
        return self.config.recipe(self.state.cycle, self.state.arm)

    @property
    def base(self) -> str:
        """The base model of what this cycle trains."""
        return self.state.base_model or self.config.model

    def wall_s(self) -> float:
        """Seconds of the whole run, resumed parts included."""
        return self.state.wall_s + time.monotonic() - self._started

    def spent_usd(self) -> float | None:
        """Dollars of the whole run so far; ``None`` when something in it has no price."""
        spent = self.clock.spent_usd()
        return None if spent is None else float(spent)

    def money(self) -> str:
        usd = self.spent_usd()
        return "$ unknown" if usd is None else f"${usd:.4f}"

    def out_of_budget(self) -> str | None:
        """Which budget is spent, or ``None``."""
        return self.config.budget.spent(self.spent_usd(), self.wall_s())

    def event(self, text: str) -> None:
        """A milestone, on the timeline and on the screen."""
        at_s, usd = self.wall_s(), self.spent_usd()
        self.state.timeline.append({"at_s": round(at_s, 1), "usd": usd, "cycle": self.state.cycle, "event": text})
        self.console.event(at_s, usd, text)

    def enter(self, decision: Decision) -> None:
        """Makes the move that a stage decided on and saves it with its record; that stage is then never entered again."""
        take(self.state, decision, at_s=self.wall_s(), usd=self.spent_usd())
        self.save_state()

    def safe_point(self) -> None:
        """A place where the saved state says all, so that the run may stop here.

        Raises:
            Paused: it is to.
        """
        pause = pause_of(self.folder.path)
        if pause is not None:
            raise Paused(pause)

    def save_state(self) -> None:
        """Writes the state with the seconds up to now. Call it where checkpoint and state agree."""
        now = time.monotonic()
        self.state.wall_s, self._started = self.state.wall_s + now - self._started, now
        self.folder.save_state(self.state)

    def record_step(self, kind: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the figures of one optimizer step, under the step that they describe."""
        state = self.state
        record: dict[str, Any] = {
            "kind": kind,
            "cycle": state.cycle,
            "step": state.step,
            "policy_version": state.policy_version,
            "wall_s": round(self.wall_s(), 2),
            "usd": self.spent_usd(),
            **metrics,
        }
        if "reward_mean" in metrics:
            record["reward"] = metrics["reward_mean"]
            record["reward_ci95"] = reward_interval(int(metrics["groups"]), metrics["reward_se"])
        state.steps.append(record)
        self.folder.append_metrics(record)
        if self._sinks is not None:
            self._sinks.log(len(state.steps), {f"{kind}/{name}": value for name, value in record.items()})
        return record

    def record_rollouts(self, name: str, rollouts: Sequence[Rollout]) -> None:
        """Writes a file of rollouts that were not trained on."""
        lines = "".join(rollout_json(rollout) + "\n" for rollout in rollouts)
        write_text(self.folder.rollouts / f"{name}.jsonl".replace("/", "_"), lines)

    # -- tasks -----------------------------------------------------------------------------------------------------------

    def taskset(self, settings: Mapping[str, Any]) -> Taskset:
        """The environment under these settings; made once."""
        key = repr(sorted(settings.items()))
        if key not in self._tasksets:
            self._tasksets[key] = Taskset(self.config.environment.name, settings)
        return self._tasksets[key]

    def suite(self, settings: Mapping[str, Any]) -> str:
        """How reports name the environment under these settings, such as ``support_desk@v1``."""
        return self.taskset(settings).suite

    @property
    def known(self) -> list[dict[str, Any]]:
        """Earlier deployed settings whose rewards can be trusted, oldest first: what is replayed, guarded and not forgotten."""
        return [each for each in self.state.known if self.distrust(each) is None]

    def distrust(self, settings: Mapping[str, Any]) -> str | None:
        """Why the verifier under ``settings`` is not to be trusted; ``None`` where it is, or was changed since."""
        found = self.state.distrusted.get(self.suite(settings))
        return found["why"] if found and found["fingerprint"] == self.taskset(settings).fingerprint else None

    def convict(self, settings: Mapping[str, Any], why: str) -> None:
        """Trusts the verifier under ``settings`` no more, until its source or its settings change."""
        suite, fingerprint = self.suite(settings), self.taskset(settings).fingerprint
        if self.distrust(settings) is None:
            self.state.distrusted[suite] = {"fingerprint": fingerprint, "why": why}
            self.event(f"the verifier of {suite} is not trusted any more: {why}")

    def contracts(self) -> dict[str, str]:
        """Suite to contract hash, of all that the run knows by now."""
        return {self.suite(each): self.taskset(each).contract_hash for each in (self.state.deployed, *self.known)}

    def training_task(self, settings: Mapping[str, Any], position: int) -> Task:
        """Task ``position`` of this cycle's order under ``settings``; none comes twice before all have come once.

        The order depends on the run's seed and the cycle alone, so that a resumed run goes on in it.
        """
        cycle = self.state.cycle
        key = repr((cycle, sorted(settings.items())))
        if key not in self._tasks:
            rl, taskset = self.recipe.rl, self.taskset(settings)
            # Discarded groups take tasks too, hence twice what the steps need; a smaller environment gives all it has.
            need = 2 * max(1, rl.steps) * rl.groups_per_step
            stream = taskset.stream("train", derive_seed(self.config.seed, "training", cycle))
            self._tasks[key] = list(islice(stream, need))
            if not self._tasks[key]:
                raise EvergradError(f"environment '{taskset.name}' has no training tasks", where=self.suite(settings))
        tasks = self._tasks[key]
        return tasks[position % len(tasks)]

    def training_slices(self, settings: Mapping[str, Any]) -> dict[str, list[Task]]:
        """All tasks of this cycle under ``settings``, by slice; each slice in its order."""
        self.training_task(settings, 0)
        by_slice: dict[str, list[Task]] = {}
        for task in self._tasks[repr((self.state.cycle, sorted(settings.items())))]:
            by_slice.setdefault(str(task.metadata.get("slice", "")), []).append(task)
        return by_slice

    def live_tasks(self) -> list[LiveTask]:
        """The live tasks of this cycle's RL, in an order that the seed and the cycle decide. One that is forgotten meanwhile is
        in it no more."""
        key = repr(("live", self.state.cycle, self.state.live_tasks))
        if key not in self._live_tasks:
            taskset, tasks = self.taskset(self.state.deployed), list[LiveTask]()
            if self.traffic is not None and self.state.live_tasks:
                tasks = self.traffic.tasks(
                    environment=taskset.name,
                    contract_hash=taskset.contract_hash,
                    split="train",
                    up_to=self.state.live_tasks,
                )
            Random(derive_seed(self.config.seed, "live tasks", self.state.cycle)).shuffle(tasks)
            self._live_tasks[key] = tasks
        return self._live_tasks[key]

    @property
    def traffic(self) -> TrafficStore | None:
        """What live traffic has left in the run folder; ``None`` where none was ever stored."""
        if self._traffic is None and traffic_path(self.folder.path).is_file():
            self._traffic = self._exit.enter_context(TrafficStore(traffic_path(self.folder.path)))
        return self._traffic

    @property
    def served_traffic(self) -> ServedTraffic | None:
        """The same as evidence; ``None`` where none was ever stored."""
        if self._served_traffic is None and self.traffic is not None:
            self._served_traffic = ServedTraffic(self.traffic)
        return self._served_traffic

    # -- weights ---------------------------------------------------------------------------------------------------------

    async def train(
        self, batch: TrainingBatch, loss: LossConfig, lr: float, updates: UpdatesConfig | None = None
    ) -> dict[str, Any]:
        """One optimizer update on a batch, or several."""
        with self.clock.phase("train"):
            return dict(await self.trainer.step(batch, loss, lr, updates))

    async def appraise(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with advantages from the critic, and with what the policy and the critic say of it before any update."""
        rl = self.recipe.rl
        with self.clock.phase("train"):
            logprobs, values = await self.trainer.values(batch.samples)
        batch = appraise(batch, values, rl.gae)
        if not rl.loss.build().needs_proximal:
            return batch
        samples = (replace(each, proximal_logprobs=row) for each, row in zip(batch.samples, logprobs, strict=True))
        return replace(batch, samples=tuple(samples))

    async def start_teacher(self) -> None:
        """Starts what scores this stage's samples besides the policy, if there is any and it is not there yet."""
        if scorer := scorer_of(self.config, self.state.cycle, self.state.arm):
            with self.clock.phase("setup"):
                await self.workers.teachers.start(scorer)

    async def teach(self, batch: TrainingBatch) -> TrainingBatch:
        """The batch with the log-probabilities of the stage's teacher or reference, if it has one."""
        scorer = scorer_of(self.config, self.state.cycle, self.state.arm)
        if scorer is None:
            return batch
        with self.clock.phase("train"):
            return await self.workers.teachers.teach(batch, scorer)

    async def reset_trainer(self, version_id: str | None) -> None:
        """Starts the trainer from a version (or the base model) with a fresh optimizer."""
        uri = None if version_id is None else str(self.folder.path / self.registry.get(version_id).weights_uri)
        with self.clock.phase("setup"):
            await self.trainer.reset(uri)

    async def publish(self) -> dict[str, Any]:
        """Moves the trainer's weights into the rollout engine as the next policy version, and has the engine prove it."""
        receipt = await self._publish_as(self.state.policy_version + 1)
        self.state.policy_version += 1
        return receipt

    async def begin_precision(self) -> None:
        """Has a rollout engine that quantizes do so in reinforcement learning alone: what is measured is what will be served.

        A stage that plays on it, and follows one that computes the other way, begins with this.
        """
        if self.config.engine.quantization is not None:
            await self._publish_as(self.state.policy_version)

    async def _publish_as(self, policy_version: int) -> dict[str, Any]:
        with self.clock.phase("weight_sync"):
            manifest = await self.trainer.publish(policy_version)
            receipt = await self.workers.engines.update_weights(manifest, full_precision=self.state.stage is not Stage.LEARN)
            await self._prove(policy_version)
        return receipt

    async def _prove(self, policy_version: int) -> None:
        """The engine scores a probe as the trainer does, or the run stops: wrong weights never make a rollout."""
        probe = await self.probe()
        require_equal(probe["logprobs"], await self.engine.logprobs(probe["token_ids"]), f"after update {policy_version}")

    async def probe(self) -> dict[str, Any]:
        """A few tokens, ``token_ids``, and how the trainer scores them, ``logprobs``."""
        task = self.training_task(self.state.deployed, 0)
        token_ids = list(self.renderer.prompt(task.prompt))[-PROBE_TOKENS:]
        return {"token_ids": token_ids, "logprobs": await self.trainer.logprobs(token_ids)}

    def require_holder(self, client: InferenceClient, version: ModelVersion) -> None:
        """
        Raises:
            EvergradError: ``client`` is the serving engine and it serves other weights than those to be measured.
        """
        standby = self.serving.standby
        if client is self.engine or (standby is not None and client is standby.client and standby.version == version):
            return
        if self.serving.version and self.serving.version.weights_uri == version.weights_uri:
            return
        serves = self.serving.version.version_id if self.serving.version else "nothing"
        raise EvergradError(
            f"{version.version_id} must be measured, but the serving engine serves {serves}",
            where=PRODUCTION,
            hint="run 'evergrad model rollback', then run again",
        )

    async def checkpoint(self, waiting: BufferState | None = None) -> None:
        """Saves trainer, buffer and state together: the folder first, then the state that names it, then old folders go."""
        with self.clock.phase("store"):
            state = self.state
            name = f"c{state.cycle:03d}-{state.stage.value}-{state.step:05d}"
            target = self.folder.checkpoints / name
            await self.trainer.save(str(target))
            if waiting is not None:
                write_buffer_state(target / WAITING, waiting)
            state.checkpoint = name
            self.save_state()
            self.folder.prune_checkpoints(name)

    def waiting_groups(self) -> BufferState:
        """What the last checkpoint knows of this stage's buffer."""
        path = self.folder.checkpoints / (self.state.checkpoint or "") / WAITING
        if self.state.step and path.exists():
            return read_buffer_state(path)
        return BufferState(next_index=self.state.group)

    def version_id(self, note: str) -> str:
        return f"{self.config.name}-c{self.state.cycle}-{note}"

    async def follow(self) -> None:
        """Serves what ``production`` points at; a move of the alias that this run did not make is told."""
        version, known = await self.serving.follow(), self.state.serving
        if version is None or version.version_id == known:
            return
        self.state.serving = version.version_id
        move = self.registry.history(PRODUCTION)[-1]
        own = version.version_id in map(self.version_id, ("rl", "sft", "prompt", "merge"))
        by_gate = move.action != "rollback" and not move.verdict.get("evidence", {}).get("by_hand")
        if known is not None and not (own and by_gate):
            self.event(f"{PRODUCTION} was moved by hand: {known} → {version.version_id} ({move.action}: {move.reason})")

    # -- start -----------------------------------------------------------------------------------------------------------

    @property
    def _threads(self) -> int:
        """Of each worker."""
        return max(1, self.cores // 2) if self.config.placement.mode == "disaggregated" else self.cores

    async def follow_base(self) -> None:
        """Has the workers be on this cycle's base model; they are, unless it is another one than that of the cycle before."""
        if self.workers.base == self.base:
            return
        with self.clock.phase("setup"):
            await self._end_workers()
            await self._start_workers()
            await self._restore()

    async def _start_workers(self) -> None:
        workers = Workers(
            self.base,
            self.config,
            self._threads,
            self.registry,
            self.folder.path,
            self._restarts,
            tell_death=self.placement.report,
            replaceable=self._engine_is_replaceable,
            note=self.console.note,
        )
        self.workers = await workers.__aenter__()

    async def _end_workers(self) -> None:
        if hasattr(self, "workers"):
            await self.workers.__aexit__()

    def _engine_is_replaceable(self) -> bool:
        return self.recipe.rl.max_off_policy_steps > 0

    async def _restore(self) -> None:
        """Brings trainer and engine to the saved state."""
        state = self.state
        if state.checkpoint is not None:
            await self.trainer.load(str(self.folder.checkpoints / state.checkpoint))
        if state.policy_version > 0:
            await self._publish_as(state.policy_version)
