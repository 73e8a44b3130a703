"""The plumbing, run as an adopter runs it: options, selection, exit codes, the matrix, and what is left behind.

Most runs are of a small suite, the plumbing of the real one around tests whose outcomes are known.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conformance.driving.checks import CODEC_CHECKS
from conformance.driving.options import Options
from conformance.engines.codecs import BadEngine
from conformance.inputs import checkpoints
from conformance.live import backends
from conformance.suite import matrix
from conformance.suite.run import Exit
from tests.suite.runs import CONFORMANCE, REPOSITORY, Outcome, run, run_all, small_suite

QUIET = ("-q", "-p", "no:cacheprovider")
ENGINE = "tests.suite.test_command_line"
FOREIGN = ("--engine", "vllm", "--backend", "mine")

CODEC_TESTS = """
import pytest
pytestmark = pytest.mark.check("bit_exact")

def test_passes(engine):
    assert engine.name == "little"

@pytest.mark.check("inverts")
@pytest.mark.needs("inverts")
def test_skipped(engine):
    raise AssertionError("ran, although the engine does not declare what it needs")

@pytest.mark.check("minimal")
def test_fails(engine):
    assert "x" == "y"

@pytest.fixture
def broken_fixture():
    raise RuntimeError("no set-up")

@pytest.mark.check("counted")
def test_has_no_set_up(broken_fixture):
    pass
"""

LIVE_TESTS = """
import pytest
from conformance.suite.matrix import set_row
pytestmark = pytest.mark.check("touch_all")
ROWS = [pytest.param(tp, marks=pytest.mark.row(f"qwen3-tied tp={tp}")) for tp in (1, 2)]

@pytest.mark.parametrize("tp", ROWS)
def test_passes(options, tp):
    assert options.tp == (1, 2)

@pytest.mark.check("aliases")
@pytest.mark.parametrize("tp", ROWS)
def test_fails_at_two(tp):
    assert tp == 1

@pytest.mark.check("shards")
def test_says_its_row(request):
    set_row(request.node, "gemma4 tp=2")
    pytest.skip("one shard only")
"""

OTHER_TESTS = """
import pytest
from conformance.findings import Finding, InfrastructureFailed, Mismatch
pytestmark = pytest.mark.check("refuses")

def test_passes():
    pass

def test_fails():
    raise Mismatch(Finding("bits", "a.weight", (1, 2), 5, "0x8000", "0x0000", "torch.bfloat16", 1, 6))

@pytest.mark.check("minimal")
def test_has_no_engine():
    raise InfrastructureFailed("the engine did not start")

@pytest.mark.parametrize("name", ["with # and :: in it"])
def test_named(name):
    assert False
"""

BROKEN_TEST = "import no_such_module"

UNMARKED_TEST = """
def test_of_nothing():
    pass
