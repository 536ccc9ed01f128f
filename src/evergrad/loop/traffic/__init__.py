"""Live traffic as what to learn from: stored with consent and redacted, turned into tasks, and forgotten on request.

::

    gateway ──▶ redact ──▶ TrafficStore ◀── feedback
                               │
                               ▼
    Environment.from_trace ◀─ convert ─▶ tasks for training, tasks kept aside ──▶ a cycle's RL ──▶ a version that says so
                               │                                                                        │
                               └── what overlaps with the gate's tasks is left out      forget ◀────────┘ names it and its cost
"""

from evergrad.loop.traffic.converting import Converted, convert
from evergrad.loop.traffic.evidence import CustomerOutcomes, ServedTraffic
from evergrad.loop.traffic.forgetting import Forgotten, Tainted, forget
from evergrad.loop.traffic.redaction import Redact, find_redactor
from evergrad.loop.traffic.sessions import DealtSession
from evergrad.loop.traffic.store import (
    LiveTask,
    Redacted,
    StoredTrace,
    TrafficError,
    TrafficStore,
    digest,
    traffic_path,
)

__all__ = [
    "Converted",
    "CustomerOutcomes",
    "DealtSession",
    "Forgotten",
    "LiveTask",
    "Redact",
    "Redacted",
    "ServedTraffic",
    "StoredTrace",
    "Tainted",
    "TrafficError",
    "TrafficStore",
    "convert",
    "digest",
    "find_redactor",
    "forget",
    "traffic_path",
]
