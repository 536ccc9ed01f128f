"""What holds for all tests: no limit of hypothesis on the clock of a machine that does other things meanwhile."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("evergrad", deadline=None)
settings.load_profile("evergrad")
