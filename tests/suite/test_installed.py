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
from refdelta.cli.suite import INSTALLED
from tests.suite.runs import CONFORMANCE, REPOSITORY, Outcome

IN_WHEEL = (
    "README.md",
    "report.schema.json",
    "report.html.j2",
    "vectors/README.md",
    "suite/plugin.py",
    "configs/qwen3-8b.json",
)
CHOSEN = "test_counts or declines or test_malformed"


def copy_of_the_sources(target: Path) -> None:
    """Building writes beside what it builds."""
    for name in ("refdelta", "conformance"):
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, target)


def built(source: Path, out: Path) -> Path:
    """The wheel of a directory, or of an archive, of sources."""
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    words = [sys.executable, "-m", "pip", "wheel", str(source), *options, "-w", str(out)]
    done = subprocess.run(words, cwd=out, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    copy_of_the_sources(source)
    return built(source, out)


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
        assert f"{INSTALLED}/{name}" in names
    vectors = {
        f"{INSTALLED}/{path.relative_to(CONFORMANCE).as_posix()}"
        for path in (CONFORMANCE / "vectors").rglob("*")
        if path.is_file()
    }
    assert len(vectors) > 1000
    assert vectors <= names
    chapters = {f"{INSTALLED}/{path.name}" for path in CONFORMANCE.glob("test_*.py")}
    assert len(chapters) > 10
    assert chapters <= names


def test_the_wheel_takes_no_name_of_others(wheel: Path) -> None:
    """No top-level `conformance`, and none of what needs the clone: broken engines, the demonstration, tests."""
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"refdelta", INSTALLED}
    assert not [name for name in names if name.startswith((f"{INSTALLED}/mutants", f"{INSTALLED}/demo"))]


def test_a_wheel_of_the_source_archive_is_the_same(wheel: Path, tmp_path: Path) -> None:
    """Whoever builds from the archive of the sources gets the same files."""
    source = tmp_path / "source"
    copy_of_the_sources(source)
    backend = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", backend], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    archive = source / done.stdout.splitlines()[-1]
    assert sorted(zipfile.ZipFile(built(archive, tmp_path)).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


WAYS = {
    "the command": ("-c", "from refdelta.cli import main; main()", "conformance", "-q", "-k", CHOSEN),
    "pyargs": ("-m", "pytest", "--pyargs", INSTALLED, "-q", "-p", "no:cacheprovider", "-k", CHOSEN),
    "one module": ("-m", "pytest", "--pyargs", f"{INSTALLED}.test_codec_counted", "-q", "-p", "no:cacheprovider"),
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
    where = run(installed, tmp_path, sys.executable, "-c", f"import {INSTALLED}; print({INSTALLED}.__file__)")
    assert where.text.strip() == str(installed / INSTALLED / "__init__.py")


def test_an_adopter_s_module_leaves_no_bytecode(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from helper import CODEC\n")
    (tmp_path / "helper.py").write_text(f"from {INSTALLED}.engines import Reference\nCODEC = Reference()\n")
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
    loaded = "'torch' not in sys.modules and 'refdelta.cli.pytest_plugin' in sys.modules"
    (tmp_path / "test_own.py").write_text(f"import sys\ndef test_own():\n    assert {loaded}\n")
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")
    found = run(installed, tmp_path, *words)
    assert found.code == 0, found.text
    unknown = run(installed, tmp_path, *words, "--engine", "reference")
    assert unknown.code == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --engine" in unknown.text


def test_another_package_called_conformance_is_left_alone(installed: Path, tmp_path: Path) -> None:
    """Others use the name, too; with it on the path the suite is still found, and is still its own."""
    (tmp_path / "conformance").mkdir()
    (tmp_path / "conformance" / "__init__.py").write_text("raise RuntimeError('somebody else')\n")
    for way in ("the command", "one module"):
        words = (*WAYS[way], "-k", "test_counts") if way == "one module" else WAYS[way]
        found = run(installed, tmp_path, sys.executable, *words, "--engine", "reference")
        assert found.code == Exit.PASSED, found.text[-3000:]


@pytest.mark.parametrize("order", [("conformance", INSTALLED), (INSTALLED, "conformance")])
def test_two_copies_are_refused(installed: Path, order: tuple[str, str]) -> None:
    """A failure that one copy raises is not known to the other."""
    code = f"import {order[0]}\nimport {order[1]}"
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{installed}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "two copies of refdelta's conformance suite in one run" in done.stderr


def test_the_installed_name_in_a_clone_is_refused(tmp_path: Path) -> None:
    """With a sentence that says what to run instead."""
    words = [sys.executable, "-m", "pytest", "--pyargs", INSTALLED, "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"run pytest {CONFORMANCE}" in done.stdout + done.stderr
