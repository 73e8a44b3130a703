"""The `refdelta` command. Exit 0: it holds; 1: a check failed; 2: bad usage or refused input; 130: interrupted.

Everything refused is one line on standard error, ``error: [reason] detail``. Only the standard library is imported
here, so that Ctrl-C while the rest is imported is one line, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["INTERRUPTED", "main", "run"]

INTERRUPTED = 130
"""What shells say of a program that SIGINT ended."""


def main() -> None:
    """Entry point of the `refdelta` command."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        from refdelta.cli.commands import unwritten

        code = code or unwritten(error)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command with ``arguments`` and return its exit code."""
    try:
        import refdelta.files.posix  # noqa: F401
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        from refdelta.cli.commands import invoke

        return invoke(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
