"""The nouns that travel between rooms.

Every value that crosses a room's border is defined here, frozen, with a worked example. The file imports neither torch nor
any room, so that the client, the command line and the tests of one room load nothing they do not need.

The walk of one rollout, and the noun at each stop::

    envs.Taskset ──Task──▶ rollouts.run_rollout ──Rollout──▶ rollouts.assign_advantages ──TrainingSample──▶
    rollouts.Buffer ──TrainingBatch──▶ training.Trainer ──tensors, policy_version──▶ transfer ──▶ inference engine
    registry ──ModelVersion──▶ evals.evaluate ──EvalReport──▶ evals.gate ──Verdict──▶ registry.promote

With a canary, the verdict begins a release instead, and live sessions decide where it ends::

    registry.releases ──Release──▶ inference.Front ──Rollout──▶ loop ──SessionOutcome──▶ evals.rule_on_canary ──▶ registry

Beside it, ``ledger`` keeps a ``CostEntry`` for the core-seconds of each phase; the report puts them next to what they bought.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import PurePath
from typing import Any, Literal


class EvergradError(Exception):
    """An error for the user: what went wrong, where, and what to do next.

    >>> str(EvergradError("no chat template", where="models/my-model", hint="add chat_template.jinja to the folder"))
    'no chat template (models/my-model). Next: add chat_template.jinja to the folder'
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        place = f" ({where})" if where else ""
        advice = f". Next: {hint}" if hint else ""
        super().__init__(f"{what}{place}{advice}")


class InputError(EvergradError):
    """What the user gave cannot be used as it is; the command line answers with exit code 2, to a failure with 1."""


class Outcome(StrEnum):
    """How a rollout ended; exactly one of these.

    Only ``SCORED`` and ``POLICY_FAULT`` enter a gradient or a baseline. The other two are counted, priced and retried.
    """

    SCORED = "scored"
    """The verifier gave a finite reward, zero included."""
    POLICY_FAULT = "policy_fault"
    """The model's own doing: out of turns or tokens, truncated, unparsable to the end. Scored by policy (default 0)."""
    ENVIRONMENT_FAULT = "environment_fault"
    """A tool, sandbox, engine or network failed; says nothing about the policy."""
    VERIFIER_FAULT = "verifier_fault"
    """The verifier raised, timed out, or gave no finite number."""

    @property
    def trainable(self) -> bool:
        return self in (Outcome.SCORED, Outcome.POLICY_FAULT)


class FinishReason(StrEnum):
    """Why one completion ended. ``LENGTH`` is the only truncation; it is never guessed from the last token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and seconds that were spent; adds with ``+``. Says what was used; what it cost is the ledger's word.

    >>> Usage(prompt_tokens=40, cached_tokens=32, completion_tokens=9) + Usage(prompt_tokens=60, completion_tokens=5)
    Usage(prompt_tokens=100, cached_tokens=32, completion_tokens=14, seconds=0.0)
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused; part of ``prompt_tokens``."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """Wall seconds between request and answer, queueing included."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    >>> Message("user", "Please refund order 50F.").as_dict()
    {'role': 'user', 'content': 'Please refund order 50F.'}
    """

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    content: str

    def as_dict(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


def system_message(content: str, added: str) -> str:
    """The text of a system message to which a version's own prompt was added, on a line of its own: the one rule, for tasks
    that are rendered here and for conversations that customers send.

    >>> system_message("Tools: find(item)", "Call one tool at a time."), system_message("", "Be brief.")
    ('Tools: find(item)\\nCall one tool at a time.', 'Be brief.')
    """
    return "\n".join(each for each in (content, added) if each)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What a model is told of one tool.

    >>> ToolSpec("refund", "if window open", {"id": "str", "amount": "int"}).signature
    'refund(id, amount): if window open'
    """

    name: str
    description: str
    parameters: Mapping[str, str]
    """Parameter name to type name, in the order of the function's signature."""

    @property
    def signature(self) -> str:
        note = f": {self.description}" if self.description else ""
        return f"{self.name}({', '.join(self.parameters)}){note}"


