"""What the live tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.live.runner import START_TIMEOUT, Host, environment


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Forks fresh engines, unpatched but for the suite's packing switch; on a position code they also trace."""
    env = environment(plugins="", modules=("tests.live.traced",), unpack=True)
    with Host(env, tmp_path_factory.mktemp("zygote") / "log") as host:
        host.call("warm", timeout=START_TIMEOUT)
        yield host
