"""Figures for Prometheus: what the engine counts itself, read when it is asked, and how long requests took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from evergrad.inference._loop import StepLoop
from evergrad.inference.engine import Engine, Event, Request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_PREFIX = "evergrad_engine_"


class Metrics:
    """One engine's figures."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._first = self._histogram("first_token_seconds", "From a request's arrival to its first token", _SECONDS)
        self._whole = self._histogram("request_seconds", "From a request's arrival to the end of a completion", _SECONDS)
        self._prompts = self._histogram("prompt_tokens", "Tokens of a request's prompt", _TOKENS)
        self._ends = Counter(f"{_PREFIX}completions", "Completions by how they ended", ["reason"], registry=self._registry)

    def watch(self, steps: StepLoop) -> None:
        """Has the counters of the engine and of its loop read at every scrape."""
        self._registry.register(_EngineCollector(self._engine, steps))

    def began(self, asked: Request, seconds: float) -> None:
        """Its first token came, ``seconds`` after itself."""
        self._first.observe(seconds)
        self._prompts.observe(len(asked.token_ids))

    def ended(self, events: Sequence[Event], seconds: float) -> None:
        """Takes note of which of its events are last ones, ``seconds`` after the request came."""
        for event in events:
            if event.finish_reason is not None:
                self._ends.labels(str(event.finish_reason)).inc()
                self._whole.observe(seconds)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, says: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"{_PREFIX}{name}", says, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, steps: StepLoop) -> None:
        self._engine, self._steps = engine, steps

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        engine = self._engine
        for name, says, value in (
            ("steps", "Steps taken", engine.num_steps),
            ("tokens_drawn", "Tokens drawn", engine.num_drawn),
            ("tokens_computed", "Tokens that went through the model", engine.num_computed),
            ("prompt_tokens_cached", "Prompt tokens that were not computed, since the cache had them", engine.num_cached),
            ("tokens_guessed", "Tokens computed ahead on a guess", engine.num_drafted),
            ("guesses_kept", "Guessed tokens that were drawn", engine.num_accepted),
            ("preemptions", "Rows that gave their blocks back before their end", engine.num_preemptions),
            ("lockstep_misses", "Times that a step did not wait for an open session", self._steps.lockstep.num_misses),
        ):
            yield CounterMetricFamily(f"{_PREFIX}{name}", says, value=value)
        for name, says, level in (
            ("rows_running", "Rows that take part in steps", engine.num_running),
            ("rows_waiting", "Rows that wait for blocks or a place", engine.num_waiting),
            ("kv_usage", "Share of the cache's blocks that rows hold", engine.kv_usage),
            ("adapters", "Adapters that are loaded", len(engine.adapters)),
            ("paused", "1 while no step is taken", self._steps.paused),
            ("policy_version", "Of the weights that are live", engine.policy_version),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", says, value=level)
