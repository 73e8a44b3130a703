"""A fault inside the backend's write, imported by every process of an engine under test.

``REFDELTA_TEST_FAULT`` names a JSON file, read at every write: ``{"rank": 1, "call": 3, "undo": false}`` makes the
third write of that rank raise, and with ``undo`` every later one too, so that the old values cannot be restored.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from refdelta.vllm import update
from refdelta.vllm.target import Piece

FAULT = "REFDELTA_TEST_FAULT"

_write = update._put
_calls: dict[str, int] = {}


def _put(tensor: Tensor, piece: Piece) -> None:
    text = Path(os.environ[FAULT]).read_text()
    if text:
        _fail_if_due(text, json.loads(text))
    _write(tensor, piece)


def _fail_if_due(text: str, fault: dict[str, Any]) -> None:
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    calls = _calls[text] = _calls.get(text, 0) + 1
    if rank == fault["rank"] and (calls == fault["call"] or (fault["undo"] and calls > fault["call"])):
        raise RuntimeError("injected: the memory is gone")


update._put = _put