"""


class Little:
    """The smallest engine."""

    name = "little"
    capabilities: frozenset[str] = frozenset()

    def encode(self, base: object, target: object, out: object) -> None:
        """Does nothing: the small suite never calls it."""

    def apply(self, delta: object, weights: object) -> None:
        """Does nothing."""


class WithoutApply:
    name = "without apply"
    capabilities: frozenset[str] = frozenset()

    def encode(self, base: object, target: object, out: object) -> None:
        """Does nothing."""


class WithoutInvert(Little):
    capabilities = frozenset({"inverts"})


class Boastful(Little):
    capabilities = frozenset({"flies"})


class WithoutCapabilities(Little):
    capabilities = None  # type: ignore[assignment]  # the fault that is tested


OTHER = ("test_codec_other.py", "--engine", f"{ENGINE}:Little")
XFAILS = {
    "expected": "# known\n\ntest_codec_other.py::test_fails  # https://example.org/issues/1\n"
    "test_codec_other.py::test_named[with # and :: in it]  # issue 2\n",
    "passes": "test_codec_other.py::test_passes # issue 3\ntest_codec_other.py::test_fails # issue 1\n",
    "absent": "test_codec_other.py::test_no_more # issue 4\ntest_codec_gone.py::test_x # issue 5\n",
    "elsewhere": "test_codec_minimal.py::test_minimal # issue 6\n",
    "no_issue": "test_codec_other.py::test_fails\n",
    "twice": "a::b # 1\na::b # 2\n",
}
RUNS = {
    "codec": ("test_codec_small.py", "test_live_small.py", "--engine", f"{ENGINE}:Little"),
    "live": ("test_codec_small.py", "test_live_small.py", "--engine", "vllm"),
    "skips only": ("test_codec_small.py", "-k", "test_skipped", "--engine", f"{ENGINE}:Little"),
    "nothing selected": ("test_codec_small.py", "-k", "no_such_test", "--engine", f"{ENGINE}:Little"),
    "other kind only": ("test_live_small.py", "--engine", f"{ENGINE}:Little"),
    "collected only": ("test_codec_small.py", "--collect-only", "--engine", f"{ENGINE}:Little"),
    "infrastructure": (*OTHER, "-k", "passes or no_engine"),
    "infrastructure and failure": (*OTHER, "-k", "fails or no_engine"),
    "expected": (*OTHER, "-k", "passes or fails or named", "--xfails-file", "expected.txt"),
    "expected and passes": (*OTHER, "-k", "passes or fails", "--xfails-file", "passes.txt"),
    "expected and absent": (*OTHER, "-k", "passes", "--xfails-file", "absent.txt"),
    "expected in another file": (*OTHER, "-k", "passes", "--xfails-file", "elsewhere.txt"),
    "level": (*OTHER, "--level", "writer"),
    "broken": ("test_codec_broken.py", "--engine", f"{ENGINE}:Little"),
    "unmarked": ("test_codec_unmarked.py", "--engine", f"{ENGINE}:Little"),
}
USAGE_ERRORS = {
    ("--engine", "nonsense"): (
        "Engine 'nonsense' is not one of reference, vllm, package.module:Object and exec:COMMAND."
    ),
    ("--engine", "no.such.module:Codec"): "cannot import no.such.module",
    ("--engine", f"{ENGINE}:Nobody"): f"{ENGINE} has no Nobody.",
    ("--engine", f"{ENGINE}:WithoutApply"): "lacks apply.",
    ("--engine", f"{ENGINE}:WithoutInvert"): "lacks invert.",
    ("--engine", f"{ENGINE}:Boastful"): "declares unknown capabilities ['flies']",
    ("--engine", f"{ENGINE}:WithoutCapabilities"): "has no set `capabilities`",
    ("--tp", "2"): "--tp needs --engine vllm, and the engine is 'reference'.",
    ("--checkpoint", "some/model"): "--checkpoint needs --engine vllm",
    ("--mutant", "swap"): "--mutant needs --engine vllm",
    ("--row", "gate"): "--row needs --engine vllm",
    ("--engine", "vllm", "--backend", "b", "--plugin", "p", "--init-info", "[1]"): "--init-info takes a JSON object",
    ("--engine", "vllm", "--init-info", "{}"): "--init-info needs --backend.",
    ("--engine", "vllm", "--tp", "0"): "--tp takes positive numbers, and got '0'.",
    ("--engine", "vllm", "--tp", "1,two"): "--tp takes positive numbers, and got '1,two'.",
    ("--engine", "exec:"): "exec: needs a command",
    ("--engine", "exec:/no/such/program"): "`/no/such/program capabilities` cannot be run: No such file or directory",
    ("--engine", "exec:false"): "`false capabilities` failed: exit 1, where 0 is done and 3 is refused",
    ("--engine", "exec:echo flies"): "declares unknown capabilities ['capabilities', 'flies']",
    (
        "--engine",
        "exec:true",
        "--capabilities",
        "strided",
    ): "['strided'], which a program engine cannot offer.",
    ("--engine", "exec:true", "--exec-timeout", "0"): "--exec-timeout takes a positive number of seconds",
    ("--exec-timeout", "5"): "--exec-timeout needs --engine exec:COMMAND",
    ("--capabilities", "large"): "--capabilities is for other engines than the reference",
    ("--engine", f"{ENGINE}:Little", "--capabilities", "rollback"): "['rollback'], which a codec engine cannot offer.",
    ("--engine", "vllm", "--backend", "mine"): "--backend needs --plugin.",
    ("--engine", "vllm", "--plugin", "mine"): "--plugin needs --backend.",
    ("--engine", "vllm", "--update-info", '{"at": "{path}"}'): "--update-info needs --backend.",
    ("--backend", "mine"): "--backend needs --engine vllm",
    (*FOREIGN, "--plugin", "no.such.module"): "Plugin 'no.such.module': cannot import no.such.module",
    (*FOREIGN, "--plugin", "no_such_module"): "there is no module no_such_module.",
    (*FOREIGN, "--plugin", "tests.suite.runs"): "assigns no CAPABILITIES; an empty set will do",
    (*FOREIGN, "--plugin", "tests.suite.plugins.computed"): "CAPABILITIES is to be a literal set of names",
    (*FOREIGN, "--plugin", "tests.suite.plugins.boastful"): "declares unknown capabilities ['flies']",
    (*FOREIGN, "--plugin", "tests.suite.runs", "--update-info", "{"): "--update-info is no JSON",
    (*FOREIGN, "--plugin", "tests.suite.runs", "--update-info", '{"a": 1}'): "a JSON object that holds {path}",
    (
        *FOREIGN,
        "--plugin",
        "tests.suite.plugins.incomplete",
    ): "cannot be imported: ModuleNotFoundError: No module",
    (*FOREIGN, "--plugin", "tests.suite.plugins.whole:absent"): "has no attribute 'absent'",
    (*FOREIGN, "--plugin", "unfinished:register"): "unfinished.py, line 2: invalid syntax",
    ("--engine", "vllm", "--checkpoint", "/nope"): "--checkpoint /nope: no such directory.",
    (
        "--engine",
        "vllm",
        "--checkpoint",
        "no-such/model",
    ): "no such hub id in the local cache (to fetch it: hf",
    ("--engine", "vllm", "--checkpoint", "."): ".: not a whole checkpoint, ",
    ("--hypothesis-profile", "nope"): "--hypothesis-profile takes ci, nightly, quick, program, smoke, and got 'nope'.",
    (
        "--level",
        "live",
    ): "--level takes applier, safe, strict, reader, writer, codec, canonical, versioned, router with this engine",
    ("--xfails-file", "absent"): "No such file or directory",
    ("--xfails-file", "no_issue.txt"): "line 1: expected `ID  # issue link`, found 'test_codec_other.py::test_fails'.",
    ("--xfails-file", "twice.txt"): "line 2: a::b is there twice.",
    ("--report", "absent/report.json"): "--report absent/report.json: not a file in a directory that exists.",
    ("no/such/test.py",): "file or directory not found: no/such/test.py",
}
CODES: dict[tuple[str, ...], Exit] = {
    ("--engine", "no.such.module:Codec"): Exit.INFRASTRUCTURE,
    ("--engine", "exec:/no/such/program"): Exit.INFRASTRUCTURE,
}
"""Those that are no bad usage: what is named does not start."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    """Label or arguments -> outcome of that run of the small suite."""
    suite, cwd = tmp_path_factory.mktemp("suite"), tmp_path_factory.mktemp("cwd")
    small_suite(suite)
    tests = {"codec_small": CODEC_TESTS, "live_small": LIVE_TESTS, "codec_unmarked": UNMARKED_TEST}
    tests |= {"codec_other": OTHER_TESTS, "codec_broken": BROKEN_TEST}
    for name, text in XFAILS.items():
        (cwd / f"{name}.txt").write_text(text)
    (cwd / "unfinished.py").write_text("CAPABILITIES = set()\ndef register(:\n")
    for name, text in tests.items():
        (suite / f"test_{name}.py").write_text(text)
    runs: dict[object, list[str]] = {
        label: [*QUIET, *(str(suite / word) if word.endswith(".py") else word for word in words)]
        for label, words in RUNS.items()
    }
    runs |= {words: [*QUIET, str(suite / "test_codec_small.py"), *words] for words in USAGE_ERRORS}
    found = dict(zip(runs, run_all(list(runs.values()), cwd), strict=True))
    assert {path.stem for path in cwd.iterdir()} == XFAILS.keys() | {"unfinished"}, (
        "a run wrote into the working directory"
    )
    return found


@pytest.mark.parametrize("arguments", list(USAGE_ERRORS), ids=" ".join)
def test_bad_usage_is_one_sentence(outcomes: dict[object, Outcome], arguments: tuple[str, ...]) -> None:
    outcome = outcomes[arguments]
    assert outcome.code == CODES.get(arguments, Exit.USAGE), outcome.text
    lines = [line for line in outcome.text.splitlines() if line.strip() and not line.startswith("no tests ran")]
    assert len(lines) == 1, outcome.text
    assert lines[0].startswith("ERROR: ")
    assert USAGE_ERRORS[arguments] in lines[0]


def test_a_checkpoint_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole directory, and a hub id whose snapshot the local cache holds; a shard that is missing is named."""
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (snapshot / checkpoints.INDEX_FILE).write_text(json.dumps(index))
    (snapshot / "one.safetensors").touch()
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("me/tiny", str(snapshot)):
        with pytest.raises(checkpoints.NoCheckpoint, match=r"has no two\.safetensors$"):
            checkpoints.given(name)
    (snapshot / "two.safetensors").touch()
    for name in ("me/tiny", str(snapshot)):
        assert checkpoints.given(name).directory == snapshot
    for name in ("me/other", "./tiny", "/me/tiny"):
        with pytest.raises(checkpoints.NoCheckpoint, match="no such directory"):
            checkpoints.given(name)


