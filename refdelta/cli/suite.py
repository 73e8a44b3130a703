"""Where the conformance suite is: beside refdelta, as `refdelta_conformance` from a wheel, as `conformance` in a clone.

Only the standard library is imported here, and nothing of the suite: `refdelta.cli.pytest_plugin` asks in every run of
pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["INSTALLED", "IN_CLONE", "names", "suite_folder"]

INSTALLED, IN_CLONE = "refdelta_conformance", "conformance"
"""The names of the suite's package. A wheel does not take the second one, which other packages use."""


def suite_folder(beside: Path = Path(__file__).parents[2]) -> Path | None:
    """The folder of the suite that came with this refdelta; its name is the package's. ``None`` where there is none.

    beside: the folder that holds the package `refdelta`.
    """
    folders = (beside / name for name in (INSTALLED, IN_CLONE))
    return next((folder for folder in folders if (folder / "suite" / "plugin.py").is_file()), None)


def names(arguments: Sequence[str], package: str) -> bool:
    """Whether one of pytest's arguments is the package, a module of it, or a test in it."""
    named = [str(argument).partition("::")[0] for argument in arguments]
    return any(name == package or name.startswith(f"{package}.") for name in named)
