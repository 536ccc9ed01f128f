"""The phase clock: reserved time is charged exactly once, whatever is nested, overlapping, interrupted or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.ledger import IDLE, UNATTRIBUTED, Ledger, LedgerError, PhaseClock, Price, PriceBook


class Time:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns

    def seconds(self, count: float) -> None:
        self.ns += round(count * 1e9)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


@pytest.fixture
def time() -> Time:
    return Time()


def seconds(ledger: Ledger, resource: str = "cpu_core_s") -> dict[str, Decimal]:
    found: dict[str, Decimal] = defaultdict(Decimal)
    for entry in ledger.entries():
        if entry.resource == resource:
            found[entry.phase] += entry.quantity
    return dict(found)


def test_inner_phases_take_their_time_out_of_the_outer(ledger: Ledger, time: Time) -> None:
    with PhaseClock(ledger, subject="cycle-1", cores=2, heartbeat_s=None, now_ns=time) as clock:
        time.seconds(1)
        with clock.phase("train"):
            time.seconds(10)
            with clock.phase("weight_sync"):
                time.seconds(3)
            time.seconds(5)
        time.seconds(2)
    assert seconds(ledger) == {IDLE: 6, "train": 30, "weight_sync": 6}
    ledger.check_conservation()
    (item,) = ledger.conservation()
    assert item.reserved == item.charged == 42
    assert ledger.total_usd() == Decimal("0.00042")


def test_phases_of_concurrent_tasks_never_count_a_second_twice(ledger: Ledger, time: Time) -> None:
    async def work(clock: PhaseClock, name: str, start: asyncio.Event, leave: asyncio.Event) -> None:
        with clock.phase(name):
            start.set()
            await leave.wait()

    async def both() -> None:
        with PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time) as clock:
            events = [asyncio.Event() for _ in range(4)]
            first = asyncio.create_task(work(clock, "rollout", events[0], events[1]))
            await events[0].wait()
            time.seconds(4)
            second = asyncio.create_task(work(clock, "train", events[2], events[3]))
            await events[2].wait()
            time.seconds(2)
            events[1].set()
            await first
            time.seconds(1)
            events[3].set()
            await second

    asyncio.run(both())
    assert seconds(ledger) == {"rollout": 4, "train": 3}
    ledger.check_conservation()


def test_subjects_change_on_the_way(ledger: Ledger, time: Time) -> None:
    with PhaseClock(ledger, subject="setup", cores=1, heartbeat_s=None, now_ns=time) as clock:
        time.seconds(1)
        clock.subject = "cycle-1"
        time.seconds(2)
        with clock.phase("eval"), clock.phase("serve", subject="alias:production"):
            time.seconds(4)
    assert ledger.summary().by_subject == {
        "alias:production": Decimal("0.00004"),
        "cycle-1": Decimal("0.00002"),
        "setup": Decimal("0.00001"),
    }
    ledger.check_conservation()


def test_the_same_subject_again_loses_no_idle_time(ledger: Ledger, time: Time) -> None:
    with PhaseClock(ledger, subject="cycle-1", cores=1, heartbeat_s=None, now_ns=time) as clock:
        time.seconds(0.5)
        clock.heartbeat()
        clock.subject = "cycle-1"
        time.seconds(0.25)
    assert seconds(ledger) == {IDLE: Decimal("0.75")}
    ledger.check_conservation()


def test_a_machine_with_gpus_charges_both(ledger: Ledger, time: Time) -> None:
    reserved = {"cpu_core_s": 16, "gpu_h100_s": 2, "gpu_unheard_of_s": 1}
    with PhaseClock(ledger, subject="s", reserved=reserved, heartbeat_s=None, now_ns=time) as clock:
        with clock.phase("train"):
            time.seconds(3)
        assert clock.spent_usd() is None, "one resource has no price"
    assert seconds(ledger) == {"train": 48}
    assert seconds(ledger, "gpu_h100_s") == {"train": 6}
    assert seconds(ledger, "gpu_unheard_of_s") == {"train": 3}
    assert ledger.summary().unpriced == ("gpu_unheard_of_s",)
    ledger.check_conservation()


def test_spent_includes_what_is_going_on(ledger: Ledger, time: Time) -> None:
    with PhaseClock(ledger, subject="s", cores=2, heartbeat_s=None, now_ns=time) as clock:
        with clock.phase("rollout"):
            time.seconds(50)
            assert ledger.entries() == ()
            assert clock.spent_usd() == Decimal("0.001")
            clock.settle()
            assert clock.spent_usd() == ledger.total_usd() == Decimal("0.001")
            time.seconds(50)
        time.seconds(50)
        assert clock.spent_usd() == Decimal("0.003")
    assert ledger.total_usd() == clock.spent_usd() == Decimal("0.003")
    with PhaseClock(Ledger(Path(ledger.database.where)), subject="again", cores=1, heartbeat_s=None, now_ns=time) as clock:
        assert clock.spent_usd() == Decimal("0.003"), "a budget knows of earlier sessions"


def test_an_exception_inside_a_phase_still_charges_it(ledger: Ledger, time: Time) -> None:
    clock = PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time)

    def fail() -> None:
        with clock, clock.phase("train"):
            time.seconds(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seconds(ledger) == {"train": 2}
    ledger.check_conservation()


def test_misuse_is_refused(ledger: Ledger, time: Time) -> None:
    clock = PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time)
    with pytest.raises(LedgerError, match="not running"), clock.phase("train"):
        pass
    with clock:
        for name in ("", IDLE, UNATTRIBUTED):
            with pytest.raises(LedgerError, match="no phase to enter"), clock.phase(name):
                pass
        with clock.phase("train"):
            clock.stop()
    clock.stop()
    with pytest.raises(LedgerError, match="runs once"):
        clock.start()
    with pytest.raises(LedgerError, match="cannot reserve"):
        PhaseClock(ledger, subject="s", reserved={})
    with pytest.raises(LedgerError, match="cannot reserve"):
        PhaseClock(ledger, subject="s", reserved={"cpu_core_s": Decimal("NaN")})


steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "leave_any", "settle", "beat", "subject", "wait"]), st.integers(0, 5_000_000_000)
    ),
    max_size=40,
)


@settings(max_examples=25, deadline=None)
@given(steps, st.integers(1, 96), st.sampled_from(["0.036", "0.041", "0.0333"]))
def test_conserved_to_the_last_digit_for_any_order_of_events(events: list[tuple[str, int]], cores: int, usd: str) -> None:
    book = PriceBook.model_validate({"prices": {"cpu_core_s": {"usd": usd, "per": 3600}}})
    time = Time()
    expected: dict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.sqlite", book)
        clock = PhaseClock(ledger, subject="s", cores=cores, heartbeat_s=None, now_ns=time)
        start = time.ns
        stack: list[tuple[str, object]] = []
        with clock:
            for number, (event, ns) in enumerate(events):
                expected[stack[-1][0] if stack else IDLE] += ns
                time.ns += ns
                if event == "enter":
                    name = f"phase-{number}"
                    manager = clock.phase(name)
                    manager.__enter__()
                    stack.append((name, manager))
                elif event.startswith("leave") and stack:
                    _, left = stack.pop(-1 if event == "leave" else ns % len(stack))
                    left.__exit__(None, None, None)  # type: ignore[attr-defined]
                elif event == "settle":
                    clock.settle()
                elif event == "beat":
                    clock.heartbeat()
                elif event == "subject":
                    clock.subject = f"subject-{number}"
                assert clock.spent_usd() == book.cost("cpu_core_s", Decimal(time.ns - start) / 10**9 * cores)
            for item in ledger.conservation():
                assert item.holds
        ledger.check_conservation()
        wall = Decimal(time.ns - start) / 10**9
        assert ledger.summary().by_resource.get("cpu_core_s", 0) == wall * cores
        assert ledger.total_usd() == book.cost("cpu_core_s", wall * cores)
        assert seconds(ledger) == {name: Decimal(ns) * cores / 10**9 for name, ns in expected.items() if ns}
        ledger.close()


KILLED = """
import os, signal, sys, time
from evergrad.ledger import Ledger, PhaseClock
ledger = Ledger(sys.argv[1])
with PhaseClock(ledger, subject="cycle-1", cores=3, heartbeat_s=0.05) as clock:
    with clock.phase("train"):
        time.sleep(0.2)
    print("charged", flush=True)
    with clock.phase("rollout"):
        time.sleep(60)