def test_a_plugin_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(backends, "_TRIAL_S", 0.5)
    options = Options("vllm", None, (1,), None, backend="mine", plugin="hangs")
    with pytest.raises(BadEngine, match=r"Plugin 'hangs' is not imported within 0\.5 s\."):
        backends.check_import(options, tmp_path)


def test_collecting_imports_no_plugin(tmp_path: Path) -> None:
    """Only a run that starts engines pays for it."""
    arguments = [str(CONFORMANCE / "test_live.py"), "--collect-only", *FOREIGN]
    (outcome,) = run_all([[*QUIET, *arguments, "--plugin", "tests.suite.plugins.incomplete"]], tmp_path)
    assert outcome.code == pytest.ExitCode.OK, outcome.text


def test_codec_run(outcomes: dict[object, Outcome]) -> None:
    outcome = outcomes["codec"]
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    expected = dict.fromkeys(CODEC_CHECKS, "-")
    assert outcome.words() == expected | {"bit_exact": "pass", "inverts": "skip", "minimal": "FAIL", "counted": "FAIL"}
    assert "skip inverts [little]: the engine does not declare the capability 'inverts': invert(delta" in outcome.text
    assert "5 live tests deselected: they need --engine vllm" in outcome.text
    assert f"\n{matrix.CODEC_PROVES}\n" in outcome.text
    assert "\nengine     little\n" in outcome.text


