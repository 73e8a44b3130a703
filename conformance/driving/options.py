"""What the command line of the suite says: one frozen object, checked once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..engines.program import TIMEOUT
from . import levels, xfails

LIVE_ENGINE = "vllm"
LIVE_TP = (1, 2)
PLACE = "{path}"
"""What stands for the delta's directory in `--update-info`."""
GATE = "gate"
GATE_ROWS = (
    "qwen3-tied tp=1",
    "qwen3-untied tp=2",
    "qwen3-moe tp=2",
    "gemma4-text tp=1",
    "gemma4-moe tp=2",
    "qwen3-wide tp=2",
    "qwen3-untied http tp=1",
    "qwen3-tied lora tp=1",
)
"""What `--row gate` stands for: every architecture, tied and untied, experts, one rank and two, large, HTTP, LoRA."""
UPDATE_INFO = '{"target_weights_path": "{path}"}'


@dataclass(frozen=True, slots=True)
class Options:
    """The suite's options."""

    engine: str
    """`reference`, `vllm`, `package.module:Object`, or `exec:COMMAND`."""
    checkpoint: str | None
    """A path or hub id to use instead of the suite's own checkpoints; live engines only."""
    tp: tuple[int, ...]
    """Tensor-parallel sizes to run, in the given order; live engines only, else empty."""
    mutant: str | None
    """Test-only: the fault that a live engine is to carry."""
    backend: str | None = None
    """Somebody else's weight-transfer backend; live engines only."""
    plugin: str | None = None
    """The module, or `MODULE:FUNCTION`, that registers it in every process of the engine."""
    init_info: Mapping[str, Any] = field(default_factory=dict)
    """Its `init_info`, with which the weight transfer is opened."""
    update_info: str = UPDATE_INFO
    """Its `update_info` as JSON, `{path}` standing for the delta's directory."""
    capabilities: frozenset[str] | None = None
    """What the engine offers, instead of what it declares itself."""
    exec_timeout: float = TIMEOUT
    """Seconds that one call of a program may take."""
    levels: tuple[str, ...] = ()
    """Run the tests of these levels alone; all where empty."""
    xfails: Mapping[str, str] | None = None
    """Test that is expected to fail -> issue."""
    report: Path | None = None
    """Where to write the report as JSON."""
    html: Path | None = None
    """Where to write it as a page."""
    rows: frozenset[str] | None = None
    """Run these columns of the live matrix alone; all where None."""

    @property
    def live(self) -> bool:
        """Whether a live engine is driven; otherwise a codec."""
        return self.engine == LIVE_ENGINE


def asked_for(sizes: Iterable[int], options: Options) -> list[int]:
    """Of tensor-parallel ``sizes`` those that this run asks for; where it asks for none, all, to be skipped."""
    known = list(sizes)
    return [size for size in known if size in options.tp] or known


@dataclass(frozen=True, slots=True)
class Option:
    """One option of the command line."""

    name: str
    metavar: str
    help: str
    default: str | None = None
    many: bool = False
    """Whether it may be repeated."""


