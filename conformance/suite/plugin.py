"""The suite as a pytest plugin: options, engine, selection, outcomes, and what is printed and written at the end.

`conftest.py` brings it in, or `refdelta.cli.pytest_plugin` does where the suite is started by `--pyargs`.

Profiles of Hypothesis: `ci` (derandomised, the default), `nightly` (random, more examples, keeps failing ones),
`quick` (as `ci`, without shrinking), `program` (as `ci` with fewer examples, ending at the first fault, the default for
`exec:`), `smoke` (as `quick` with very few). In each of them, shrinking is bounded (`shrinking`).
Nothing is written into the working directory, but for what pytest's own cache writes (`-p no:cacheprovider`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import InvalidArgument

from ..driving import levels, ranges, xfails
from ..driving.checks import CODEC_CHECKS
from ..driving.codec import skip_for
from ..driving.options import GATE, Options, add_options, options_of
from ..engines import capabilities, interrupts
from ..engines import codecs as engines
from ..findings import Late
from . import again, matrix, results, shrinking
from .results import Result
from .run import PACKAGE, Exit, Run, files_of

RUN: pytest.StashKey[Run] = pytest.StashKey()
CANNOT_START: pytest.StashKey[bool] = pytest.StashKey()
"""Set where the fault is not one of usage: the engine's module or process does not start."""
FIRST = "test_codec_features.py"
PROFILES = ("ci", "nightly", "quick", "program", "smoke")
"""Profiles of Hypothesis that the suite registers; any other that a conftest registers is taken, too."""


def _hypothesis_profiles() -> None:
    # Hypothesis would write into the working directory; only the environment may choose another place.
    home = (
        os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY") or f"{tempfile.gettempdir()}/refdelta-hypothesis-{os.getuid()}"
    )
    set_hypothesis_home_dir(home)
    # Examples cost file input and output here, so their time says nothing about the strategies.
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    common = settings(deadline=None, suppress_health_check=slow, print_blob=True, phases=shrinking.PHASES)
    settings.register_profile("ci", common, derandomize=True, database=None, max_examples=100)
    quick = [Phase.explicit, Phase.generate]
    settings.register_profile("quick", common, derandomize=True, database=None, max_examples=60, phases=quick)
    # Looking for a second fault would cost a program that hangs a time-out for each example.
    settings.register_profile(
        "program", common, derandomize=True, database=None, max_examples=15, report_multiple_bugs=False
    )
    settings.register_profile("smoke", common, derandomize=True, database=None, max_examples=3, phases=quick)
    database = DirectoryBasedExampleDatabase(Path(home) / "examples")
    # Hypothesis's own profile for CI derandomises; nights are for new examples, there too.
    settings.register_profile("nightly", common, derandomize=False, database=database, max_examples=1000)
    settings.load_profile("ci")
    shrinking.bound()


_hypothesis_profiles()


def run_of(config: pytest.Config) -> Run:
    """The run that a configuration belongs to."""
    return config.stash[RUN]


# -- starting ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.hookimpl(tryfirst=True)  # before Hypothesis loads its profile
def pytest_configure(config: pytest.Config) -> None:
    _check_profile(config.getoption("--hypothesis-profile", None))
    config.addinivalue_line("markers", "check(id): the check that a conformance test is part of")
    config.addinivalue_line("markers", "level(ids): the levels that it is part of, where not those of its check")
    config.addinivalue_line("markers", "row(name): the column of the matrix that its outcome lands in")
    config.addinivalue_line("markers", "needs(capability): skipped for engines without it")
    config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, where that is installed")
    options = options_of(config)
    config.add_cleanup(interrupts.install())
    run = config.stash[RUN] = _started(options, config)
    run.collect_only = config.option.collectonly
    if run.kind == capabilities.PROGRAM and not config.getoption("--hypothesis-profile", None):
        settings.load_profile("program")
    if run.codec:
        for check in CODEC_CHECKS:
            run.matrix.expect(check, run.name)
    config.pluginmanager.register(_Reporter(run), "conformance.reporter")


def _started(options: Options, config: pytest.Config) -> Run:
    """The run of these options, its codec loaded."""
    directory = config.invocation_params.dir
    try:
        if options.live:
            from ..live.backends import check_import, declared

            offered = declared(options, directory)
            if not config.option.collectonly:
                check_import(options, directory)
            ranges.LIVE.clear()
            return Run(options, None, offered, record=ranges.LIVE)
        codec = engines.load(options.engine, engines.Loading(directory, options.capabilities, options.exec_timeout))
    except engines.CannotStart as error:
        config.stash[CANNOT_START] = True
        raise pytest.UsageError(str(error)) from error
    except (engines.BadEngine, capabilities.UnknownCapability) as error:
        raise pytest.UsageError(str(error)) from error
    return Run(options, codec, frozenset(codec.capabilities))


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    """End with the suite's own codes where the command line or the engine is at fault."""
    try:
        return (yield)
    except pytest.UsageError as error:
        for text in error.args:
            print(f"ERROR: {text}", file=sys.stderr)
        return Exit.INFRASTRUCTURE if CANNOT_START in config.stash else Exit.USAGE


def _check_profile(name: str | None) -> None:
    """Hypothesis itself would end the run with a traceback."""
    if name is None:
        return
    try:
        settings.get_profile(name)
    except InvalidArgument as error:
        known = ", ".join(PROFILES)
        raise pytest.UsageError(f"--hypothesis-profile takes {known}, and got {name!r}.") from error


