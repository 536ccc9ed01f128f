"""The router against round-robin, least-loaded and session-hash, on an agent's load over simulated engines.

Sessions in groups of eight share a task's prompt, take 1 to 12 turns, and wait between turns for tools whose times have
a heavy tail. A fixed number of groups is under way at a time, as in a run. All rules work in the same router, with its queues,
limits and retries: what differs is the choice of the replica alone. Time is virtual; the engines' speeds are those of
``EngineSpeed``.

Run: ``python -m benchmarks.bench_router [--sessions 2000] [--replicas 16] [--groups-under-way 128]``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks import record
from benchmarks.simulated_engines import VOCABULARY, SimulatedEngine, run_virtually

from evergrad.inference import Router
from evergrad.inference._routing import CostRule, Option, Route, RoutingRule, spread
from evergrad.types import Sampling

GROUP_SIZE = 8
SYSTEM_TOKENS = 512
"""Tools and instructions, the same in every task."""


@dataclass(frozen=True)
class TurnPlan:
    """One turn of a session: what is drawn, and the tool that follows."""

    drawn: int
    tool_s: float
    tool_tokens: int


@dataclass(frozen=True)
class SessionPlan:
    session_id: str
    prompt: tuple[int, ...]
    seed: int
    turns: tuple[TurnPlan, ...]


def plan_load(sessions: int, seed: int) -> list[list[SessionPlan]]:
    """Groups of sessions; the same for every rule."""
    rng = Random(seed)
    system = tuple(rng.randrange(32_000) for _ in range(SYSTEM_TOKENS))
    groups = []
    for group in range(sessions // GROUP_SIZE):
        task = tuple(rng.randrange(32_000) for _ in range(rng.randint(64, 512)))
        depth = 1 + min(11, int(rng.expovariate(0.3)))
        groups.append(
            [
                SessionPlan(f"g{group}/{index}", (*system, *task), rng.getrandbits(48), _plan_turns(rng, depth))
                for index in range(GROUP_SIZE)
            ]
        )
    return groups


def _plan_turns(rng: Random, depth: int) -> tuple[TurnPlan, ...]:
    """About ``depth`` turns: siblings take the same task, and not the same way."""
    count = min(12, max(1, depth + rng.choice((-1, 0, 0, 1))))
    return tuple(
        TurnPlan(
            drawn=min(1024, max(8, int(rng.lognormvariate(math.log(96), 0.8)))),
            tool_s=min(120.0, 0.2 * rng.paretovariate(1.1)),
            tool_tokens=min(2048, max(8, int(rng.lognormvariate(math.log(128), 1.0)))),
        )
        for _ in range(count)
    )


class RoundRobin:
    """Each request to the next replica."""

    def __init__(self) -> None:
        self._count = -1

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        self._count += 1
        return options[self._count % len(options)].name


class LeastLoaded:
    """The replica with the fewest requests."""

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        return min(options, key=lambda each: (each.requests, spread(route.session or "", each.name))).name


class SessionHash:
    """All turns of a session to the replica that its id hashes to (rendezvous hashing)."""

    def choose(self, route: Route, options: Sequence[Option]) -> str:
        return min(options, key=lambda each: spread(route.session or "", each.name)).name


RULES: dict[str, Callable[[], RoutingRule]] = {
    "ours": CostRule,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "session_hash": SessionHash,
}


async def play(rule: RoutingRule, groups: Sequence[Sequence[SessionPlan]], replicas: int, under_way: int) -> dict[str, float]:
    """Runs the load to its end; virtual seconds."""
    loop = asyncio.get_running_loop()
    slots, latencies = asyncio.Semaphore(under_way), list[float]()
    prompt_tokens = cached_tokens = 0
    engines = [SimulatedEngine() for _ in range(replicas)]
    async with Router(rule) as router:
        for number, engine in enumerate(engines):
            await router.add(f"r{number}", engine)
        started = loop.time()

        async def session(plan: SessionPlan) -> None:
            nonlocal prompt_tokens, cached_tokens
            prompt = plan.prompt
            for number, turn in enumerate(plan.turns):
                asked = loop.time()
                sampling = Sampling(max_tokens=turn.drawn, seed=hash((plan.seed, number)))
                done = await router(prompt, sampling, session_id=plan.session_id)
                latencies.append(loop.time() - asked)
                prompt_tokens += done.usage.prompt_tokens
                cached_tokens += done.usage.cached_tokens
                await asyncio.sleep(turn.tool_s)
                shown = Random(hash((plan.seed, number, 1))).choices(range(VOCABULARY), k=turn.tool_tokens)
                prompt = (*prompt, *done.token_ids, *shown)

        async def group(plans: Sequence[SessionPlan]) -> None:
            async with slots:
                await asyncio.gather(*(session(plan) for plan in plans))

        await asyncio.gather(*(group(plans) for plans in groups))
        makespan = loop.time() - started
    latencies.sort()
    return {
        "prefix_hit_share": round(cached_tokens / prompt_tokens, 4),
        "turn_p50_s": round(latencies[len(latencies) // 2], 3),
        "turn_p99_s": round(latencies[int(len(latencies) * 0.99)], 3),
        "makespan_s": round(makespan, 1),
        "turns": len(latencies),
        "preemptions": sum(engine.num_preemptions for engine in engines),
        "prefilled_tokens": sum(engine.prefilled_tokens for engine in engines),
    }


def measure(name: str, sessions: int, replicas: int, under_way: int, seed: int) -> dict[str, float]:
    """Figures of one rule, in a process of its own."""
    began = time.process_time()
    figures = run_virtually(play(RULES[name](), plan_load(sessions, seed), replicas, under_way))
    return {**figures, "cpu_s": round(time.process_time() - began, 1)}


HIGHER_IS_BETTER = {"prefix_hit_share": True, "turn_p50_s": False, "turn_p99_s": False, "makespan_s": False}


def best_or_equal(figures: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Measure by measure, whether no other rule is better than ours; equal is what differs by less than half a percent."""
    return {
        name: all(
            figures["ours"][name] >= 0.995 * other[name] if higher else figures["ours"][name] <= 1.005 * other[name]
            for rule, other in figures.items()
            if rule != "ours"
        )
        for name, higher in HIGHER_IS_BETTER.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Routing rules on an agent's load.")
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--groups-under-way", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    load = (arguments.sessions, arguments.replicas, arguments.groups_under_way, arguments.seed)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {name: pool.submit(measure, name, *load) for name in RULES}
        figures = {name: future.result() for name, future in running.items()}
    for name, each in figures.items():
        print(f"{name:>13}: {each}")
    better = best_or_equal(figures)
    result: dict[str, Any] = {
        "benchmark": "router",
        "best_or_equal": all(better.values()),
        "by_measure": better,
        "figures": figures,
        "sessions": arguments.sessions,
        "replicas": arguments.replicas,
        "groups_under_way": arguments.groups_under_way,
        "seed": arguments.seed,
    }
    record.keep(result, threads=1)


if __name__ == "__main__":
    main()
