"""Fixtures of the suite: `options` (Options), `engine` (the codec under test), `codes` (what it must take), `scratch`.

What happens around the tests is in `conformance.suite.plugin`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from .driving.codec import Scratch
from .driving.features import Guarded
from .driving.options import Options
from .driving.ranges import Recorder
from .engines import codecs as engines
from .inputs.strategies import Domain, domain_of
from .suite import plugin


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin(plugin.__name__):
        pluginmanager.register(plugin, plugin.__name__)


@pytest.hookimpl(trylast=True)  # after the plugin's own
def pytest_configure(config: pytest.Config) -> None:
    plugin.run_of(config).homes.add(Path(__file__).parent)


@pytest.fixture(scope="session")
def options(pytestconfig: pytest.Config) -> Options:
    """The options of this run."""
    return plugin.run_of(pytestconfig).options


@pytest.fixture(scope="session")
def offered(pytestconfig: pytest.Config) -> frozenset[str]:
    """The capabilities of the engine under test."""
    return plugin.run_of(pytestconfig).offered


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config) -> engines.FullCodec:
    """The codec under test, guarded, with a note of what it sees; a live run has none."""
    run = plugin.run_of(pytestconfig)
    assert run.codec is not None, "codec checks are deselected with a live engine"
    return cast(engines.FullCodec, Guarded(cast(engines.FullCodec, Recorder(run.codec, run.record))))


@pytest.fixture(scope="module")  # between modules the engine may lose features
def codes(engine: engines.FullCodec) -> Domain:
    """What the codec under test must take."""
    return domain_of(engine.capabilities)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Makes an empty directory that is gone after its `with` block, as often as a property has examples."""
    root = tmp_path_factory.mktemp("scratch")
    return lambda: _scratch(root)


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)
