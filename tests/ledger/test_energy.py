"""Joules: read where the machine shows them, charged to the phase that used them, never made up."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest

from evergrad.ledger import CPU_ENERGY, EnergyMeter, Ledger, PhaseClock, Price, PriceBook


class Zones:
    """The kernel's folder of energy counters, as it looks on a server with one package and its memory."""

    LARGEST = 262_143_328_850

    def __init__(self, root: Path) -> None:
        self.root = root
        for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram")):
            (root / zone).mkdir(parents=True)
            (root / zone / "name").write_text(f"{name}\n")
            (root / zone / "max_energy_range_uj").write_text(f"{self.LARGEST}\n")
            self.show(zone, 0)

    def show(self, zone: str, microjoules: int) -> None:
        (self.root / zone / "energy_uj").write_text(f"{microjoules}\n")


@pytest.fixture
def zones(tmp_path: Path) -> Zones:
    return Zones(tmp_path / "powercap")


def test_packages_and_memory_count_and_parts_of_a_package_do_not_count_twice(zones: Zones) -> None:
    zones.show("intel-rapl:0", 500)
    meter = EnergyMeter(zones.root)
    assert CPU_ENERGY in meter.resources
    zones.show("intel-rapl:0", 1_500_500)
    zones.show("intel-rapl:0:0", 1_000_000)
    zones.show("intel-rapl:0:1", 250_000)
    assert meter.take()[CPU_ENERGY] == Decimal("1.75")
    assert meter.take()[CPU_ENERGY] == 0


def test_a_counter_that_begins_again_loses_nothing(zones: Zones) -> None:
    zones.show("intel-rapl:0", Zones.LARGEST - 9)
    meter = EnergyMeter(zones.root)
    zones.show("intel-rapl:0", 90)
    assert meter.take()[CPU_ENERGY] == Decimal("0.0001")


def test_what_cannot_be_read_is_not_there(zones: Zones, tmp_path: Path) -> None:
    assert CPU_ENERGY not in EnergyMeter(tmp_path / "none").resources
    meter = EnergyMeter(zones.root)
    zones.show("intel-rapl:0", 2_000_000)
    kept = zones.root / "intel-rapl:0" / "energy_uj"
    kept.rename(kept.with_suffix(".hidden"))
    assert meter.take()[CPU_ENERGY] == 0
    kept.with_suffix(".hidden").rename(kept)
    assert meter.take()[CPU_ENERGY] == 2, "what was used meanwhile is counted when it can be read again"
    for zone in zones.root.iterdir():
        (zone / "energy_uj").unlink()
    assert CPU_ENERGY not in EnergyMeter(zones.root).resources


def clock_on(ledger: Ledger, zones: Zones) -> PhaseClock:
    return PhaseClock(ledger, subject="s", cores=1, meter=EnergyMeter(zones.root), heartbeat_s=None)


def test_joules_go_to_the_phase_that_used_them(tmp_path: Path, zones: Zones) -> None:
    per_kwh = Price(usd=Decimal("0.12"), per=Decimal(3_600_000))
    book = PriceBook(prices={"cpu_core_s": Price(usd=Decimal(0)), CPU_ENERGY: per_kwh})
    with Ledger(tmp_path / "ledger.sqlite", book) as ledger:
        clock = clock_on(ledger, zones)
        zones.show("intel-rapl:0", 7_000_000)
        with clock:
            with clock.phase("train"):
                zones.show("intel-rapl:0", 3_607_000_000)
                assert clock.spent_usd() == book.cost(CPU_ENERGY, Decimal(3600))
                with clock.phase("weight_sync"):
                    zones.show("intel-rapl:0", 3_608_000_000)
            zones.show("intel-rapl:0", 3_608_500_000)
        joules = {entry.phase: entry.quantity for entry in ledger.entries() if entry.resource == CPU_ENERGY}
        assert joules == {"train": 3600, "weight_sync": 1, "idle": Decimal("0.5")}, "those before the clock ran are not its own"
        ledger.check_conservation()
        assert ledger.total_usd() == book.cost(CPU_ENERGY, Decimal("3601.5"))


def test_a_book_that_prices_no_joules_has_no_entries_of_them(tmp_path: Path, zones: Zones) -> None:
    with Ledger(tmp_path / "ledger.sqlite", PriceBook(prices={"cpu_core_s": Price(usd=Decimal(1))})) as ledger:
        with clock_on(ledger, zones) as clock, clock.phase("train"):
            zones.show("intel-rapl:0", 5_000_000)
        assert {entry.resource for entry in ledger.entries()} == {"cpu_core_s"}
        assert ledger.total_usd() is not None
