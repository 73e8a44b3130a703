"""What a backend itself says when it refuses: an error's text without what vLLM and the suite have put around it."""

from __future__ import annotations

import json
import re

_AROUND = (
    re.compile(r"Call to \w+ method failed:(.*)", re.DOTALL),  # the engine's core, of its caller
    re.compile(r"Worker failed with error '(.*)', please check the stack trace above for the root cause", re.DOTALL),
    re.compile(r"[A-Za-z_][\w.]*:(.*)", re.DOTALL),  # the exception's type
)
_TYPE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(\(\))?")


def words(text: str) -> str:
    """The backend's own words, "" where it has none: an empty text, white space, the name of an exception alone."""
    found = _message(text.strip())
    while around := next(filter(None, (pattern.fullmatch(found) for pattern in _AROUND)), None):
        found = around.group(1).strip()
    return "" if _TYPE.fullmatch(found) else found


def _message(text: str) -> str:
    """Of a server's answer in JSON its message."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    while isinstance(found, dict):
        found = next((found[key] for key in ("error", "message", "detail") if key in found), "")
    return found.strip() if isinstance(found, str) else text
