"""What an adopter does: the blocks of `conformance/README.md`, and the engines in `examples/`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from conformance.driving.levels import BY_ID, DECLINED, FAILED, PASSED
from conformance.driving.options import OPTIONS, Options
from conformance.live.backends import declared
from conformance.suite.run import Exit
from tests.suite.runs import REPOSITORY, command

README = (REPOSITORY / "conformance" / "README.md").read_text()
EXAMPLES = REPOSITORY / "examples"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
MY_PACKAGE = """
from refdelta import apply_delta, diff as difference, read_delta as read, write_delta as write

def patch(weights, delta):
    apply_delta(delta, weights)
"""
MY_CODEC = f"""#!/bin/sh
case "$1" in
diff) node {EXAMPLES}/exec_js/codec.mjs encode "$3" "$5" "$7" ;;
patch) node {EXAMPLES}/exec_js/codec.mjs apply "$3" "$5" "$7" ;;
esac
status=$?
[ "$status" = 3 ] && exit 2
exit "$status"
"""
FEW = "--hypothesis-profile=smoke"
"""That everything runs is the point; examples in number are the suite's own runs' and the nightly one's."""
node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which is not on PATH")


def files(*kinds: str) -> dict[str, str]:
    """File -> text, of the blocks whose first comment is the file's name."""
    named = ((re.search(r"^# (my[-_.\w]+)$", text, re.MULTILINE), text) for kind, text in BLOCKS if kind in kinds)
    return {found.group(1): text for found, text in named if found}


def line(word: str) -> str:
    """The command of the README that has this word."""
    (found,) = (str(text).strip() for kind, text in BLOCKS if kind == "bash" and word in text)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An adopter's directory: the README's files, and what `my_package` and `my-codec` stand for."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    for name, text in files("python", "sh").items():
        (home / name).write_text(text)
    (home / "my_package.py").write_text(MY_PACKAGE)
    (home / "bin" / "my-codec").write_text(MY_CODEC)
    (home / "bin" / "my-codec").chmod(0o755)
    return home


def path_with(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]])


def test_blocks_are_all_used() -> None:
    assert files("python", "sh").keys() == {"my_codec.py", "my-codec.sh", "my_plugin.py", "my_backend.py"}
    assert [kind for kind, _ in BLOCKS].count("bash") == 4


@pytest.mark.parametrize(
    ("word", "chosen"),
    [
        ("my_codec:CODEC", "test_vectors or applied or test_minimal or test_malformed"),
        pytest.param("my-codec.sh", "dtypes or test_misplaced or test_bf16", marks=node),
    ],
)
def test_the_readme_s_adapter_is_green(home: Path, word: str, chosen: str) -> None:
    """A part of the tests, for the time that the whole takes."""
    text = line(word)
    before = {path.name for path in home.iterdir()}
    done = command(
        ["sh", "-ec", text], cwd=home, PATH=path_with(home / "bin"), PYTEST_ADDOPTS=f'-k "{chosen}" -q {FEW}'
    )
    assert done.code == Exit.PASSED, done.text[-4000:]
    assert "declare the capability" in done.text
    assert {path.name for path in home.iterdir()} == before | {"report.html"}


def test_the_readme_s_plugin_declares(home: Path) -> None:
    """`tests/live/test_native_backend.py` runs it."""
    options = Options("vllm", None, (1,), None, backend="my_backend", plugin="my_plugin:register")
    assert declared(options, home) == set()
    assert set(re.findall(r"--[a-z-]+", line("--plugin"))) <= {option.name for option in OPTIONS}


def test_options_and_levels_in_the_readme_exist() -> None:
    known = {option.name for option in OPTIONS} | {
        "--pyargs",
        "--junitxml",
        "--maxfail",
        "--hypothesis-profile",
        "--from",
        "--to",
        "--out",
        "--delta",
        "--base",
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README)) <= known
    paragraph = README.partition("**Conformance.**")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == BY_ID.keys()


def judged(directory: Path, engine: str, report: Path, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Exit code, verdict by level, and output of a run from an example's directory."""
    words = [sys.executable, "-c", "from refdelta.cli import main; main()", "conformance", "--engine", engine]
    done = command([*words, "--report", str(report), "-q", *arguments], cwd=directory)
    assert report.exists(), done.text[-4000:]
    return done.code, {level["id"]: level["verdict"] for level in json.loads(report.read_text())["levels"]}, done.text


EXPECTED = dict.fromkeys(("applier", "safe", "strict", "reader", "writer", "codec", "canonical"), PASSED) | {
    "versioned": DECLINED,
    "router": DECLINED,
}


@pytest.mark.parametrize("profile", ["smoke", pytest.param("quick", marks=pytest.mark.nightly)])
def test_numpy_example_passes_the_levels_that_it_declares(tmp_path: Path, profile: str) -> None:
    engine, few = "codec:CODEC", f"--hypothesis-profile={profile}"
    code, levels, text = judged(EXAMPLES / "numpy_codec", engine, tmp_path / "r.json", few)
    assert code == Exit.PASSED, text[-4000:]
    assert levels == EXPECTED


def test_numpy_example_borrows_nothing() -> None:
    text = (EXAMPLES / "numpy_codec" / "codec.py").read_text()
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"numpy"}


@node
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_node_example_passes_the_levels_that_it_declares(tmp_path: Path) -> None:
    engine = "exec:node codec.mjs"
    code, levels, text = judged(EXAMPLES / "exec_js", engine, tmp_path / "report.json", FEW)
    assert code == Exit.PASSED, text[-4000:]
    assert levels == EXPECTED


@node
def test_a_fault_in_the_node_example_is_caught(tmp_path: Path) -> None:
    """Through `exec:` too: a level fails where the program is wrong."""
    text = (EXAMPLES / "exec_js" / "codec.mjs").read_text()
    broken = text.replace("at > positions[before]", "true")
    assert broken != text
    (tmp_path / "codec.mjs").write_text(broken)
    code, levels, _ = judged(tmp_path, "exec:node codec.mjs", tmp_path / "r.json", "-k", "index and test_malformed")
    assert code == Exit.FAILED
    assert levels["reader"] == FAILED
