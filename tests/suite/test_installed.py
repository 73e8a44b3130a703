"""The suite as it is installed: from the wheel alone, outside the repository, leaving nothing where it was started."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from conformance.suite.run import Exit
from refdelta import __version__
from tests.suite.runs import CONFORMANCE, REPOSITORY, Outcome, command

PACKAGE = "refdelta_conformance"
"""The suite's name where a wheel installed it."""
DATA = {"README.md", "report.schema.json", "report.html.j2", "sentences.json"}
"""Files of the suite that are no modules, beside vectors and configurations."""
IN_CLONE_ALONE = ("mutants", "demo.py")
PIP = (sys.executable, "-m", "pip")
OWN_MODULE = re.compile(r"conformance(\.\w+)+")
CHOSEN = "test_counts or declines or test_malformed"


def done(words: Sequence[str], cwd: Path) -> None:
    found = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout[-1000:] + found.stderr[-3000:]


def built(source: Path, out: Path) -> Path:
    """The wheel of a folder of sources, without a network."""
    done([*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out)], source)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the clone, as building writes beside what it builds; an earlier build left a file there."""
    source = tmp_path_factory.mktemp("source")
    for name in ("refdelta", "conformance"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    stale = source / "build" / "lib" / "conformance"
    stale.mkdir(parents=True)
    (stale / "__init__.py").touch()
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for PYTHONPATH with nothing but the wheel."""
    target = tmp_path_factory.mktemp("target")
    done([*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)], target)
    return target