@dataclass(frozen=True, slots=True)
class Limits:
    """The budget of one rollout; every await inside it is bounded by one of these."""

    max_turns: int = 6
    max_tokens_per_turn: int = 32
    max_total_tokens: int = 512
    """Prompt and completion tokens of the longest turn together."""
    tool_timeout_s: float = 10.0
    score_timeout_s: float = 10.0
    generate_timeout_s: float = 300.0
    rollout_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do, before anyone tries it.

    >>> task = Task("support_desk/3f9a", "support_desk", (Message("user", "Please refund order 50F."),))
    >>> task.limits.max_turns
    6
    """

    task_id: str
    """``environment/content-hash``: equal content has an equal id, wherever and whenever it was made."""
    environment: str
    prompt: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    limits: Limits = field(default_factory=Limits)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the environment needs to run and verify the task; plain JSON values. ``metadata["slice"]`` names a slice that
    reports break scores down by."""

    def with_system_prompt(self, text: str) -> Task:
        """The same task as a version with this system prompt is asked it; the id stays, so that the two can be paired.

        >>> task = Task("desk/3f9a", "desk", (Message("user", "Refund 50F."),))
        >>> [each.content for each in task.with_system_prompt("Be brief.").prompt]
        ['Be brief.', 'Refund 50F.']
        """
        if not text:
            return self
        before, *rest = (
            self.prompt if self.prompt and self.prompt[0].role == "system" else (Message("system", ""), *self.prompt)
        )
        return dataclasses.replace(self, prompt=(Message("system", system_message(before.content, text)), *rest))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``logprobs`` of a completion are those of this very distribution.

    >>> Sampling(temperature=0.0).greedy
    True
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    """A stop token ends the completion and is its last token."""
    seed: int | None = None
    min_p: float = 0.0
    """Least probability of a token that is kept, as a share of the likeliest one's."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the token that completes one is its last."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """Tokens ``[start, end)`` of a completion were sampled under ``policy_version``."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled, as sampled.

    >>> done = Completion((5, 9, 2), (-0.1, -0.7, -0.01), FinishReason.STOP, (PolicySpan(4, 0, 3),))
    >>> done.min_policy_version
    4
    """

    token_ids: tuple[int, ...]
    """Sampled ids, the stop token included."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each sampled id under the distribution it was drawn from; same length."""
    finish_reason: FinishReason
    policy_spans: tuple[PolicySpan, ...]
    """Cover all tokens, in order, without gap."""
    usage: Usage = Usage()

    @property
    def min_policy_version(self) -> int:
        return min(span.policy_version for span in self.policy_spans)

    @property
    def max_policy_version(self) -> int:
        return max(span.policy_version for span in self.policy_spans)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call inside a rollout.

    ``messages`` are those that are new since the turn before: what the model was shown, then what it said.
    """

    messages: tuple[Message, ...]
    prompt_token_ids: tuple[int, ...]
    """The whole context of this call, exactly as the engine saw it."""
    completion: Completion
    reward: float | None = None
    """What the environment gave for this turn alone; ``None`` where it gives none. It is learned from, beside the rollout's
    reward, and is no part of a score."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One try at one task, ended.

    >>> Rollout("r1", "g1", "colors/ab12", (), Outcome.SCORED, 1.0).outcome.trainable
    True
    """

    rollout_id: str
    group_id: str
    task_id: str
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float | None
    """Finite for ``SCORED`` and ``POLICY_FAULT``; ``None`` for the two faults that say nothing about the policy."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    usage: Usage = Usage()
    source: str = "train"
    """``train``, ``eval``, ``demonstration`` or ``live``."""
    slice: str = ""
    fault: str = ""
    """Why it is not ``SCORED``; empty otherwise."""
    temperature: float = 1.0
    gold: float | None = None
    """What the environment's gold verifier says of an audited rollout; ``None`` of all others."""
    contract: str = ""
    """Hash of the tools' schema and descriptions that it was made under."""

    @property
    def success(self) -> bool:
        return self.reward is not None and self.reward >= 1.0


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Rollouts of one task that share a baseline."""

    group_id: str
    rollouts: tuple[Rollout, ...]
    teacher_prompts: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """By the ids of a prompt, those of the prompt that a teacher reads in its place; empty when it reads the same."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One conversation of live traffic, as it was stored: with its customer's consent, and redacted.

    >>> said = (Message("user", "Where is lamp 7?"), Message("assistant", "It is on shelf 31."))
    >>> trace = Trace("chatcmpl-1", said, outcome={"shelf": 31})
    >>> trace.request, trace.replies
    ('Where is lamp 7?', ('It is on shelf 31.',))
    """

    trace_id: str
    """Id of the first completion in it."""
    messages: tuple[Message, ...]
    """From the system message on, where there is one; the last is the model's."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the client sent along."""
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """What became of it, as feedback said; later feedback overrides earlier, key by key."""
    score: float | None = None
    """The last explicit score, in [0, 1]; ``None`` while nobody gave one."""
    version_id: str = ""
    """Who answered last."""

    @property
    def request(self) -> str:
        """What the user said first."""
        return next((each.content for each in self.messages if each.role == "user"), "")

    @property
    def replies(self) -> tuple[str, ...]:
        """What the model said, turn by turn."""
        return tuple(each.content for each in self.messages if each.role == "assistant")

    @property
    def tool_results(self) -> tuple[str, ...]:
        """What the tools answered, in order."""
        return tuple(each.content for each in self.messages if each.role == "tool")


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One token sequence to learn from; all tuples but ``teacher_token_ids`` have the same length.

    Only positions with ``loss_mask`` 1 are trained; there, ``logprobs`` and ``advantages`` hold the behaviour log-probability
    and the advantage, elsewhere 0.0. For supervised samples ``advantages`` are the tokens' weights, 1.0 as a rule; of a
    preference pair the chosen answer has 1.0 and the rejected one −1.0.

    >>> sample = TrainingSample((7, 8, 9), (0, 1, 1), (0.0, -0.5, -0.2), (0.0, 1.0, 1.0), 3, 3)
    >>> sum(sample.loss_mask)
    2
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    min_policy_version: int
    max_policy_version: int
    temperature: float = 1.0
    """Of the distribution that ``logprobs`` belong to; the trainer scores under the same one."""
    rollout_id: str = ""
    """Samples that share it are parts of one rollout, and together count as one; empty for a sample that is a whole one."""
    group_id: str = ""
    """Which samples belong together: the rollouts of a task, the two answers of a preference pair. Empty when none do."""
    reference_logprobs: tuple[float, ...] | None = None
    """Of a frozen reference, or of a teacher; ``None`` when there is none, or the trainer shall compute them."""
    proximal_logprobs: tuple[float, ...] | None = None
    """Of the policy before the first update on this batch, when several are made on it."""
    rewards: tuple[float, ...] | None = None
    """What was earned right after each token; there when advantages come from a critic."""
    values: tuple[float, ...] | None = None
    """What the critic expected before each token, before the first update on this batch."""
    returns: tuple[float, ...] | None = None
    """What it should have expected; the critic's targets."""
    teacher_token_ids: tuple[int, ...] | None = None
    """The same tokens after the prompt that a teacher reads, when that is another; of another length, with the same end. There
    until the teacher has read them."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Samples of one step. The loss divides by ``num_valid_tokens``, however the batch is cut into micro-batches."""

    samples: tuple[TrainingSample, ...]
    num_valid_tokens: int
    """Positions with ``loss_mask`` 1 over all samples, zero-advantage ones included, over-age ones excluded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures of the data itself: reward, staleness, lengths, outcome counts. They ride with the batch they describe."""
    num_rollouts: int | None = None
    """Rollouts with a mask in the whole optimizer step, when this batch is only a part of it; counted here when ``None``.
    A part holds all samples of each of its rollouts."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A checkpoint that may be evaluated, promoted and served."""

    version_id: str
    parent_id: str | None
    policy_version: int
    weights_uri: str
    """A folder: whole Hugging Face weights, or a PEFT adapter whose config names its base."""
    base_model: str
    recipe_hash: str
    created_at: str
    """UTC, ISO 8601."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    """Added to the system message of every conversation: as much a part of the version as its weights. Empty for none."""
    merged_id: str | None = None
    """The other parent of a merge, whose weights were brought into those of ``parent_id``; ``None`` for all other versions."""

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the versions that it was made from; two for a merge, none for a first one."""
        return tuple(each for each in (self.parent_id, self.merged_id) if each is not None)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Scores of one version on one suite, one entry per task, so that two reports can be paired.

    >>> report = EvalReport("v1", "support_desk@v1/gate", {"t1": 1.0, "t2": 0.0}, suite_hash="ab")
    >>> report.mean
    0.5
    """

    version_id: str
    suite: str
    scores: Mapping[str, float]
    """Task id to reward; policy faults score 0, the other faults are absent here and listed in ``missing``."""
    suite_hash: str
    """Over the task ids, limits, sampling settings and verifier: reports pair only when it agrees."""
    missing: tuple[str, ...] = ()
    slices: Mapping[str, str] = field(default_factory=dict)
    """Task id to slice name."""
    usage: Usage = Usage()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    gold: Mapping[str, float] = field(default_factory=dict)
    """Task id to gold score, of the tasks that were audited."""

    @property
    def mean(self) -> float | None:
        return sum(self.scores.values()) / len(self.scores) if self.scores else None

    def slice_means(self) -> dict[str, float]:
        """Mean score by slice name; empty when no task has one."""
        grouped: dict[str, list[float]] = {}
        if not any(self.slices.get(task_id) for task_id in self.scores):
            return {}
        for task_id, score in self.scores.items():
            grouped.setdefault(self.slices.get(task_id) or "no slice", []).append(score)
        return {name: sum(values) / len(values) for name, values in sorted(grouped.items())}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's ruling, with the numbers it rests on."""

    promote: bool
    reasons: tuple[str, ...]
    """One sentence each; for a refusal, all that failed."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: n, wins, losses, delta, ci95, p_value, alpha, guards, costs, report hashes."""
    candidate_id: str = ""
    incumbent_id: str | None = None


