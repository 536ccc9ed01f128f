"""Runs tasks to scored rollouts and buffers them into fresh batches.

Knows no engine: it is handed a ``Generate``. The walk: ``run_group`` (``run_rollout`` × size) → ``Buffer.put`` →
``Buffer.take_batch`` → ``TrainingBatch``.
"""

from evergrad.rollouts._appraisal import appraise
from evergrad.rollouts._buffer import Buffer, BufferCounts, BufferStopped, NothingToLearn, Ticket
from evergrad.rollouts._buffer_state import BufferState, read_buffer_state, write_buffer_state
from evergrad.rollouts._renderer import Renderer, RendererError, extends
from evergrad.rollouts._run import (
    Generate,
    Sessions,
    check_training_sampling,
    derive_seed,
    greedy_rollout,
    run_group,
    run_groups,
    run_rollout,
)
from evergrad.rollouts._samples import CutSamples, assign_advantages, cut_samples
from evergrad.rollouts._scripted import FakeEngine, complete, demonstrate, scripted
from evergrad.rollouts._teaching import for_teacher, taught, with_hint
from evergrad.rollouts._writer import RolloutWriter, read_rollouts, rollout_json, step_name
from evergrad.rollouts.advantages import (
    ESTIMATORS,
    Estimator,
    GaeConfig,
    OverlongConfig,
    estimate,
    estimate_turns,
    generalized_advantages,
)
from evergrad.rollouts.selection import SliceRecord, draw_slice, informative_group_probability, neyman_shares

__all__ = [
    "ESTIMATORS",
    "Buffer",
    "BufferCounts",
    "BufferState",
    "BufferStopped",
    "CutSamples",
    "Estimator",
    "FakeEngine",
    "GaeConfig",
    "Generate",
    "NothingToLearn",
    "OverlongConfig",
    "Renderer",
    "RendererError",
    "RolloutWriter",
    "Sessions",
    "SliceRecord",
    "Ticket",
    "appraise",
    "assign_advantages",
    "check_training_sampling",
    "complete",
    "cut_samples",
    "demonstrate",
    "derive_seed",
    "draw_slice",
    "estimate",
    "estimate_turns",
    "extends",
    "for_teacher",
    "generalized_advantages",
    "greedy_rollout",
    "informative_group_probability",
    "neyman_shares",
    "read_buffer_state",
    "read_rollouts",
    "rollout_json",
    "run_group",
    "run_groups",
    "run_rollout",
    "scripted",
    "step_name",
    "taught",
    "with_hint",
    "write_buffer_state",
]
