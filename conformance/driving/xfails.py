"""The adopter's file of expected failures: `--xfails-file FILE`.

    # one test a line, as reports name it, then the issue that it waits for
    test_codec_minimal.py::test_bf16_example[NaN_sign]  # https://example.org/issues/7

An entry whose test passes fails the run, and so does one that matches no test: the file says what is known, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


class BadFile(ValueError):
    """A file that cannot be read, or a line that is no entry; the text is one sentence."""


def read(path: Path) -> dict[str, str]:
    """Test id -> issue."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"--xfails-file {path}: {error}.") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, issue = _entry(line, f"--xfails-file {path}, line {number}")
        if name in found:
            raise BadFile(f"--xfails-file {path}, line {number}: {name} is there twice.")
        found[name] = issue
    return found


def _entry(line: str, label: str) -> tuple[str, str]:
    """A test's id may hold spaces and #, the issue neither."""
    name, mark, issue = (part.strip() for part in line.rpartition("#"))
    if not (mark and name and issue) or "::" not in name:
        raise BadFile(f"{label}: expected `ID  # issue link`, found {line.strip()!r}.")
    return name, issue


def unmatched(entries: Mapping[str, str], collected: Iterable[str], files: Iterable[str], home: Path) -> list[str]:
    """The entries that match no test: of a file that ran, or of one that the suite does not have."""
    tests, ran = set(collected), set(files)
    missing = (name for name in entries if name not in tests)
    return [name for name in missing if (file := name.partition("::")[0]) in ran or not (home / file).exists()]