def run(installed: Path, cwd: Path, *words: str, beside: Sequence[Path] = ()) -> Outcome:
    """A command that sees the wheel, not the repository; bytecode may be written, as for any adopter.

    beside: further places to import from.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, (installed, *beside))), "COLUMNS": "100"}
    found = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)
    return Outcome(found.returncode, found.stdout + found.stderr)


def inside(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def files(folder: str) -> set[str]:
    """Names of all files of the clone's suite below a folder, but bytecode, relative to the suite."""
    found = (path for path in (CONFORMANCE / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(CONFORMANCE).as_posix() for path in found}


def test_the_wheel_has_two_packages(wheel: Path) -> None:
    """And none that is called `conformance`, a name that others use."""
    assert {name.partition("/")[0] for name in inside(wheel)} == {
        "refdelta",
        PACKAGE,
        f"refdelta-{__version__}.dist-info",
    }


def test_the_wheel_carries_the_suite(wheel: Path) -> None:
    carried = {name.removeprefix(f"{PACKAGE}/") for name in inside(wheel) if name.startswith(f"{PACKAGE}/")}
    modules = {name for name in files(".") if name.endswith(".py") and name.split("/")[0] not in IN_CLONE_ALONE}
    configs = {name for name in files("configs") if name.endswith(".json")}
    assert len(modules) > 80
    assert len(files("vectors")) > 1000
    assert carried == modules | files("vectors") | configs | DATA


def test_the_source_distribution_makes_the_same_wheel(wheel: Path, source: Path, tmp_path: Path) -> None:
    make = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    done([sys.executable, "-c", make, str(tmp_path)], source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not [name for name in IN_CLONE_ALONE if (unpacked / "conformance" / name).exists()]
    assert inside(built(unpacked, tmp_path)) == inside(wheel)


def test_an_editable_install_leads_to_the_clone(source: Path, tmp_path: Path) -> None:
    """Under the name that the folder has there."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path))
    done([*PIP, "install", "-e", str(source), *options], tmp_path)
    program = (
        "import importlib.util as u, site, sys; site.addsitedir(sys.argv[1]); "
        f"print(*(u.find_spec(name) and u.find_spec(name).origin for name in ('refdelta', 'conformance', '{PACKAGE}')))"
    )
    words = (sys.executable, "-S", "-c", program, str(tmp_path))  # -S: without what is installed here
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    places = [str(source / name / "__init__.py") for name in ("refdelta", "conformance")]
    assert found.stdout.split() == [*places, "None"], found.stderr


WAYS = {
    "the command": ("-c", "from refdelta.cli import main; main()", "conformance", "-q", "-k", CHOSEN),
    "pyargs": ("-m", "pytest", "--pyargs", PACKAGE, "-q", "-p", "no:cacheprovider", "-k", CHOSEN),
    "one module": ("-m", "pytest", "--pyargs", f"{PACKAGE}.test_codec_counted", "-q", "-p", "no:cacheprovider"),
    "one test": ("-m", "pytest", "--pyargs", f"{PACKAGE}.test_codec_counted::test_counts", "-p", "no:cacheprovider"),
}


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with somebody else's package `conformance`."""
    place = tmp_path_factory.mktemp("another")
    (place / "conformance").mkdir()
    (place / "conformance" / "__init__.py").write_text("OF = 'somebody else'\n")
    return place


@pytest.mark.parametrize("way", list(WAYS))
def test_it_runs_in_an_empty_directory_and_leaves_it_so(
    installed: Path, another: Path, way: str, tmp_path: Path
) -> None:
    """The engine's module has imported somebody else's `conformance` before it takes the reference from the suite's."""
    (tmp_path / "mine.py").write_text(
        f"import conformance\nfrom {PACKAGE}.engines import Reference\n"
        "class Mine(Reference):\n    name = conformance.OF\n"
    )
    report = tmp_path / "out.json"
    cwd = tmp_path / "empty"
    cwd.mkdir()
    words = (sys.executable, *WAYS[way], "--engine", "mine:Mine", "--report", str(report))
    found = run(installed, cwd, *words, beside=(another, tmp_path))
    assert found.code == Exit.PASSED, found.text[-4000:]
    assert found.words()["counted"] == "pass"
    assert "live tests deselected" in found.text or way.startswith("one ")
    assert "PytestAssertRewriteWarning" not in found.text
    document = json.loads(report.read_text())
    assert document["engine"]["name"] == "somebody else"
    repeat = {test["reproduce"].split(" --engine")[0] for test in document["tests"] if "counted" in test["id"]}
    assert f"python -m pytest --pyargs {PACKAGE}.test_codec_counted::test_counts" in repeat
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
    where = run(installed, tmp_path, sys.executable, "-c", f"import {PACKAGE} as found; print(found.__file__)")
    assert where.text.strip() == str(installed / PACKAGE / "__init__.py")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM, which is not installed")
@pytest.mark.timeout(400)
def test_a_live_row(installed: Path, another: Path, tmp_path: Path) -> None:
    """Children that hold engines, and vLLM's workers, find the suite under its name, beside another `conformance`."""
    words = ["-m", "pytest", "--pyargs", f"{PACKAGE}.test_live", "-q", "-p", "no:cacheprovider", "--engine", "vllm"]
    words += ["--backend", "native", "--plugin", "native_backend:register", "--update-info", '{"delta": "{path}"}']
    words += ["--row", "qwen3-untied tp=1", "-k", "every_tensor or special_values or unknown_name"]
    beside = (another, REPOSITORY / "examples" / "native_backend")
    found = run(installed, tmp_path, sys.executable, *words, beside=beside)
    assert found.code == Exit.PASSED, found.text[-4000:]
    assert "3 passed" in found.text


@pytest.mark.parametrize("order", [("conformance", PACKAGE), (PACKAGE, "conformance")], ids=" first, ".join)
def test_it_is_never_imported_twice(installed: Path, order: tuple[str, str], tmp_path: Path) -> None:
    """From the wheel and from a clone: which of the two failures or registries is meant, nobody could tell."""
    words = (sys.executable, "-c", f"import {order[0]}\nimport {order[1]}")
    found = run(installed, tmp_path, *words, beside=[REPOSITORY])
    assert found.code != 0
    assert "ImportError: two copies of refdelta's conformance suite in one run" in found.text.splitlines()[-1]
    assert {str(installed / PACKAGE / "__init__.py"), str(CONFORMANCE / "__init__.py")} <= set(
        re.findall(r"/[^ ,:]+\.py", found.text.splitlines()[-1])
    )


def test_nor_by_one_run_of_pytest(installed: Path, tmp_path: Path) -> None:
    chapter = CONFORMANCE / "test_codec_counted.py"
    words = (sys.executable, *WAYS["one module"], str(chapter), "--engine", "reference")
    found = run(installed, tmp_path, *words)
    assert found.code not in (Exit.PASSED, Exit.FAILED)
    assert "two copies of refdelta's conformance suite in one run" in found.text
    assert " passed" not in found.text


def test_somebody_else_s_conformance_is_no_copy(installed: Path, another: Path, tmp_path: Path) -> None:
    program = f"import conformance, {PACKAGE}; print(conformance.OF)"
    assert run(another, tmp_path, sys.executable, "-c", program, beside=[installed]).text == "somebody else\n"


def test_a_clone_says_that_it_has_the_other_name(tmp_path: Path) -> None:
    found = command([sys.executable, *WAYS["one module"]], tmp_path)
    assert found.code == pytest.ExitCode.USAGE_ERROR
    assert f"is a clone, whose suite is {CONFORMANCE}: run pytest {CONFORMANCE}" in found.text


def test_no_module_names_the_suite_s_package_itself() -> None:
    """A string such as "conformance.live.host" is a module in a clone alone; children are started by such names."""
    named = []
    for name in files("."):
        if not name.endswith(".py") or name.split("/")[0] in IN_CLONE_ALONE:
            continue
        tree = ast.parse((CONFORMANCE / name).read_text())
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said)
        named += [f"{name}: {text}" for text in found if isinstance(text, str) and OWN_MODULE.match(text)]
    assert named == ["suite/plugin.py: conformance.reporter"], "pytest's name of a plugin, no module's"


def test_an_adopter_s_module_leaves_no_bytecode(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from helper import CODEC\n")
    (tmp_path / "helper.py").write_text(f"from {PACKAGE}.engines import Reference\nCODEC = Reference()\n")
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
