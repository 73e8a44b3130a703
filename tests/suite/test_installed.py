"""The suite as it is installed: from the wheel alone, outside the repository, leaving nothing where it was started."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conformance.suite.run import Exit
from tests.suite.runs import CONFORMANCE, REPOSITORY, Outcome

IN_WHEEL = (
    "README.md",
    "report.schema.json",
    "report.html.j2",
    "sentences.json",
    "vectors/README.md",
    "suite/launch.py",
    "configs/qwen3-8b.json",
)
CHOSEN = "test_counts or declines or test_malformed"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, as building writes beside what it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("refdelta", "conformance"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(out),
    ]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH with nothing but the wheel."""
    target = tmp_path_factory.mktemp("target")
    words = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    done = subprocess.run([*words, str(wheel)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def run(installed: Path, cwd: Path, *words: str) -> Outcome:
    """A command that sees the wheel, not the repository; bytecode may be written, as for any adopter."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(installed), "COLUMNS": "100"}
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return Outcome(done.returncode, done.stdout + done.stderr)


def test_the_wheel_carries_the_suite(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in IN_WHEEL:
        assert f"conformance/{name}" in names
    vectors = {
        path.relative_to(REPOSITORY).as_posix() for path in (CONFORMANCE / "vectors").rglob("*") if path.is_file()
    }
    assert len(vectors) > 1000
    assert vectors <= names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)


WAYS = {
    "the command": ("-c", "from refdelta.cli import main; main()", "conformance", "-q", "-k", CHOSEN),
    "pyargs": ("-m", "pytest", "--pyargs", "conformance", "-q", "-p", "no:cacheprovider", "-k", CHOSEN),
    "one module": ("-m", "pytest", "--pyargs", "conformance.test_codec_counted", "-q", "-p", "no:cacheprovider"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_it_runs_in_an_empty_directory_and_leaves_it_so(installed: Path, way: str, tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    cwd = tmp_path / "empty"
    cwd.mkdir()
    found = run(installed, cwd, sys.executable, *WAYS[way], "--engine", "reference", "--report", str(report))
    assert found.code == Exit.PASSED, found.text[-4000:]
    assert found.words()["counted"] == "pass"
    assert "live tests deselected" in found.text or way == "one module"
    assert "PytestAssertRewriteWarning" not in found.text
    assert report.exists()
    assert not list(cwd.iterdir())


def test_ctrl_c_in_a_test_is_130(installed: Path, tmp_path: Path) -> None:
    """pytest's own code for it is the suite's for bad usage."""
    text = "import os, signal\ndef interrupt(*_):\n    os.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "mine.py").write_text(
        text
        + "class Codec:\n    name = 'mine'\n    capabilities = set()\n    encode = apply = interrupt\nCODEC = Codec()\n"
    )
    words = (*WAYS["the command"][:3], "-q", "-k", "test_counts", "--engine", "mine:CODEC")
    found = run(installed, tmp_path, sys.executable, *words, "--report", "report.json", "--html", "report.html")
    assert found.code == 130, found.text[-3000:]
    assert "Traceback" not in found.text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "interrupted"
    assert report["partial"].startswith("Interrupted: ")
    assert "nothing judged" not in (tmp_path / "report.html").read_text()


def test_it_is_the_wheel_s(installed: Path, tmp_path: Path) -> None:
    where = run(installed, tmp_path, sys.executable, "-c", "import conformance, refdelta; print(conformance.__file__)")
    assert where.text.strip() == str(installed / "conformance" / "__init__.py")


def test_an_adopter_s_module_leaves_no_bytecode(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from helper import CODEC\n")
    (tmp_path / "helper.py").write_text("from conformance.engines import Reference\nCODEC = Reference()\n")
    words = (sys.executable, *WAYS["one module"], "--engine", "mine:CODEC")
    found = run(installed, tmp_path, *words)
    assert found.code == Exit.PASSED, found.text[-3000:]
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "helper.py"}


@pytest.mark.parametrize("way", ["the command", "pyargs"])
def test_bad_usage_ends_alike(installed: Path, way: str, tmp_path: Path) -> None:
    found = run(installed, tmp_path, sys.executable, *WAYS[way], "--engine", "nonsense")
    assert found.code == Exit.USAGE
    assert "Engine 'nonsense' is not one of reference" in found.text
    other = run(installed, tmp_path, sys.executable, *WAYS[way], "--engine", "no.such.module:Codec")
    assert other.code == Exit.INFRASTRUCTURE


def test_other_test_runs_are_left_alone(installed: Path, tmp_path: Path) -> None:
    """The plugin adds no option and imports no torch where the suite is not asked for."""
    loaded = "'torch' not in sys.modules and 'conformance.suite.launch' in sys.modules"
    (tmp_path / "test_own.py").write_text(f"import sys\ndef test_own():\n    assert {loaded}\n")
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    found = run(installed, tmp_path, *words)
    assert found.code == 0, found.text
    unknown = run(installed, tmp_path, *words, "--engine", "reference")
    assert unknown.code == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --engine" in unknown.text