def test_live_run(outcomes: dict[object, Outcome]) -> None:
    outcome = outcomes["live"]
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    lines = [line.split() for line in outcome.text.splitlines()]
    assert ["qwen3-tied", "qwen3-tied", "gemma4"] in lines
    assert ["tp=1", "tp=2", "tp=2"] in lines
    assert ["touch_all", "pass", "pass", "-"] in lines
    assert ["aliases", "pass", "FAIL", "-"] in lines
    assert ["shards", "-", "-", "skip"] in lines
    assert "skip shards [gemma4 tp=2]: one shard only (tests: 1)" in outcome.text
    assert "4 codec tests deselected: they need a codec; this run has --engine vllm" in outcome.text
    assert f"\n{matrix.LIVE_PROVES}\n" in outcome.text
    assert "bit_exact" not in outcome.text.partition(" conformance ")[2].partition("short test summary")[0]


@pytest.mark.parametrize("label", ["skips only", "nothing selected", "other kind only"])
def test_judging_nothing_does_not_pass(outcomes: dict[object, Outcome], label: str) -> None:
    assert outcomes[label].code == Exit.USAGE, outcomes[label].text
    assert "Nothing was judged, so nothing passed." in outcomes[label].text


def test_partial_run_says_so(outcomes: dict[object, Outcome]) -> None:
    assert "Partial run: 3 of 4 tests did not run" in outcomes["skips only"].text
    assert "Partial run" not in outcomes["codec"].text + outcomes["live"].text


@pytest.mark.parametrize(
    ("label", "code"),
    [
        ("infrastructure", Exit.INFRASTRUCTURE),
        ("infrastructure and failure", Exit.FAILED),
        ("expected", Exit.PASSED),
        ("expected and passes", Exit.FAILED),
        ("expected and absent", Exit.FAILED),
        ("expected in another file", Exit.PASSED),
        ("broken", Exit.INFRASTRUCTURE),
    ],
)
def test_how_a_run_ends(outcomes: dict[object, Outcome], label: str, code: Exit) -> None:
    """Failures of the engine come before those of the infrastructure, and an xfails file that is not true is one."""
    assert outcomes[label].code == code, outcomes[label].text


