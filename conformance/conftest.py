"""Plumbing of the suite: options, engine, selection, and the matrix at the end. See `options`, `engines`, `matrix`.

Fixtures: `options` (Options), `engine` (the codec under test), `codes` (its dtypes), `scratch` (makes directories).
Profiles of Hypothesis: `ci` (derandomised, the default), `nightly` (random, more examples, keeps failing ones), `quick`
(as `ci`, without shrinking). Nothing is written into the working directory, but for what pytest's own cache writes
(`-p no:cacheprovider` turns that off).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance import engines, matrix
from conformance.driving import Scratch
from conformance.options import Options, add_options, options_of
from conformance.strategies import codes_for

HERE = Path(__file__).parent


def _hypothesis_profiles() -> None:
    # Hypothesis would write into the working directory; only the environment may choose another place.
    home = (
        os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY") or f"{tempfile.gettempdir()}/refdelta-hypothesis-{os.getuid()}"
    )
    set_hypothesis_home_dir(home)
    # Examples cost file input and output here, so their time says nothing about the strategies.
    common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    settings.register_profile("ci", common, derandomize=True, database=None, max_examples=100)
    quick = [Phase.explicit, Phase.generate]
    settings.register_profile("quick", common, derandomize=True, database=None, max_examples=60, phases=quick)
    database = DirectoryBasedExampleDatabase(Path(home) / "examples")
    # Hypothesis's own profile for CI derandomises; nights are for new examples, there too.
    settings.register_profile(
        "nightly", common, derandomize=False, database=database, max_examples=1000, print_blob=True
    )
    settings.load_profile("ci")


_hypothesis_profiles()


@dataclass(slots=True)
class Run:
    """State of one run of the suite."""

    options: Options
    codec: engines.FullCodec | None
    """The codec under test; None for a live engine."""
    matrix: matrix.Matrix = field(default_factory=matrix.Matrix)
    left_out: int = 0
    """Tests of the other kind, deselected by the engine."""
    collected: int = 0
    """Tests of this kind, before anything else deselected some."""
    collect_only: bool = False

    @property
    def name(self) -> str:
        return self.codec.name if self.codec else self.options.engine

    def left_out_line(self) -> str:
        kind, other = ("codec", "a codec") if self.options.live else ("live", "--engine vllm")
        return (
            f"{self.left_out} {kind} tests deselected: they need {other}; this run has --engine {self.options.engine}"
        )

    def report(self, width: int) -> list[str]:
        """The section that ends the run."""
        lines = [*matrix.header(self.name), "", *self.matrix.table(width), *self.matrix.skip_lines()]
        if self.left_out:
            lines.append(self.left_out_line())
        missing = self.collected - len(self.matrix.finished)
        if missing:
            lines.append(
                f"Partial run: {missing} of {self.collected} tests did not run, so no check above is complete."
            )
        if not self.matrix.judged:
            lines.append("Nothing was judged, so nothing passed.")
        return [*lines, matrix.LIVE_PROVES if self.options.live else matrix.CODEC_PROVES]


RUN: pytest.StashKey[Run] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "check(id): the check that a conformance test is part of")
    config.addinivalue_line("markers", "row(name): the column of the matrix that its outcome lands in")
    config.addinivalue_line("markers", "needs(capability): skipped for codecs without it")
    options = options_of(config)
    try:
        codec = None if options.live else engines.load(options.engine, config.invocation_params.dir)
    except engines.BadEngine as error:
        raise pytest.UsageError(str(error)) from error
    run = config.stash[RUN] = Run(options, codec, collect_only=config.option.collectonly)
    if codec:
        for check in matrix.CODEC_CHECKS:
            run.matrix.expect(check, run.name)
    config.pluginmanager.register(_Reporter(run), "refdelta-conformance")


def _is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    run = config.stash[RUN]
    ours = [item for item in items if _is_ours(item)]
    unmarked = [item.nodeid for item in ours if not matrix.check_of(item)]
    if unmarked:
        raise pytest.UsageError(f"{unmarked[0]} names no check: mark it with pytest.mark.check.")
    other = {item for item in ours if item.path.name.startswith("test_live") != run.options.live}
    run.left_out, run.collected = len(other), len(ours) - len(other)
    config.hook.pytest_deselected(items=list(other))
    items[:] = [item for item in items if item not in other]
    result = yield  # other plugins select by name, mark and so on
    for item in filter(_is_ours, items):
        run.matrix.announce(item, run.name)
    return result


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    run = config.stash[RUN]
    return [run.left_out_line()] if run.left_out else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = item.config.stash[RUN]
    for marker in item.iter_markers("needs"):
        capability = marker.args[0]
        promise = engines.CAPABILITIES[capability]
        if run.codec and capability not in run.codec.capabilities:
            pytest.skip(f"the engine does not declare the capability {capability!r}: {promise}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    if _is_ours(item):
        matrix.stamp(item, item.config.stash[RUN].name)
    return (yield)


class _Reporter:
    """Fills the matrix from reports, and prints it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run.matrix.add(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and not self.run.matrix.judged and not self.run.collect_only:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.run.collect_only:
            return
        terminalreporter.section("conformance")
        for line in self.run.report(max(80, shutil.get_terminal_size().columns)):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def options(pytestconfig: pytest.Config) -> Options:
    """The options of this run."""
    return pytestconfig.stash[RUN].options


@pytest.fixture(scope="session")
def engine(pytestconfig: pytest.Config) -> engines.FullCodec:
    """The codec under test; a live run has none."""
    codec = pytestconfig.stash[RUN].codec
    assert codec is not None, "codec checks are deselected with a live engine"
    return codec


@pytest.fixture(scope="session")
def codes(engine: engines.FullCodec) -> tuple[str, ...]:
    """The dtype codes that the codec under test must take."""
    return codes_for(engine.capabilities)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """Makes an empty directory that is gone after its `with` block, as often as a property has examples."""
    root = tmp_path_factory.mktemp("scratch")
    return lambda: _scratch(root)


@contextmanager
def _scratch(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=root) as directory:
        yield Path(directory)
