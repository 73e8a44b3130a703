"""Python values in checks and messages: what counts as an integer, and a value in a few words.

Nothing here knows the format.
"""

from __future__ import annotations

from typing import Final

__all__ = ["brief", "is_int"]

_LONGEST: Final = 120


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer. A bool does not count as one, although Python derives it from int."""
    return isinstance(value, int) and not isinstance(value, bool)


def brief(value: object) -> str:
    """``repr(value)`` for a message, cut to 120 characters. A value too deeply nested to print is named by its type."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