# -- selecting ---------------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    run = run_of(config)
    ours = [item for item in items if run.is_ours(item.path)]
    unmarked = [item.nodeid for item in ours if not matrix.check_of(item)]
    if unmarked:
        raise pytest.UsageError(f"{unmarked[0]} names no check: mark it with pytest.mark.check.")
    other = {item for item in ours if item.path.name.startswith("test_live") != run.options.live}
    run.left_out = len(other)
    mine = [item for item in ours if item not in other]
    for item in mine:
        _plan(run, item)
    _expect_failures(run, mine)
    wanted = levels.closure(run.options.levels)
    beside = {item for item in mine if wanted and not wanted.issuperset(run.results[item.nodeid].levels)}
    beside |= _other_rows(run, mine)
    config.hook.pytest_deselected(items=[*other, *beside])
    kept = [item for item in items if item not in other | beside]
    # What fails alone is spared the tests behind it.
    items[:] = sorted(kept, key=lambda item: item.path.name != FIRST)
    result = yield  # other plugins select by name, mark and so on
    for item in items:
        if run.is_ours(item.path):
            run.matrix.announce(item, run.name)
    return result


def _other_rows(run: Run, items: list[pytest.Item]) -> set[pytest.Item]:
    """The items of columns that were not asked for; UsageError for a name that is not a column."""
    if run.options.rows is None:
        return set()
    of = {item: str(matrix.row_of(item)) for item in items}
    if unknown := sorted(run.options.rows.difference(of.values())):
        known = ", ".join(sorted(set(of.values())))
        raise pytest.UsageError(f"--row takes {GATE} or a column of the matrix ({known}), and got {unknown[0]!r}.")
    return {item for item in items if of[item] not in run.options.rows}


def _plan(run: Run, item: pytest.Item) -> None:
    """Expect a result of the test."""
    check = matrix.check_of(item) or ""
    name = f"{item.path.name}::{item.nodeid.partition('::')[2]}"
    run.results[item.nodeid] = Result(name, check, levels.levels_of(item, check), matrix.row_of(item) or run.name)
    packaged = item.path.parent == Path(__file__).parents[1]
    run.commands[item.nodeid] = f"{PACKAGE}.{item.path.stem}::{name.partition('::')[2]}" if packaged else item.nodeid


def _expect_failures(run: Run, items: list[pytest.Item]) -> None:
    """Mark what the adopter's file names."""
    entries = run.options.xfails or {}
    names = {run.results[item.nodeid].id: item for item in items}
    for name, issue in entries.items():
        if name in names:
            names[name].add_marker(pytest.mark.xfail(reason=issue, strict=True))
    run.unmatched = xfails.unmatched(entries, names, files_of(names), Path(__file__).parents[1])


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    run = run_of(config)
    return [run.left_out_line()] if run.left_out else []


# -- running -----------------------------------------------------------------------------------------------------------


def pytest_runtest_setup(item: pytest.Item) -> None:
    run = run_of(item.config)
    for marker in item.iter_markers("needs"):
        if run.is_ours(item.path) and marker.args[0] not in run.offered:
            skip_for(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A check whose engine did not answer in time runs once more; only a second time says something."""
    try:
        return (yield)
    except Late as late:
        pyfuncitem.add_report_section("call", "tried again", f"The first time: {late}")
    return again.run(pyfuncitem)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around Hypothesis, which adds what it reported
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    run = run_of(item.config)
    if not run.is_ours(item.path):
        return (yield)
    matrix.stamp(item, run.name)
    report = yield
    report.sections = [(title, shrinking.honest(text)) for title, text in report.sections]
    report.conformance = results.details(item, call)  # type: ignore[attr-defined]  # read in `results.update`
    return report


class _Reporter:
    """Collects results, prints the section that ends the run, and writes the reports."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.run.collection_failed |= report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run.matrix.add(report)
        result = self.run.results.get(report.nodeid)
        if result is not None:
            result.row = next((str(row) for key, row in report.user_properties if key == "row"), result.row)
            results.update(result, report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            others = session.testsfailed - self.run.count(results.FAILED)
            code = self.run.exit(exitstatus)
            session.exitstatus = Exit.FAILED if others > 0 and code != Exit.FAILED else code
        elif exitstatus == pytest.ExitCode.INTERRUPTED and self.run.collection_failed:
            session.exitstatus = Exit.INFRASTRUCTURE

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if self.run.collect_only or exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        terminalreporter.section("conformance")
        for line in self.run.report(max(80, shutil.get_terminal_size().columns)):
            terminalreporter.line(line)
        for path in _written(self.run, int(exitstatus)):
            terminalreporter.line(f"report in {path}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.run.interrupted |= excinfo.type is KeyboardInterrupt

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Past pytest's last line, which says nothing of it."""
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        for line in self.run.unmatched_lines():
            assert reporter is not None, "pytest's reporter is there as long as its plugins"
            reporter.line(f"ERROR {line}", red=True)


def _written(run: Run, code: int) -> list[Path]:
    """Write the reports that were asked for; their paths."""
    options = run.options
    if options.report is None and options.html is None:
        return []
    from . import report

    return report.write(run, code)