class Side(StrEnum):
    """Which of the two versions of a release answers a session."""

    INCUMBENT = "incumbent"
    """What the alias serves; the predecessor, should the candidate take its place."""
    CANDIDATE = "candidate"


class ReleaseState(StrEnum):
    """Where a release stands; it ends in one of the last two."""

    SHADOW = "shadow"
    """The candidate answers copies of live requests, and nobody sees what it says."""
    CANARY = "canary"
    """The candidate answers a share of the live sessions."""
    PROMOTED = "promoted"
    """The alias serves the candidate."""
    ROLLED_BACK = "rolled_back"
    """The candidate answers nobody; the alias serves what it served before."""

    @property
    def is_open(self) -> bool:
        return self in (ReleaseState.SHADOW, ReleaseState.CANARY)


@dataclass(frozen=True, slots=True)
class Release:
    """A candidate on its way from the gate to its alias, as the registry knows it.

    >>> Release(1, "production", "v2", "v1", {"shares": [0.05]}, ReleaseState.CANARY, 0.05, "").salt
    'production/v2/1'
    """

    release_id: int
    alias: str
    candidate_id: str
    incumbent_id: str
    plan: Mapping[str, Any]
    """What was registered before the candidate met any request: shares, outcomes, level; JSON values."""
    state: ReleaseState
    share: float
    """Of the sessions, in [0, 1]: what the candidate answers."""
    since: str
    """UTC, ISO 8601: when it came to this state and share."""

    @property
    def salt(self) -> str:
        """What sessions are dealt by, so that not the same ones are the first to meet every candidate."""
        return f"{self.alias}/{self.candidate_id}/{self.release_id}"


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """What came of one live session during a canary.

    >>> SessionOutcome("live-7", Side.CANDIDATE, 1.0, share=0.05).score
    1.0
    """

    session_id: str
    side: Side
    score: float | None
    """In [0, 1]; ``None`` where a fault of engine, tools or verifier left nothing to score."""
    share: float
    """Of the sessions that the candidate answered when this one began: the chance with which it was dealt to the candidate."""
    by_customer: bool = False
    """A customer's, who came by himself; else one that the loop played."""