"""


def test_time_of_a_killed_process_is_charged_when_the_ledger_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "charged\n"
    # While the process lives, opening the ledger takes nothing from it.
    watcher = Ledger(path)
    table = "SELECT elapsed_ns - charged_ns FROM reservations"
    while True:
        with watcher.database.read() as connection:
            if connection.exec_driver_sql(table).scalar_one() > 200_000_000:
                break
    assert UNATTRIBUTED not in Ledger(path).summary().by_phase
    os.kill(child.pid, signal.SIGSTOP)
    assert UNATTRIBUTED not in Ledger(path).summary().by_phase, "a stopped process is not a dead one"
    child.kill()
    # Not waited for yet: a zombie counts as dead.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    reopened = [Ledger(path), Ledger(path)][0]
    child.wait()
    found = seconds(reopened)
    assert found["train"] >= Decimal("0.6")
    assert found[UNATTRIBUTED] >= Decimal("0.6"), "three cores, for at least 0.2 s up to the last heartbeat"
    assert reopened.summary(phase=UNATTRIBUTED).entries == 1
    assert reopened.entries(phase=UNATTRIBUTED)[0].subject == "cycle-1"
    reopened.check_conservation()
    assert [item.holds for item in reopened.conservation()] == [True]
    again = Ledger(path)
    assert seconds(again) == found


def test_a_reader_charges_nothing_and_the_run_charges_at_its_own_prices(tmp_path: Path, time: Time) -> None:
    path, own = tmp_path / "ledger.sqlite", PriceBook(prices={"cpu_core_s": Price(usd=Decimal(2))})
    clock = PhaseClock(Ledger(path, own), subject="s", cores=3, heartbeat_s=None, now_ns=time)
    clock.start()
    time.seconds(5)
    clock.heartbeat()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE reservations SET owner = json_set(owner, '$.started', 'before')")
    with Ledger.for_reading(path) as reader:
        assert reader.entries() == ()
        assert reader.uncharged() == {"cpu_core_s": 15}
        assert set(reader.price_books()) == {own.hash}
        reader.check_conservation()
    again = Ledger(path, own)
    assert [(entry.phase, entry.usd, entry.price_book) for entry in again.entries()] == [(UNATTRIBUTED, 30, own.hash)]
    assert again.uncharged() == {}


def test_a_number_of_a_process_that_was_given_out_again_is_not_the_owner(ledger: Ledger, time: Time) -> None:
    clock = PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time)
    clock.start()
    time.seconds(7)
    clock.heartbeat()
    with ledger.database.write() as connection:
        connection.exec_driver_sql("""UPDATE reservations SET owner = json_set(owner, '$.started', '12')""")
    assert seconds(Ledger(ledger.database.where)) == {UNATTRIBUTED: 7}


def test_a_silent_clock_of_another_host_is_dead_after_a_while(ledger: Ledger, time: Time) -> None:
    clock = PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time)
    clock.start()
    time.seconds(7)
    clock.heartbeat()
    with ledger.database.write() as connection:
        connection.exec_driver_sql("""UPDATE reservations SET owner = json_set(owner, '$.host', 'elsewhere')""")
    assert seconds(Ledger(ledger.database.where)) == {}
    with ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE reservations SET heartbeat_at = '2026-01-01T00:00:00+00:00'")
    assert seconds(Ledger(ledger.database.where)) == {UNATTRIBUTED: 7}


def test_conservation_check_finds_what_was_charged_twice(ledger: Ledger, time: Time) -> None:
    with PhaseClock(ledger, subject="s", cores=1, heartbeat_s=None, now_ns=time) as clock, clock.phase("train"):
        time.seconds(1)
    with ledger.database.write() as connection:
        connection.exec_driver_sql("UPDATE reservations SET elapsed_ns = elapsed_ns - 1")
    with pytest.raises(LedgerError, match=r"reserved 0\.999999999, charged 1\.000000000"):
        ledger.check_conservation()