OPTIONS = (
    Option("--engine", "NAME", "reference (default), vllm, package.module:Object, or exec:COMMAND", "reference"),
    Option("--level", "LEVEL", f"only the tests of a level: {', '.join(levels.BY_ID)}", many=True),
    Option("--capabilities", "A,B", "what the engine offers, instead of what it declares itself"),
    Option("--xfails-file", "FILE", "tests that are expected to fail, one a line: ID  # issue link"),
    Option("--report", "FILE", "write the report as JSON"),
    Option("--html", "FILE", "write the report as one page"),
    Option("--exec-timeout", "SECONDS", f"exec: the longest that one call may take (default {TIMEOUT:g})"),
    Option("--tp", "N", "vllm: tensor-parallel size; repeat or separate by commas (default 1,2)", many=True),
    Option("--row", "NAME", "vllm: only this column of the matrix; repeatable; `gate` names a short set", many=True),
    Option("--checkpoint", "PATH_OR_HF_ID", "vllm: use this checkpoint, as it is; a hub id from the local cache"),
    Option("--backend", "NAME", "vllm: somebody else's weight-transfer backend, with --plugin"),
    Option("--plugin", "MODULE", "vllm: the module (or MODULE:FUNCTION) that registers the backend"),
    Option("--init-info", "JSON", "vllm: the backend's init_info, with which the transfer is opened (default {})"),
    Option("--update-info", "TEMPLATE", f"vllm: JSON, {PLACE} being the delta (default {UPDATE_INFO})"),
    Option("--mutant", "NAME", "test-only: break the live engine in this way"),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("refdelta conformance")
    for option in OPTIONS:
        how: dict[str, Any] = {"action": "append"} if option.many else {"default": option.default}
        group.addoption(option.name, metavar=option.metavar, help=option.help, **how)


_KEY: pytest.StashKey[Options] = pytest.StashKey()


def options_of(config: pytest.Config) -> Options:
    """The checked options of this run; pytest.UsageError when they make no sense."""
    if _KEY not in config.stash:
        config.stash[_KEY] = _checked(config)
    return config.stash[_KEY]


def _checked(config: pytest.Config) -> Options:
    given: dict[str, Any] = {name: config.getoption(f"--{name}") for name in (*_LIVE_ONLY, "engine", "exec-timeout")}
    engine: str = given["engine"]
    _check_places(given, engine)
    directory = config.invocation_params.dir
    tp = () if engine != LIVE_ENGINE else _sizes(given["tp"]) if given["tp"] else LIVE_TP
    return Options(
        engine,
        _checkpoint(given["checkpoint"]),
        tp,
        given["mutant"],
        given["backend"],
        given["plugin"],
        _object(given["init-info"]),
        _template(given["update-info"] or UPDATE_INFO),
        _capabilities(config.getoption("--capabilities"), engine),
        _seconds(given["exec-timeout"]),
        _levels(config.getoption("--level"), engine),
        _xfails(config.getoption("--xfails-file"), directory),
        _file(config.getoption("--report"), directory, "--report"),
        _file(config.getoption("--html"), directory, "--html"),
        _rows(given["row"]),
    )


_LIVE_ONLY = ("checkpoint", "tp", "mutant", "backend", "plugin", "init-info", "update-info", "row")


def _check_places(given: Mapping[str, Any], engine: str) -> None:
    """Options that need another engine, or another option."""
    misplaced = [name for name in _LIVE_ONLY if given[name] is not None and engine != LIVE_ENGINE]
    if misplaced:
        raise pytest.UsageError(f"--{misplaced[0]} needs --engine {LIVE_ENGINE}, and the engine is {engine!r}.")
    if given["exec-timeout"] is not None and not engine.startswith("exec:"):
        raise pytest.UsageError(f"--exec-timeout needs --engine exec:COMMAND, and the engine is {engine!r}.")
    together = (("backend", "plugin"), ("plugin", "backend"), ("init-info", "backend"), ("update-info", "backend"))
    for one, other in together:
        if given[one] is not None and given[other] is None:
            raise pytest.UsageError(f"--{one} needs --{other}.")
    if given["mutant"] is not None and given["backend"] is not None:
        raise pytest.UsageError("--mutant breaks refdelta's own backend, so it goes without --backend.")


def _checkpoint(given: str | None) -> str | None:
    """As it was given, once it is known to be there: an engine would find out after a minute."""
    if given is not None:
        from ..inputs import checkpoints

        try:
            checkpoints.given(given)
        except checkpoints.NoCheckpoint as error:
            raise pytest.UsageError(f"--checkpoint {error}.") from error
    return given


def _sizes(given: Iterable[str]) -> tuple[int, ...]:
    words = [word.strip() for text in given for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise pytest.UsageError(f"--tp takes positive numbers, and got {','.join(words)!r}.")
    return tuple(dict.fromkeys(int(word) for word in words))


def _rows(given: Iterable[str] | None) -> frozenset[str] | None:
    if given is None:
        return None
    return frozenset(row for name in given for row in (GATE_ROWS if name == GATE else (name,)))


def _object(text: str | None) -> Mapping[str, Any]:
    try:
        parsed = json.loads(text or "{}")
    except ValueError as error:
        raise pytest.UsageError(f"--init-info is no JSON ({error}): {text!r}.") from error
    if not isinstance(parsed, dict):
        raise pytest.UsageError(f"--init-info takes a JSON object, and got {text!r}.")
    return parsed


def _template(text: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise pytest.UsageError(f"--update-info is no JSON ({error}): {text!r}.") from error
    if not isinstance(parsed, dict) or PLACE not in text:
        raise pytest.UsageError(f"--update-info takes a JSON object that holds {PLACE}, and got {text!r}.")
    return text


def filled(template: str, path: str) -> dict[str, Any]:
    """The `update_info` of one delta: `{path}` replaced in every text of the template."""

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(PLACE, path)
        if isinstance(value, list):
            return [fill(part) for part in value]
        return {key: fill(part) for key, part in value.items()} if isinstance(value, dict) else value

    found: dict[str, Any] = fill(json.loads(template))
    return found


def _capabilities(given: str | None, engine: str) -> frozenset[str] | None:
    if given is None:
        return None
    if engine == "reference":
        raise pytest.UsageError("--capabilities is for other engines than the reference, which offers all.")
    return frozenset(filter(None, (word.strip() for word in given.split(","))))


def _seconds(given: str | None) -> float:
    try:
        seconds = TIMEOUT if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise pytest.UsageError(f"--exec-timeout takes a positive number of seconds, and got {given!r}.")
    return seconds


def _levels(given: Iterable[str] | None, engine: str) -> tuple[str, ...]:
    words = tuple(word.strip() for text in given or () for word in text.split(","))
    known = [level.id for level in levels.LEVELS if level.live == (engine == LIVE_ENGINE)]
    for word in words:
        if word not in known:
            raise pytest.UsageError(f"--level takes {', '.join(known)} with this engine, and got {word!r}.")
    return words


def _xfails(given: str | None, directory: Path) -> Mapping[str, str] | None:
    try:
        return None if given is None else xfails.read(directory / given)
    except xfails.BadFile as error:
        raise pytest.UsageError(str(error)) from error


def _file(given: str | None, directory: Path, option: str) -> Path | None:
    path = None if given is None else directory / given
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise pytest.UsageError(f"{option} {given}: not a file in a directory that exists.")
    return path
