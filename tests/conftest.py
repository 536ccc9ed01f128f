"""What holds for all tests: one thread a process, no limit of hypothesis on the clock, a signing key that is nobody's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The suite runs one process a core. Threads of several torch processes wait for one another by spinning, and a test of
# half a second then takes twenty. The variable counts when torch is first imported, here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("evergrad", deadline=None)
settings.load_profile("evergrad")


@pytest.fixture(autouse=True, scope="session")
def _signing_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERGRAD_SIGNING_KEY", str(tmp_path_factory.mktemp("key") / "signing-key.pem"))
        yield
