"""What holds for all tests: no limit of hypothesis on the clock of a busy machine, and a signing key that is nobody's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("evergrad", deadline=None)
settings.load_profile("evergrad")


@pytest.fixture(autouse=True, scope="session")
def _signing_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERGRAD_SIGNING_KEY", str(tmp_path_factory.mktemp("key") / "signing-key.pem"))
        yield
