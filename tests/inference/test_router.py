"""The router over simulated engines, whose tokens are a function of seed and place: nothing lost, nothing drawn twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from benchmarks.bench_router import RoundRobin
from benchmarks.simulated_engines import EngineSpeed, SimulatedEngine, run_virtually, tokens_at
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.inference import EngineClient, EngineError, EngineUnavailable, Router
from evergrad.inference._replica import Replica
from evergrad.inference._routing import CostRule, Option, Route, assign_groups
from evergrad.types import Completion, FinishReason, Sampling

SMALL = EngineSpeed(kv_cache_tokens=4096, max_rows=8, max_batch_tokens=256)


@asynccontextmanager
async def routed(count: int, speed: EngineSpeed = SMALL, **options: Any) -> AsyncIterator[tuple[Router, list[SimulatedEngine]]]:
    engines = [SimulatedEngine(speed) for _ in range(count)]
    async with Router(**options) as router:
        for number, engine in enumerate(engines):
            await router.add(f"r{number}", engine)
        yield router, engines


def replicas(router: Router) -> list[Replica]:
    return list(router._dispatcher.replicas.values())


def check_whole(done: Completion, prompt: tuple[int, ...], sampling: Sampling) -> None:
    assert list(done.token_ids) == tokens_at(sampling.seed, 0, sampling.max_tokens)
    assert len(done.logprobs) == len(done.token_ids)
    assert done.finish_reason is FinishReason.LENGTH
    assert [span.start for span in done.policy_spans] == [0, *(span.end for span in done.policy_spans[:-1])]
    assert done.policy_spans[-1].end == len(done.token_ids)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), len(done.token_ids))
    assert 0 <= done.usage.cached_tokens < len(prompt)


def check_books_are_empty(router: Router) -> None:
    for replica in replicas(router):
        assert (replica.charges, replica.num_sent, replica.attempts) == ({}, 0, set())
        assert (replica._held, replica._pending, replica._writing) == ({}, {}, 0)
        assert replica.next_waiting() is None
    assert not router._dispatcher.stranded


async def session(router: Router, name: str, seed: int, turns: int, done: list[tuple[Any, ...]]) -> None:
    rng = Random(seed)
    prompt = tuple(rng.choices(range(1000), k=rng.randint(1, 200)))
    for _ in range(turns):
        sampling = Sampling(max_tokens=rng.randint(1, 120), seed=rng.getrandbits(32))
        completion = await router(prompt, sampling, session_id=name)
        done.append((name, completion))
        check_whole(completion, prompt, sampling)
        await asyncio.sleep(rng.expovariate(1.0))
        prompt = (*prompt, *completion.token_ids, *rng.choices(range(1000), k=rng.randint(1, 60)))


happenings = st.lists(
    st.tuples(
        st.sampled_from(["kill", "hang", "drain", "remove", "join", "update", "refuse", "leave"]),
        st.integers(0, 5),
        st.floats(0.0, 3.0),
    ),
    max_size=8,
)


@given(happenings, st.integers(0, 2**16), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_nothing_is_lost_or_doubled_whatever_happens_to_replicas(
    happenings: list[tuple[str, int, float]], seed: int, count: int
) -> None:
    async def main() -> None:
        done: list[tuple[Any, ...]] = []
        async with routed(count) as (router, engines):
            names = {f"r{number}": engine for number, engine in enumerate(engines)}
            ids = [f"g{index // 4}/{index % 4}" for index in range(12)]
            sessions = {
                each: asyncio.create_task(session(router, each, seed + index, 3, done)) for index, each in enumerate(ids)
            }
            left = await happen(router, names, sessions, happenings)
            await asyncio.gather(*(task for name, task in sessions.items() if name not in left))
            await asyncio.gather(*sessions.values(), return_exceptions=True)
            stayed = [name for name in ids if name not in left]
            assert [sum(each == name for each, _ in done) for name in stayed] == [3] * len(stayed)
            check_books_are_empty(router)

    run_virtually(main())


async def happen(
    router: Router, names: dict[str, SimulatedEngine], sessions: dict[str, asyncio.Task[None]], happenings: Any
) -> set[str]:
    """Lets things happen in turn; one replica is always left alone. Returns the sessions that were given up."""
    version, joined, left, drains = 0, 0, set[str](), list[asyncio.Task[None]]()
    for what, which, after in happenings:
        await asyncio.sleep(after)
        victims = [name for name in sorted(names) if name != "r0" and name in router._dispatcher.replicas]
        name = victims[which % len(victims)] if victims else None
        if what == "join":
            joined += 1
            names[f"new{joined}"] = SimulatedEngine(SMALL)
            await router.add(f"new{joined}", names[f"new{joined}"])
        elif what == "update":
            version += 1
            await router.update_weights({"policy_version": version})
        elif what == "leave":
            session_id = sorted(sessions)[which % len(sessions)]
            sessions[session_id].cancel()
            left.add(session_id)
        elif name is not None:
            if what == "kill":
                names[name].kill()
            elif what == "hang":
                names[name].hang()
            elif what == "refuse":
                names[name].refuses_weights = True
            elif what == "drain":
                drains.append(asyncio.create_task(router.drain(name)))
            elif what == "remove":
                await router.remove(name)
    for drain in drains:
        # One that was removed meanwhile has nothing left to drain.
        with contextlib.suppress(EngineError):
            await drain
    return left


def test_a_completion_goes_on_where_its_replica_died() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            prompt, sampling = tuple(range(100)), Sampling(max_tokens=400, seed=5)
            asked = asyncio.create_task(router(prompt, sampling, session_id="g/0"))
            await asyncio.sleep(1.0)
            home = next(each for each in engines if each.running)
            other = next(each for each in engines if each is not home)
            # Somebody arrives, so that the steps so far are on record.
            await asyncio.gather(router(prompt, Sampling(max_tokens=1, seed=6), session_id="g/1"))
            had = len(home.running[0].tokens)
            assert had > 50
            home.kill()
            done = await asked
            check_whole(done, prompt, sampling)
            assert other.prefilled_tokens == len(prompt) + had, "what was drawn is read as a prompt, not drawn again"

    run_virtually(main())


def test_a_replica_that_says_nothing_is_left_after_three_looks() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            asked = [
                asyncio.create_task(router(tuple(range(50)), Sampling(max_tokens=200, seed=n), session_id=f"g{n}/0"))
                for n in range(4)
            ]
            await asyncio.sleep(0.5)
            engines[0].hang()
            for number, task in enumerate(asked):
                check_whole(await task, tuple(range(50)), Sampling(max_tokens=200, seed=number))
            health = await router.health()
            assert health["status"] == "ok"
            assert health["replicas"]["r0"]["state"] == "down"
            assert "did not answer" in health["replicas"]["r0"]["reason"]
            assert asyncio.get_running_loop().time() < 30

    run_virtually(main())


def test_without_a_replica_a_request_waits_a_while_and_then_says_why() -> None:
    async def main() -> None:
        async with routed(1, patience_s=20.0) as (router, engines):
            engines[0].kill()
            asked = asyncio.create_task(router((1, 2), Sampling(max_tokens=4, seed=1)))
            await asyncio.sleep(10.0)
            engines[0].revive()
            check_whole(await asked, (1, 2), Sampling(max_tokens=4, seed=1))
            engines[0].kill()
            with pytest.raises(EngineUnavailable, match=r"no replica was ready for 20 s: .*cannot be reached"):
                await router((1, 2), Sampling(max_tokens=4, seed=1))
            check_books_are_empty(router)

    run_virtually(main())


def test_a_request_that_is_wrong_is_refused_once_and_harms_nobody() -> None:
    async def main() -> None:
        async with routed(2) as (router, _):
            with pytest.raises(EngineError, match="do not fit"):
                await router((1,) * 5000, Sampling(max_tokens=1, seed=1))
            assert {each["state"] for each in (await router.health())["replicas"].values()} == {"ready"}
            check_books_are_empty(router)

    run_virtually(main())


def test_a_drained_replica_finishes_what_it_has_and_gets_no_more() -> None:
    async def main() -> None:
        async with routed(2, rule=RoundRobin()) as (router, engines):
            asked = [asyncio.create_task(router((n,) * 40, Sampling(max_tokens=100, seed=n))) for n in range(6)]
            await asyncio.sleep(0.1)
            drained = asyncio.create_task(router.drain("r0"))
            await asyncio.sleep(0)
            later = [asyncio.create_task(router((n,) * 40, Sampling(max_tokens=10, seed=n))) for n in range(6)]
            await asyncio.gather(*asked, *later, drained)
            assert (engines[0].num_finished, engines[0].num_aborted, engines[1].num_finished) == (3, 0, 9)
            assert list((await router.health())["replicas"]) == ["r1"]

    run_virtually(main())


def test_sessions_stay_and_siblings_begin_together() -> None:
    async def main() -> None:
        async with routed(3) as (router, _):
            seen: dict[str, set[str]] = {}

            async def play(group: int, index: int) -> None:
                name, prompt = f"g{group}/{index}", tuple(range(1000 * group, 1000 * group + 160))
                for turn in range(3):
                    asked = asyncio.create_task(router(prompt, Sampling(max_tokens=20, seed=turn), session_id=name))
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    seen.setdefault(name, set()).update(each.name for each in replicas(router) if name in sessions_at(each))
                    prompt = (*prompt, *(await asked).token_ids, group, index, turn)
                    await asyncio.sleep(0.1 * (index + 1))

            await asyncio.gather(*(play(group, index) for group in range(3) for index in range(4)))
            assert {name: len(places) for name, places in seen.items()} == dict.fromkeys(seen, 1)
            groups = [frozenset().union(*(seen[f"g{group}/{index}"] for index in range(4))) for group in range(3)]
            assert [len(places) for places in groups] == [1, 1, 1], "a group's siblings were scattered"
            assert len(set(groups)) == 3, "a replica got nothing"

    run_virtually(main())


def sessions_at(replica: Replica) -> set[str | None]:
    return {request.session for request in replica.charges}


loads_of_replicas = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 400), st.integers(0, 30)), min_size=2, max_size=6)


@given(loads_of_replicas, st.integers(1, 40))
@settings(deadline=None)
def test_a_session_leaves_only_for_a_gain_that_pays_its_prefill(loads: list[tuple[int, int, int]], prompt: int) -> None:
    options = [
        Option(f"r{n}", pending, held, min(cached, prompt), 0 if n else 20) for n, (pending, held, cached) in enumerate(loads)
    ]
    route = Route(prompt, "g/0", "g", "r0", later_turn=True)
    chosen = next(each for each in options if each.name == CostRule().choose(route, options))
    home = options[0]
    if chosen is not home:
        assert home.load > 2 * sum(each.load for each in options[1:]) / (len(options) - 1)
        assert home.load + home.missing(prompt) - chosen.load - chosen.missing(prompt) > prompt
    first = CostRule().choose(Route(prompt, "g/0", "g", None, later_turn=False), options)
    cost = {each.name: each.load + each.missing(prompt) for each in options}
    assert cost[first] == min(cost.values()), "Dynamo's rule, when no session has come back so far"


def test_an_update_reaches_all_and_who_refuses_is_passed_over_until_it_has_it() -> None:
    async def main() -> None:
        async with routed(3) as (router, engines):
            engines[1].refuses_weights = True
            receipt = await router.update_weights({"policy_version": 7})
            assert (receipt["policy_version"], list(receipt["left_behind"])) == (7, ["r1"])
            assert "refused" in receipt["left_behind"]["r1"]
            late = SimulatedEngine(SMALL)
            await router.add("late", late)
            assert late.policy_version == 7
            asked = [router((n,) * 20, Sampling(max_tokens=3, seed=n)) for n in range(24)]
            assert {span.policy_version for done in await asyncio.gather(*asked) for span in done.policy_spans} == {7}
            assert engines[1].num_finished == 0
            engines[1].refuses_weights = False
            await asyncio.sleep(2.0)
            assert (await router.health())["replicas"]["r1"]["state"] == "ready"
            assert engines[1].policy_version == 7
            for engine in (*engines, late):
                engine.refuses_weights = True
            with pytest.raises(EngineError, match="refused"):
                await router.update_weights({"policy_version": 8})
            done = await router((1,), Sampling(max_tokens=3, seed=1))
            assert done.max_policy_version == 7

    run_virtually(main())


def test_an_update_does_not_wait_for_a_replica_that_is_stuck() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            engines[1].hang()
            receipt = await router.update_weights({"policy_version": 1})
            assert list(receipt["left_behind"]) == ["r1"]
            assert asyncio.get_running_loop().time() < 30

    run_virtually(main())


def test_replicas_that_do_not_agree_are_named() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            assert await router.logprobs((1, 2, 3)) == [0.0, 0.0]
            engines[1].policy_version = 3
            with pytest.raises(EngineError, match="r0 and r1 differ by 3 nats"):
                await router.logprobs((1, 2, 3))

    run_virtually(main())


@pytest.mark.parametrize("end", [SimulatedEngine.kill, SimulatedEngine.hang])
def test_questions_to_all_survive_a_replica_that_dies(end: Callable[[SimulatedEngine], None]) -> None:
    async def main() -> None:
        async with routed(3) as (router, engines):
            ids = [f"g{group}/0" for group in range(6)]
            await router.open_sessions(ids)
            end(engines[1])
            assert await router.logprobs((1, 2, 3)) == [0.0, 0.0]
            assert (await router.health())["replicas"]["r1"]["state"] == "down"
            await router.reset_prefix_cache()
            await router.open_sessions(["g6/0", "g7/0", "g8/0"])
            await router.close_sessions(["g6/0", "g7/0", "g8/0", *ids])
            assert not engines[0].open | engines[2].open
            engines[2].policy_version = 3
            with pytest.raises(EngineError, match="r0 and r2 differ by 3 nats"):
                await router.logprobs((1, 2, 3))
            for engine in (engines[0], engines[2]):
                end(engine)
            for ask in (router.logprobs((1, 2, 3)), router.reset_prefix_cache(), router.open_sessions(["g9/0"])):
                with pytest.raises(EngineUnavailable, match="no replica"):
                    await ask
            assert asyncio.get_running_loop().time() < 120, "nobody waited for a call's own timeout"

    run_virtually(main())


def test_sessions_that_a_dead_replica_should_have_opened_move() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            engines[1].kill()
            ids = [f"g{group}/0" for group in range(4)]
            await router.open_sessions(ids)
            asked = [router((1,) * 30, Sampling(max_tokens=20, seed=1), session_id=each) for each in ids]
            for done in await asyncio.gather(*asked):
                check_whole(done, (1,) * 30, Sampling(max_tokens=20, seed=1))
            assert engines[0].open == set(ids)
            assert router.take_lockstep_misses() == 2

    run_virtually(main())


def test_patience_counts_from_when_nobody_is_ready() -> None:
    async def main() -> None:
        async with routed(1, patience_s=20.0) as (router, engines):
            replicas(router)[0].limit.value = 1
            asked = [asyncio.create_task(router((n,), Sampling(max_tokens=2500, seed=n))) for n in range(2)]
            await asyncio.sleep(15.0)
            assert (len(engines[0].running), replicas(router)[0].num_queued) == (1, 1)
            engines[0].kill()
            await asyncio.sleep(15.0)
            engines[0].revive()
            for number, task in enumerate(asked):
                check_whole(await task, (number,), Sampling(max_tokens=2500, seed=number))
            engines[0].kill()
            with pytest.raises(EngineUnavailable, match="for 20 s"):
                await router((1,), Sampling(max_tokens=1, seed=1))

    run_virtually(main())


@pytest.mark.parametrize("status", [200, 503])
@pytest.mark.parametrize(
    "text",
    ["", "<html>", "[]", "3", "{}", '{"error": "busy"}', '{"error": []}', '{"policy_version": 1, "load": 3}',
     '{"policy_version": null, "load": {}}', '{"policy_version": 1e999, "load": {}}', '{"policy_version": 1, "load": {}}'],
)  # fmt: skip
async def test_an_odd_answer_about_health_is_an_error_that_the_watch_survives(text: str, status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/health", answer)
    async with TestServer(app) as server, EngineClient(str(server.make_url(""))) as client:
        with pytest.raises(EngineError):
            await client.health()


def test_an_empty_prompt_is_placed_like_any_other() -> None:
    async def main() -> None:
        async with routed(2) as (router, _):
            for _ in range(2):
                done = await router((), Sampling(max_tokens=3, seed=1))
                assert list(done.token_ids) == tokens_at(1, 0, 3)
            check_books_are_empty(router)

    run_virtually(main())


def test_a_replica_may_be_removed_by_two_at_once() -> None:
    async def main() -> None:
        async with routed(2) as (router, _):
            await router.open_sessions(["g0/0", "g1/0"])
            drained = asyncio.create_task(router.drain("r1"))
            await asyncio.sleep(0)
            await asyncio.gather(router.remove("r1"), router.remove("r1"), drained)
            assert list((await router.health())["replicas"]) == ["r0"]

    run_virtually(main())


def test_lockstep_sessions_are_dealt_by_group_and_move_when_their_replica_is_lost() -> None:
    async def main() -> None:
        async with routed(2) as (router, engines):
            ids = [f"g{group}/{index}" for group in range(4) for index in range(3)]
            await router.open_sessions(ids)
            places = [{each.rpartition("/")[0] for each in engine.open} for engine in engines]
            assert [len(each) for each in places] == [2, 2]
            assert not places[0] & places[1]
            asked = [asyncio.create_task(router((1,) * 30, Sampling(max_tokens=200, seed=1), session_id=each)) for each in ids]
            await asyncio.sleep(0.5)
            engines[1].kill()
            for task in asked:
                check_whole(await task, (1,) * 30, Sampling(max_tokens=200, seed=1))
            moved = router.take_lockstep_misses()
            await asyncio.sleep(5.0)
            assert engines[0].open == set(ids)
            assert moved + router.take_lockstep_misses() == 6
            await router.close_sessions(ids)
            assert engines[0].open == set()

    run_virtually(main())


@given(st.lists(st.integers(0, 6), max_size=30), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), min_size=1))
def test_dealing_is_even_and_keeps_groups_whole(groups: list[int], sessions: dict[str, int]) -> None:
    names = [f"g{group}" for group in groups]
    placed = assign_groups(names, sessions)
    assert placed == assign_groups(names, dict(reversed(sessions.items())))
    assert set(placed) == set(names)
    counts = dict(sessions)
    for name in names:
        counts[placed[name]] += 1
    largest = max((names.count(name) for name in names), default=0)
    assert max(counts.values()) <= max(max(sessions.values()), min(counts.values()) + largest)


def test_names_are_unique_and_unknown_ones_are_told() -> None:
    async def main() -> None:
        async with routed(1) as (router, _):
            with pytest.raises(EngineError, match="there is a replica 'r0' already"):
                await router.add("r0", SimulatedEngine(SMALL))
            with pytest.raises(EngineError, match=r"there is no replica 'r9'.*there are: r0"):
                await router.drain("r9")

    run_virtually(main())
