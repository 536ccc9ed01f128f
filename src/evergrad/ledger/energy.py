"""Joules that a machine has used, where it says so: processors and memory by RAPL, graphics cards by NVML.

Both count for the whole machine, whoever else uses it. What cannot be read is not estimated: then there is no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

CPU_ENERGY, GPU_ENERGY = "cpu_joule", "gpu_joule"
_POWERCAP = Path("/sys/class/powercap")
_MICRO, _MILLI = -6, -3


class EnergyMeter:
    """Counts joules from its making on.

    Args:
        powercap: Where the kernel shows RAPL's zones.
    """

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._counters: list[tuple[str, int, _Counter]] = [
            (CPU_ENERGY, _MICRO, zone) for zone in map(_zone, _zones(powercap)) if zone is not None
        ]
        self._counters += [(GPU_ENERGY, _MILLI, card) for card in _cards()]

    @property
    def resources(self) -> frozenset[str]:
        """What can be read here: ``cpu_joule``, ``gpu_joule``, both or neither."""
        return frozenset(resource for resource, _, _ in self._counters)

    def take(self) -> Mapping[str, Decimal]:
        """Joules by resource since the last call; exact, as the counters are whole micro- and millijoules."""
        used: dict[str, Decimal] = {}
        for resource, exponent, counter in self._counters:
            used[resource] = used.get(resource, Decimal(0)) + Decimal(counter.take()).scaleb(exponent)
        return used


class _Counter:
    """A counter that only rises, and begins again from 0 after ``largest``.

    Args:
        read: Its value now; what raises an ``OSError`` later counts as no change until it can be read again.
        largest: Its largest value; ``None`` for one that never begins again.
    """

    def __init__(self, read: Callable[[], int], largest: int | None) -> None:
        self._read, self._largest = read, largest
        self._last = read()

    def take(self) -> int:
        try:
            now = self._read()
        except OSError:
            return 0
        used = now - self._last
        if used < 0:
            used = used + self._largest + 1 if self._largest is not None else 0
        self._last = now
        return used


def _zones(powercap: Path) -> list[Path]:
    """Packages, and the memory beside them; other parts of a package are in its figure already."""
    found = sorted(powercap.glob("intel-rapl:*")) if powercap.is_dir() else []
    return [zone for zone in found if _text(zone / "name").startswith(("package", "dram"))]


def _zone(zone: Path) -> _Counter | None:
    try:
        return _Counter(lambda: int((zone / "energy_uj").read_text()), int((zone / "max_energy_range_uj").read_text()))
    except (OSError, ValueError):
        return None  # most kernels show it to root alone


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cards() -> list[_Counter]:
    """Every card whose driver counts energy; none without the package ``nvidia-ml-py``."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    cards = (_card(pynvml, handle) for handle in handles)
    return [card for card in cards if card is not None]


def _card(nvml: Any, handle: Any) -> _Counter | None:
    def read() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    try:
        return _Counter(read, None)
    except OSError:
        return None
