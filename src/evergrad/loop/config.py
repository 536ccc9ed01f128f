"""The configuration of one run: what to learn, on what, for how much, and what the world does meanwhile.

Rooms keep the settings they need next to their own code; here they are put together. The resolved result is written to
``config.toml`` in the run folder.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from evergrad.config import Config, found_model, found_path, nearest
from evergrad.evals import BLOCKS, AuditConfig, CanaryConfig, GateConfig
from evergrad.inference.backends import BackendConfig, require_servable
from evergrad.ledger import NOTHING
from evergrad.loop.distill import DistillConfig
from evergrad.loop.triggers import WatchConfig
from evergrad.rollouts import ESTIMATORS, GaeConfig, OverlongConfig
from evergrad.training import (
    CriticConfig,
    LoraConfig,
    LossConfig,
    ScheduleConfig,
    UpdatesConfig,
    require_adapter,
    require_ranks,
)
from evergrad.training.sinks import SinkConfig
from evergrad.transfer import TransferConfig
from evergrad.transfer.codecs import CODECS


class EnvironmentConfig(Config):
    """Which environment, and its own settings."""

    name: str
    """A registered name or the path of a ``.py`` file."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Handed to the environment, which validates them."""

    @field_validator("name")
    @classmethod
    def _found(cls, name: str, info: ValidationInfo) -> str | None:
        return found_path(name, info) if name.endswith(".py") else name


class BudgetConfig(Config):
    """The run ends when the first of these is spent; a cycle under way is finished with what is left."""

    cycles: int = Field(1, ge=1)
    usd: float | None = Field(None, gt=0)
    """US dollars over the whole run, resumed parts included."""
    minutes: float | None = Field(None, gt=0)
    """Wall minutes over the whole run, resumed parts included."""
    hurdle: float = Field(0.0, ge=0)
    """With a ``[worth]``: reinforcement learning stops when the lower bound of what the next dollar brings in falls below
    ``1 + hurdle`` dollars. 0.2 asks for a return of a fifth."""

    def spent(self, usd: float | None, wall_s: float) -> str | None:
        """Which budget of money or time is spent, or cannot be kept any more; ``None`` while there is some of both."""
        if self.usd is not None and usd is None:
            return f"the budget of ${self.usd:g} cannot be kept: something that the run used has no price"
        if self.usd is not None and usd is not None and usd >= self.usd:
            return f"the budget of ${self.usd:g} is spent"
        if self.minutes is not None and wall_s >= 60 * self.minutes:
            return f"the budget of {self.minutes:g} minutes is spent"
        return None


class WarmStartConfig(Config):
    """Supervised steps on demonstrations before reinforcement learning."""

    demonstrations: int = Field(64, ge=0)
    """On the contract that is deployed now; 0 skips the warm start."""
    replay: int = Field(0, ge=0)
    """Demonstrations on each earlier contract, mixed in so that it is not forgotten."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the environment's settings for demonstrations, such as ``difficulty = "easy"``."""
    batch_size: int = Field(2, ge=1)
    """Demonstrations in one optimizer step."""
    epochs: int = Field(1, ge=1)
    lr: float = Field(1e-3, gt=0)


