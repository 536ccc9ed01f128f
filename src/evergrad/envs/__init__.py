"""Turns data into tasks, tools and verified rewards.

Write an environment as one class (``examples/my_environment.py``), take its tasks through ``Taskset``, run one try through
``Episode``; ``test_environment`` says whether its rewards deserve to be trained on.
"""

from evergrad.envs._admission import AdmissionReport, Check, play, test_environment
from evergrad.envs._calls import Call, Malformed, format_call, parse_reply
from evergrad.envs._environment import (
    EnvError,
    Environment,
    EnvironmentConfig,
    TaskRow,
    ToolCall,
    ToolError,
    content_hash,
    reward,
    tool,
)
from evergrad.envs._episode import EnvironmentFault, Episode, Score, VerifierFault
from evergrad.envs._load import ENVIRONMENTS, environment_names, load_environment
from evergrad.envs._taskset import SPLITS, Taskset, split_of

__all__ = [
    "ENVIRONMENTS",
    "SPLITS",
    "AdmissionReport",
    "Call",
    "Check",
    "EnvError",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentFault",
    "Episode",
    "Malformed",
    "Score",
    "TaskRow",
    "Taskset",
    "ToolCall",
    "ToolError",
    "VerifierFault",
    "content_hash",
    "environment_names",
    "format_call",
    "load_environment",
    "parse_reply",
    "play",
    "reward",
    "split_of",
    "test_environment",
    "tool",
]