def test_expected_failures_are_said(outcomes: dict[object, Outcome]) -> None:
    text = outcomes["expected"].text
    assert "1 passed" in text
    assert "2 xfailed" in text
    assert "skip refuses [little]: expected failure: https://example.org/issues/1 (tests: 1)" in text
    assert "level reader         failed " in text, "a level is not passed with a failure in it, expected or not"
    for name in ("test_codec_other.py::test_no_more", "test_codec_gone.py::test_x"):
        line = f"The xfails file names a test that does not exist: {name}"
        before, after = re.split(r"\n.* in [\d.]+s\n", outcomes["expected and absent"].text)
        assert line in before
        assert f"ERROR {line}" in after.splitlines(), "pytest's last line tells of no failure, so it is said below"


def test_selecting_a_level(outcomes: dict[object, Outcome]) -> None:
    """`minimal` is of writers, `refuses` of readers."""
    assert outcomes["level"].words() == dict.fromkeys(CODEC_CHECKS, "-") | {"minimal": "infra"}
    assert "3 of 4 tests did not run" in outcomes["level"].text


def test_collecting_only_prints_no_matrix(outcomes: dict[object, Outcome]) -> None:
    assert outcomes["collected only"].code == pytest.ExitCode.OK
    assert "Nothing was judged" not in outcomes["collected only"].text


def test_unmarked_test_is_a_usage_error(outcomes: dict[object, Outcome]) -> None:
    assert outcomes["unmarked"].code == Exit.USAGE
    assert "test_of_nothing names no check" in outcomes["unmarked"].text


def test_other_packages_tests_are_left_alone(tmp_path: Path) -> None:
    """Beside tests of the adopter's own, the suite selects and judges only what is under its directory."""
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    arguments = (str(CONFORMANCE / "test_codec_counted.py"), "test_own.py", "-k", "own or empty")
    outcome = run(*QUIET, *arguments, cwd=tmp_path)
    assert outcome.code == pytest.ExitCode.OK, outcome.text
    assert "2 passed" in outcome.text


def test_engine_from_the_working_directory(tmp_path: Path) -> None:
    """An adopter's module lies beside their own code."""
    (tmp_path / "mine.py").write_text("from conformance.mutants.right import Plain\nCODEC = Plain()\n")
    chapter = str(CONFORMANCE / "test_codec_counted.py")
    outcome = run(*QUIET, chapter, "--engine", "mine:CODEC", cwd=tmp_path)
    assert outcome.code == pytest.ExitCode.OK, outcome.text
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py"}


PROPERTY = """
import pytest
from hypothesis import given, settings, strategies as st

@pytest.mark.check("bit_exact")
@given(st.integers())
def test_fails(number):
    current = settings.get_current_profile_name()
    assert number < 1000, f"profile {current}, derandomised: {settings().derandomize}"
"""


@pytest.mark.parametrize(("profile", "derandomised", "kept"), [("ci", True, False), ("nightly", False, True)])
def test_hypothesis_profiles(tmp_path: Path, profile: str, derandomised: bool, kept: bool) -> None:
    """`nightly` keeps what failed, and neither writes into the working directory."""
    suite, cwd, temporary = (tmp_path / name for name in ("suite", "cwd", "temporary"))
    for directory in (suite, cwd, temporary):
        directory.mkdir()
    small_suite(suite)
    (suite / "test_codec_property.py").write_text(PROPERTY)
    chosen = [] if profile == "ci" else [f"--hypothesis-profile={profile}"]
    outcome = run(*QUIET, *chosen, str(suite), cwd=cwd, TMPDIR=str(temporary))
    assert outcome.code == pytest.ExitCode.TESTS_FAILED
    assert f"profile {profile}, derandomised: {derandomised}" in outcome.text
    assert not list(cwd.iterdir())
    assert bool(list(temporary.glob("refdelta-hypothesis-*/examples/*"))) == kept


def test_an_unknown_profile_of_the_tests_is_one_sentence(tmp_path: Path) -> None:
    """The environment chooses that of refdelta's own tests, as one line of usage, whatever else pytest prints."""
    tests = str(REPOSITORY / "tests" / "project")
    outcome = run(*QUIET, "--collect-only", tests, cwd=tmp_path, HYPOTHESIS_PROFILE="nope")
    assert outcome.code == pytest.ExitCode.USAGE_ERROR, outcome.text
    assert outcome.text.strip().startswith("ERROR: HYPOTHESIS_PROFILE: Profile 'nope' is not registered")
    assert "\n" not in outcome.text.strip()