class RLConfig(Config):
    """Reinforcement learning: groups of rollouts, one batch a step, one or more optimizer updates on it."""

    steps: int = Field(11, ge=0)
    groups_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    tasks: Literal["in_order", "informative"] = "in_order"
    """``informative``: slices of tasks whose rewards differ most per token give more groups, by what the last steps showed."""
    replace_groups: int = Field(0, ge=0)
    """Groups a step whose rewards are all equal, and which others replace before they are taken as they are: no gradient comes
    from them, and Adam makes a step of full length out of the few that are left (dynamic sampling, arXiv 2503.14476)."""
    lr: float = Field(4e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises to ``lr``. Adam's first step moves every weight by the whole rate, whatever the
    size of its gradient; a few groups decide that gradient."""
    final_lr_share: float = Field(1.0, gt=0, le=1)
    """Of ``lr`` at the last of ``steps``; after the warmup the rate falls to it in a line, so that the weights that are kept do
    not depend on the last few groups."""
    temperature: float = 1.0
    """Of the rollouts, > 0; the trainer scores their tokens under the same one."""
    advantage: str = "group_mean"
    """A line of ``rollouts/advantages``: ``group_mean``, ``group_normalized``, ``leave_one_out``; turn by turn ``turn_mean``
    and ``turn_normalized``; over the whole batch ``reinforce_pp`` (one rollout a task is enough) and ``reinforce_pp_baseline``
    (several); or ``generalized`` from a critic."""
    turn_discount: float = Field(1.0, gt=0, le=1)
    """γ of ``turn_mean`` and ``turn_normalized``: what a reward one turn later is worth."""
    gae: GaeConfig = Field(default_factory=GaeConfig)
    """For advantage ``generalized``: one for each token or turn."""
    overlong: OverlongConfig | None = None
    """What long rollouts pay; nothing when absent."""
    loss: LossConfig = Field(default_factory=lambda: LossConfig(name="policy_gradient"))
    distill: DistillConfig | None = None
    """The teacher, for loss ``reverse_kl`` with advantage ``constant``; none when absent."""
    updates: UpdatesConfig = Field(default_factory=UpdatesConfig)
    max_off_policy_steps: int = Field(0, ge=0)
    """How many steps old a trained token may be. 0 is synchronous, and repeats bit for bit."""
    stop_at_reward: float | None = None
    """Ends the phase early when the mean reward of the last three steps reaches this."""
    replay_share: float = Field(0.25, ge=0, lt=1)
    """Share of groups that come from earlier contracts, when there are any."""
    traffic_share: float = Field(0.25, ge=0, lt=1)
    """Share of groups whose tasks ``evergrad traffic tasks`` has made of live traffic, while there are any: each comes once a
    cycle."""

    def lr_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0.

        >>> [round(RLConfig(steps=11, lr=0.4, warmup_steps=3).lr_at(step), 9) for step in (0, 1, 3, 10)]
        [0.1, 0.2, 0.4, 0.4]
        >>> [round(RLConfig(steps=11, lr=0.4, final_lr_share=0.5).lr_at(step), 9) for step in (0, 5, 10)]
        [0.4, 0.3, 0.2]
        """
        schedule = ScheduleConfig(lr=self.lr, warmup_steps=self.warmup_steps, shape="linear", final_share=self.final_lr_share)
        return schedule.at(step, self.steps)

    @model_validator(mode="before")
    @classmethod
    def _whole_distribution(cls, data: Any) -> Any:
        for key in ("top_p", "top_k", "min_p"):
            if isinstance(data, Mapping) and key in data:
                raise ValueError(
                    f"{key} samples from a part of the distribution, and the trainer scores under the whole of it, so every "
                    f"ratio would be wrong; leave {key} out, and lower temperature for fewer unlikely tokens"
                )
        return data

    @field_validator("temperature")
    @classmethod
    def _not_greedy(cls, value: float) -> float:
        if value <= 0.0:
            raise ValueError(
                f"temperature {value:g} is greedy: rollouts of a task are all equal, and have no gradient; set 1.0"
            )
        return value

    @model_validator(mode="after")
    def _sound(self) -> RLConfig:
        if self.advantage not in ESTIMATORS:
            raise ValueError(f"unknown advantage '{self.advantage}': {nearest(self.advantage, ESTIMATORS)}")
        if self.gae != GaeConfig() and not ESTIMATORS[self.advantage].needs_critic:
            raise ValueError(f"advantage '{self.advantage}' does not read gae; set advantage = 'generalized', or leave gae out")
        if self.turn_discount != 1.0 and not ESTIMATORS[self.advantage].by_turn:
            raise ValueError(
                f"advantage '{self.advantage}' does not go turn by turn, so it does not read turn_discount; set advantage = "
                "'turn_mean', or leave turn_discount out"
            )
        if self.advantage == "constant" and self.distill is None:
            raise ValueError("advantage 'constant' ignores the reward, so RL would learn nothing; set advantage = 'group_mean'")
        estimator = ESTIMATORS[self.advantage]
        if self.group_size < estimator.least_group:
            raise ValueError(
                f"advantage '{self.advantage}' needs group_size >= {estimator.least_group}: one rollout is its own mean; raise "
                "group_size, or set advantage = 'reinforce_pp'"
            )
        if estimator.of_batch is not None and self.group_size * self.groups_per_step < 2:
            raise ValueError(
                f"advantage '{self.advantage}' compares the rollouts of a batch, which has one; raise groups_per_step"
            )
        if estimator.least_group < 2 and self.replace_groups:
            raise ValueError(
                f"advantage '{self.advantage}' learns from groups of equal rewards, too, so none would be replaced; "
                "set replace_groups = 0, or advantage = 'group_mean'"
            )
        rule = self.loss.build()
        if rule.unit == "pair":
            raise ValueError(
                f"loss '{self.loss.name}' needs preference pairs, which rollouts do not have; use 'policy_gradient', or "
                "'evergrad train' with a file of pairs"
            )
        if self.max_off_policy_steps > 0 and not rule.corrects_staleness:
            raise ValueError(
                f"loss '{self.loss.name}' does not correct for stale tokens; use loss.name = 'policy_gradient', "
                "or anchor = 'behaviour', or max_off_policy_steps = 0"
            )
        if self.updates.total > 1 and not rule.needs_behaviour:
            raise ValueError(
                f"loss '{self.loss.name}' takes no ratio, so it cannot tell that the policy has moved since the first of "
                f"{self.updates.total} updates on a batch; use loss.name = 'ppo', or one update"
            )
        if self.updates.mini_batches > self.groups_per_step:
            raise ValueError(
                f"updates.mini_batches = {self.updates.mini_batches} cannot be dealt from {self.groups_per_step} groups; "
                f"set it to {self.groups_per_step} at most, or raise groups_per_step"
            )
        return self

    @model_validator(mode="after")
    def _sound_teacher(self) -> RLConfig:
        learns = self.loss.build().teacher
        if learns and self.distill is None:
            raise ValueError(
                f"loss '{self.loss.name}' learns from a teacher, and there is none; name one in rl.distill, or use "
                "loss.name = 'policy_gradient'"
            )
        if self.distill is None:
            return self
        if not learns:
            raise ValueError(
                f"loss '{self.loss.name}' asks no teacher; set loss = {{ name = 'reverse_kl' }}, or leave distill out"
            )
        if self.advantage != "constant":
            raise ValueError(
                f"a teacher takes the place of rewards, so advantage '{self.advantage}' would not be read; set "
                "advantage = 'constant'"
            )
        if self.overlong is not None:
            raise ValueError("a teacher takes the place of rewards, so nobody would pay for length; leave overlong out")
        return self


class RecipeConfig(Config):
    """How one cycle learns."""

    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    rl: RLConfig = Field(default_factory=RLConfig)


class TrialConfig(RecipeConfig):
    """The recipe of one cycle, for a change that is to be tried; the gate rules on what comes of it as on any other."""

    cycle: int = Field(ge=1)


class MergeConfig(Config):
    """Weights between those that serve and those of a refused candidate that was trained from them and scored higher."""

    shares: list[float] = Field(min_length=1)
    """How far from what serves (0) to the refused candidate (1), one a try, each once over the same two."""

    @field_validator("shares")
    @classmethod
    def _between(cls, shares: list[float]) -> list[float]:
        odd = [share for share in shares if not 0 < share < 1]
        if odd:
            raise ValueError(f"a share of {odd[0]:g} is no merge: 0 is what serves, 1 the refused candidate; set 0.5")
        if len(set(shares)) < len(shares):
            raise ValueError("the same share twice would be the same candidate; leave one of them")
        return shares


class ArmConfig(RecipeConfig):
    """One way of getting better, which competes with the others for the money of each later cycle."""

    name: str = Field(min_length=1)
    """Such as ``rl`` or ``demonstrations``; ``nothing`` always takes part, and needs no line."""
    prompts: list[str] = Field(default_factory=list)
    """Texts to add to the system message, one a try, over the weights that serve: an arm that has any trains nothing. A single
    word that ends in ``.txt`` or ``.md`` is the path of a file with the text."""
    merge: MergeConfig | None = None
    """Merges to try, such as ``{ shares = [0.5, 0.8] }``: an arm that has any trains nothing."""
    base_model: str | None = None
    """A smaller base model, named as ``model`` is: the arm trains it from its beginning, and its candidate is promoted when it
    is no worse than what serves and a success costs less. Open while what serves is on a larger one."""

    _found_base = field_validator("base_model")(found_model)

    @model_validator(mode="before")
    @classmethod
    def _trains_nothing(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or not (data.get("prompts") or data.get("merge")):
            return data
        given = {key: data.get(key) or {} for key in _NO_TRAINING}
        return {**data, **{key: {**_NO_TRAINING[key], **own} for key, own in given.items() if isinstance(own, Mapping)}}

    @field_validator("prompts")
    @classmethod
    def _texts(cls, prompts: list[str], info: ValidationInfo) -> list[str]:
        texts = [_text_of(prompt, info).strip() for prompt in prompts]
        if len(set(texts)) < len(texts) or "" in texts:
            raise ValueError("each prompt must be a text of its own, and none may be empty")
        return texts

    @model_validator(mode="after")
    def _one_thing_alone(self) -> ArmConfig:
        recipe = self.warm_start.demonstrations or self.warm_start.replay or self.rl.steps
        has = [what for what, given in (("prompts", self.prompts), ("a merge", self.merge)) if given]
        has += ["a base_model"] if has and self.base_model is not None else []
        if has and len(has) + bool(recipe) > 1:
            told = " and ".join([*has, *(["a recipe"] if recipe else [])])
            raise ValueError(f"arm '{self.name}' has {told}, so nobody could tell which of them helped; make an arm of each")
        if self.base_model is not None and not (self.warm_start.demonstrations or self.rl.steps):
            raise ValueError(
                f"arm '{self.name}' has a base_model and trains nothing, so its candidate would know nothing of the task; set "
                "warm_start.demonstrations, or rl.steps"
            )
        return self


_NO_TRAINING: Mapping[str, Mapping[str, int]] = {"warm_start": {"demonstrations": 0}, "rl": {"steps": 0}}


def _text_of(prompt: str, info: ValidationInfo) -> str:
    """The prompt, or what is in its file: a run keeps the text, so that nobody changes it by changing the file.

    Raises:
        ValueError: the file is not there, or is no text.
    """
    if not re.fullmatch(r"\S+\.(txt|md)", prompt):
        return prompt
    path = Path(str(found_path(prompt, info)))
    if not path.is_file():
        return prompt  # where no configuration file says beside what it would lie, as for every path
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the prompt in {path} cannot be read: {error}") from error


class EvalConfig(Config):
    """How versions are measured: greedily, on the gate split, one try a task."""

    n: int = Field(96, ge=1)
    """Tasks per suite."""
    chance: float = Field(0.0, ge=0, lt=1)
    """What a guess scores: 0 on the scale by which suites are compared. 0.25 where there are four choices."""
    concurrency: int = Field(64, ge=1)


class ContractChange(Config):
    """The world changes while the agent serves; for demonstrations and drills."""

    after_cycle: int = Field(1, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """New values of the deployed environment's settings, such as ``contract = "v2"``."""
    customers: dict[str, Any] = Field(default_factory=dict)
    """Settings by which what customers ask differs from then on, of which nobody tells the run."""


class WorthConfig(Config):
    """What serving is worth to you; from it, certificates say when a promotion has paid for its training."""

    usd_per_success: float = Field(ge=0)
    """US dollars that one success earns or saves."""
    attempts: float = Field(gt=0)
    """Attempts that a version serves until the next one takes its place."""

    @property
    def usd_per_score(self) -> float:
        """Dollars that a mean score higher by 1 is worth over the life of a version."""
        return self.usd_per_success * self.attempts


class TrafficConfig(Config):
    """Live traffic, played by the environment itself against the serving endpoint."""

    changes: list[ContractChange] = Field(default_factory=list)


class OptimizerSettings(Config):
    """AdamW. Its learning rate belongs to the stages: ``warm_start.lr`` and ``rl.lr``."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Largest L2 norm of the whole gradient; a longer one is scaled down to it."""

    @model_validator(mode="before")
    @classmethod
    def _no_rate(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "lr" in data:
            raise ValueError("each stage has its own learning rate: set learn.warm_start.lr and learn.rl.lr")
        return data


class TrainerSettings(Config):
    """Settings of the trainer that do not change during a run."""

    method: Literal["lora", "full"] = "lora"
    lora: LoraConfig = Field(default_factory=LoraConfig)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    micro_batch_tokens: int = Field(1024, ge=16)
    memory_gib: float | None = Field(None, gt=0)
    """What the tensors of each rank may take; micro-batches become smaller to fit, then activations are computed twice."""
    mixed_precision: bool | None = None
    """Computes with weights rounded to bfloat16; when absent, on CUDA only."""
    ranks: int = Field(1, ge=1)
    """Processes that hold the model in parts (FSDP) and share out each batch; with CUDA, one GPU each."""
    tensor_parallel: int = Field(1, ge=1)
    """How many of the ranks split every layer between them; divides ``ranks`` and the model's heads."""

    @model_validator(mode="after")
    def _ranks_fit(self) -> TrainerSettings:
        require_ranks(self.ranks, self.tensor_parallel, self.lora)
        return self


class PlacementConfig(Config):
    """Where workers run."""

    mode: Literal["colocated", "disaggregated"] = "colocated"
    """``colocated``: engine and trainer use all cores by turns. ``disaggregated``: each has half, and they overlap."""
    threads: int | None = Field(None, ge=1)
    """Cores to use; all by default."""
    replicas: int = Field(1, ge=1)
    """Engines that roll out, behind one router; each has its share of the engine's cores."""
    max_restarts: int = Field(3, ge=0)
    """How many dead workers are replaced before the run ends with the cause."""
    stuck_after_s: float = Field(60.0, gt=0)
    """A worker that is stuck, or says nothing, for so many seconds is ended and counts as dead."""


class RunConfig(Config):
    """One run of the loop."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Of the run folder and of its versions: letters, digits, ``.``, ``_`` and ``-``."""
    seed: int = 0
    model: str = "smollm2-135m"
    """``smollm2-135m``, ``tiny``, or a local Hugging Face folder."""
    environment: EnvironmentConfig
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    learn: RecipeConfig = Field(default_factory=RecipeConfig)
    """The first cycle."""
    adapt: RecipeConfig | None = None
    """Later cycles; the same as ``learn`` when absent."""
    arms: list[ArmConfig] = Field(default_factory=list)
    """In the place of ``adapt``: each later cycle takes the one with the best prospect of gain per dollar, or does nothing."""
    trials: list[TrialConfig] = Field(default_factory=list)
    """Recipes of single cycles, in the place of ``learn`` or ``adapt``."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    canary: CanaryConfig | None = None
    """What a candidate goes through between the gate and the alias; none when absent, and the alias moves at once."""
    audit: AuditConfig | None = None
    """How much of what the verifier says is judged by the environment's ``gold``, too; nothing when absent."""
    watch: WatchConfig = Field(default_factory=WatchConfig)
    traffic: TrafficConfig = Field(default_factory=TrafficConfig)
    trainer: TrainerSettings = Field(default_factory=TrainerSettings)
    transfer: TransferConfig = Field(default_factory=TransferConfig)
    critic: CriticConfig | None = None
    """For ``rl.advantage = "generalized"``, PPO's advantage (GAE); none when absent."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    engine: BackendConfig = Field(default_factory=BackendConfig)
    sinks: list[SinkConfig] = Field(default_factory=list)
    """Where the figures of each step go besides ``metrics.jsonl``."""
    worth: WorthConfig | None = None
    """What a success is worth; without it, certificates know only what lower cost pays back, and no training is stopped because
    it no longer pays."""
    price_book: str | None = None
    """Path of a TOML price book; the built-in one by default."""

    _found_model = field_validator("model")(found_model)
    _found_book = field_validator("price_book")(found_path)

    @model_validator(mode="after")
    def _sound(self) -> RunConfig:
        require_adapter(self.trainer.method, self.transfer)
        require_servable(self.engine, self.transfer, self.trainer.lora, self.placement.replicas)
        self._require_correction()
        if not CODECS[self.transfer.codec].exact:
            exact = " or ".join(repr(name) for name, codec in CODECS.items() if codec.exact)
            raise ValueError(
                f"transfer.codec = '{self.transfer.codec}' changes the weights on their way, and after an update a run proves "
                f"that the engine scores as the trainer does; use {exact}"
            )
        recipes = self.recipes
        if self.placement.mode == "disaggregated" and any(r.rl.max_off_policy_steps == 0 and r.rl.steps for r in recipes):
            raise ValueError(
                "placement.mode = 'disaggregated' overlaps rollouts with training, so rl.max_off_policy_steps must be >= 1"
            )
        asks = [r.rl.advantage for r in recipes if r.rl.steps and ESTIMATORS[r.rl.advantage].needs_critic]
        if asks and self.critic is None:
            raise ValueError(
                f"advantage '{asks[0]}' takes a critic's values, and there is none; add a [critic] table, "
                "or set rl.advantage = 'reinforce_pp'"
            )
        if self.critic is not None and not asks:
            raise ValueError("no stage would ask the critic; set rl.advantage = 'generalized', or leave [critic] out")
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names) or NOTHING in names:
            raise ValueError(
                f"arms are {', '.join(names)}; give each a name of its own, and leave '{NOTHING}' out: it always takes part"
            )
        if self.arms and self.adapt is not None:
            raise ValueError("arms take the place of adapt; make it one of them, or leave it out")
        if self.trainer.method == "lora" and self.trainer.lora.dora and any(arm.merge for arm in self.arms):
            raise ValueError(
                "adapters with DoRA cannot be merged; set trainer.lora.dora = false, or leave the arm with a merge out"
            )
        twice = [cycle for cycle, count in Counter(each.cycle for each in self.trials).items() if count > 1]
        if twice:
            raise ValueError(f"trials has two recipes for cycle {twice[0]}; leave one of them")
        if self.audit is not None and math.ceil(self.audit.share * self.eval.n) < self.audit.min_n:
            raise ValueError(
                f"audit.share = {self.audit.share:g} of eval.n = {self.eval.n} tasks never makes the {self.audit.min_n} pairs "
                "of audit.min_n: raise it, or lower that"
            )
        if self.eval.n < self.gate.min_n:
            raise ValueError(
                f"eval.n = {self.eval.n} tasks never make the {self.gate.min_n} pairs of gate.min_n: raise it, or lower that"
            )
        if self.traffic.changes and not self.watch.requests:
            raise ValueError("traffic.changes happen while traffic is watched: set watch.requests >= 1, or remove the changes")
        return self

    def _require_correction(self) -> None:
        if self.engine.quantization is None:
            return
        for rl in (recipe.rl for recipe in self.recipes if recipe.rl.steps):
            if not rl.loss.build().corrects_staleness:
                raise ValueError(
                    f"engine.quantization = '{self.engine.quantization}' samples from a policy near to the trainer's, not its "
                    f"own, and loss '{rl.loss.name}' as it is set does not correct for that; use loss.name = "
                    "'policy_gradient', or anchor = 'behaviour', or a correction, or leave quantization out"
                )

    @model_validator(mode="after")
    def _smaller_bases_can_be_ruled_on(self) -> RunConfig:
        for arm in (each for each in self.arms if each.base_model is not None):
            wants = f"arm '{arm.name}' tries another base_model"
            if arm.base_model == self.model:
                raise ValueError(f"{wants}, and '{arm.base_model}' is the run's own; name a smaller one, or leave it out")
            if self.worth is None or not self.worth.usd_per_success:
                raise ValueError(
                    f"{wants} to save dollars, which are weighed against gains in score by what a success is worth; add a "
                    "[worth] table with usd_per_success above 0, and attempts"
                )
            if self.gate.guard_margin is None:
                raise ValueError(f"{wants}, which must be shown to be no worse by gate.guard_margin; set it, such as 0.05")
            if self.gate.series == "e_lond":
                raise ValueError(f"{wants}, and there is no e-value of a saving; set gate.series = 'saffron'")
            if self.canary is not None:
                raise ValueError(
                    f"{wants}, and a canary compares versions on one base model only; leave the [canary] table or the arm out"
                )
            if self.engine.url is not None:
                raise ValueError(f"{wants}, and the server at engine.url holds one model; leave engine.url or the arm out")
            if self.eval.n < 2 * BLOCKS:
                raise ValueError(
                    f"{wants}, and the two versions take {BLOCKS} turns, each at two tasks or more: set eval.n to {2 * BLOCKS} "
                    "at least"
                )
        return self

    @model_validator(mode="after")
    def _teachers_are_there(self) -> RunConfig:
        for recipe, first in (
            (self.learn, True),
            (self.adapt, False),
            *((arm, False) for arm in self.arms),
            *((trial, trial.cycle == 1) for trial in self.trials),
        ):
            distill = None if recipe is None or not recipe.rl.steps else recipe.rl.distill
            if distill is None:
                continue
            start = f"{self.name}-c1-sft"
            if distill.frozen and self.trainer.method == "full":
                raise ValueError(
                    "full fine-tuning keeps no frozen reference that could teach; set trainer.method = 'lora', or "
                    f"rl.distill.version = '{start}'"
                )
            known = [start, f"{self.name}-c1-rl"] if not first and self.learn.rl.steps else [start]
            if distill.version is not None and distill.version not in known:
                raise ValueError(
                    f"rl.distill.version = '{distill.version}' is not there when the stage begins: "
                    f"{nearest(distill.version, known)}"
                )
            if first and distill.version is not None and not distill.hint:
                raise ValueError(
                    f"the first cycle learns from '{distill.version}' on, so that it would be its own teacher, with nothing to "
                    "teach; set rl.distill.hint = true, or name a model"
                )
        return self

    @property
    def release_plan(self) -> CanaryConfig | None:
        """The canary, where there is live traffic that it can be judged by."""
        return self.canary if self.watch.requests else None

    @property
    def bases(self) -> list[str]:
        """The base models that versions of this run may be on; its own comes first."""
        return list(dict.fromkeys([self.model, *(arm.base_model for arm in self.arms if arm.base_model is not None)]))

    @property
    def recipes(self) -> list[RecipeConfig]:
        """All that a cycle may follow: that of the first, of later ones, and of single ones."""
        return [self.learn, self.adapt or self.learn, *self.arms, *self.trials]

    def is_trial(self, cycle: int) -> bool:
        """Whether a cycle has a recipe of its own."""
        return any(each.cycle == cycle for each in self.trials)

    @property
    def ways(self) -> list[ArmConfig]:
        """What a later cycle can try; the one recipe there is, as ``adapt``, where no arms are named."""
        recipe = self.adapt or self.learn
        return self.arms or [ArmConfig(name="adapt", warm_start=recipe.warm_start, rl=recipe.rl)]

    def recipe(self, cycle: int, arm: str | None = None) -> RecipeConfig:
        """The recipe of a cycle, counted from 1, that tries ``arm``."""
        trial = next((each for each in self.trials if each.cycle == cycle), None)
        chosen = next((each for each in self.arms if each.name == arm), None)
        return trial or chosen or (self.learn if cycle == 1 or self.adapt is None else self.adapt)