@dataclass(frozen=True, slots=True)
class CostEntry:
    """One priced quantity, append-only.

    >>> CostEntry("k", "cycle-1", "rollout", "cpu_core_s", Decimal("120"), Decimal("0.00001"), Decimal("0.0012")).usd
    Decimal('0.0012')
    """

    idempotency_key: str
    subject: str
    """What it was spent on: a run, cycle, version or task."""
    phase: str
    resource: str
    quantity: Decimal
    unit_price: Decimal | None
    """USD per unit of ``resource``; ``None`` when the price book does not know it."""
    usd: Decimal | None
    """``quantity × unit_price``; ``None``, never 0, when unpriced."""
    price_book: str = ""
    """Hash of the price book that priced it."""
    at: str = ""
    """UTC, ISO 8601."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def plain(value: Any, nonfinite: Literal["name", "null"] = "name") -> Any:
    """``value`` as JSON values only. Nouns become objects, money keeps its digits.

    Args:
        nonfinite: What becomes of a float that JSON has no word for: its name (``"NaN"``), so that a record says what was
            wrong, or null, for readers that expect a number or none.

    Raises:
        TypeError: for anything that has no obvious JSON form.

    >>> plain({"usd": Decimal("0.10"), "loss": float("nan"), "outcome": Outcome.SCORED, "span": PolicySpan(4, 0, 3)})
    {'usd': '0.10', 'loss': 'NaN', 'outcome': 'scored', 'span': {'policy_version': 4, 'start': 0, 'end': 3}}
    >>> plain({"loss": float("inf"), "lr": 0.1}, nonfinite="null")
    {'loss': None, 'lr': 0.1}
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Enum):
        return plain(value.value, nonfinite)
    if isinstance(value, (str, Decimal, PurePath)):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if nonfinite == "null":
            return None
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name), nonfinite) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner, nonfinite) for key, inner in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(plain(inner, nonfinite) for inner in value)
    if isinstance(value, (list, tuple)):
        return [plain(inner, nonfinite) for inner in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def strict_json(value: Any, *, indent: int | None = None) -> str:
    """``value`` as JSON text that every strict parser reads; equal values give equal text (keys are sorted).

    >>> strict_json({"b": float("inf"), "a": (1, 2)})
    '{"a":[1,2],"b":"Infinity"}'
    """
    separators = (",", ": ") if indent else (",", ":")
    return json.dumps(plain(value), allow_nan=False, sort_keys=True, ensure_ascii=False, indent=indent, separators=separators)
