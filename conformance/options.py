"""What the command line of the suite says: one frozen object, checked once.

``pytest conformance/ --engine NAME [--checkpoint PATH_OR_HF_ID] [--tp N ...] [--mutant NAME]``
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

LIVE_ENGINE = "vllm"
LIVE_TP = (1, 2)


@dataclass(frozen=True, slots=True)
class Options:
    """The suite's options."""

    engine: str
    """`reference`, `vllm`, or `package.module:Object`."""
    checkpoint: str | None
    """A path or hub id to use instead of the suite's own checkpoints; live engines only."""
    tp: tuple[int, ...]
    """Tensor-parallel sizes to run, in the given order; live engines only, else empty."""
    mutant: str | None
    """Test-only: the fault that a live engine is to carry."""

    @property
    def live(self) -> bool:
        """Whether a live engine is driven; otherwise a codec."""
        return self.engine == LIVE_ENGINE


def add_options(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("refdelta conformance")
    group.addoption(
        "--engine", default="reference", metavar="NAME", help="reference (default), vllm, or package.module:Object"
    )
    group.addoption("--checkpoint", metavar="PATH_OR_HF_ID", help="vllm: use this checkpoint, as it is")
    group.addoption(
        "--tp", action="append", metavar="N", help="vllm: tensor-parallel size; repeat or separate by commas (1,2)"
    )
    group.addoption("--mutant", metavar="NAME", help="test-only: break the live engine in this way")


_KEY: pytest.StashKey[Options] = pytest.StashKey()


def options_of(config: pytest.Config) -> Options:
    """The checked options of this run; pytest.UsageError when they make no sense."""
    if _KEY not in config.stash:
        config.stash[_KEY] = _checked(config)
    return config.stash[_KEY]


def _checked(config: pytest.Config) -> Options:
    engine, checkpoint, mutant = (config.getoption(name) for name in ("--engine", "--checkpoint", "--mutant"))
    given: list[str] | None = config.getoption("--tp")
    live_only = {"--checkpoint": checkpoint, "--tp": given, "--mutant": mutant}
    misplaced = [name for name, value in live_only.items() if value is not None and engine != LIVE_ENGINE]
    if misplaced:
        raise pytest.UsageError(f"{misplaced[0]} needs --engine {LIVE_ENGINE}, and the engine is {engine!r}.")
    tp = () if engine != LIVE_ENGINE else _sizes(given) if given else LIVE_TP
    return Options(engine, checkpoint, tp, mutant)


def _sizes(given: Iterable[str]) -> tuple[int, ...]:
    words = [word.strip() for text in given for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise pytest.UsageError(f"--tp takes positive numbers, and got {','.join(words)!r}.")
    return tuple(dict.fromkeys(int(word) for word in words))
