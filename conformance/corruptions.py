"""Something wrong in the files of a delta, anywhere: what a bad disk, an impatient writer or a bug may leave.

`conformance.malformed` has one fault of each kind, made to be refused with its reason; these are drawn, and may by
chance leave a delta that is well-formed. The suite's own reader says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from numpy.random import Generator

from conformance.oracle import DELTA_FILE, METADATA_FILE

Files = dict[str, bytes]
Corruption = Callable[[Generator, Files], None]
"""Changes the files in place."""

VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    "",
    "0.values",
    "I32",
    [],
    [0],
    [-1],
    [2**40, 2**40],
)
"""What stands in a JSON text in place of something else."""
NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"01", b"1.", b"-1", b"0.5", b"9" * 400)


def _at(rng: Generator, length: int) -> int:
    return int(rng.integers(max(1, length)))


def _cut(name: str) -> Corruption:
    def corrupt(rng: Generator, files: Files) -> None:
        files[name] = files[name][: _at(rng, len(files[name]))]

    return corrupt


def _flip(raw: bytes, at: int, bit: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :] if at < len(raw) else raw


def _header_end(files: Files) -> int:
    return 8 + int.from_bytes(files[DELTA_FILE][:8], "little")


def _bit_of_header(rng: Generator, files: Files) -> None:
    at = 8 + _at(rng, _header_end(files) - 8)
    files[DELTA_FILE] = _flip(files[DELTA_FILE], at, _at(rng, 8))


def _bit_of_data(rng: Generator, files: Files) -> None:
    end = _header_end(files)
    files[DELTA_FILE] = _flip(files[DELTA_FILE], end + _at(rng, len(files[DELTA_FILE]) - end), _at(rng, 8))


def _bit_of_metadata(rng: Generator, files: Files) -> None:
    files[METADATA_FILE] = _flip(files[METADATA_FILE], _at(rng, len(files[METADATA_FILE])), _at(rng, 8))


def _length(rng: Generator, files: Files) -> None:
    lie = (_header_end(files) - 8, 0, 1, 8, len(files[DELTA_FILE]), 2**31, 2**63, 2**64 - 2)[_at(rng, 8)] + _at(rng, 2)
    files[DELTA_FILE] = lie.to_bytes(8, "little") + files[DELTA_FILE][8:]


def _in_header(change: Callable[[Generator, bytes], bytes]) -> Corruption:
    def corrupt(rng: Generator, files: Files) -> None:
        end = _header_end(files)
        text = change(rng, files[DELTA_FILE][8:end])
        files[DELTA_FILE] = len(text).to_bytes(8, "little") + text + files[DELTA_FILE][end:]

    return corrupt


def _in_metadata(change: Callable[[Generator, bytes], bytes]) -> Corruption:
    def corrupt(rng: Generator, files: Files) -> None:
        files[METADATA_FILE] = change(rng, files[METADATA_FILE])

    return corrupt


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (object or list, key or number) in a JSON value."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _replaced(rng: Generator, text: bytes) -> bytes:
    value = json.loads(text)
    places = _places(value)
    holder, key = places[_at(rng, len(places))]
    holder[key] = VALUES[_at(rng, len(VALUES))]
    return json.dumps(value, ensure_ascii=False).encode()


def _removed(rng: Generator, text: bytes) -> bytes:
    value = json.loads(text)
    places = _places(value)
    holder, key = places[_at(rng, len(places))]
    del holder[key]
    return json.dumps(value, ensure_ascii=False).encode()


def _doubled(rng: Generator, text: bytes) -> bytes:
    value = json.loads(text)
    key = list(value)[_at(rng, len(value))]
    again = json.dumps({key: value[key]}, ensure_ascii=False).encode()
    return text.rstrip()[:-1] + b"," + again[1:]


def _no_number(rng: Generator, text: bytes) -> bytes:
    digits = [at for at in range(len(text)) if text[at : at + 1].isdigit()]
    if not digits:
        return text
    at = digits[_at(rng, len(digits))]
    return text[:at] + NUMBERS[_at(rng, len(NUMBERS))] + text[at + 1 :]


CORRUPTIONS: Mapping[str, Corruption] = {
    "nothing": lambda rng, files: None,
    "payload cut": _cut(DELTA_FILE),
    "metadata cut": _cut(METADATA_FILE),
    "bit of the header": _bit_of_header,
    "bit of the data": _bit_of_data,
    "bit of the metadata": _bit_of_metadata,
    "length of the header": _length,
    "value in the header": _in_header(_replaced),
    "value in the metadata": _in_metadata(_replaced),
    "entry gone from the header": _in_header(_removed),
    "entry gone from the metadata": _in_metadata(_removed),
    "key twice in the header": _in_header(_doubled),
    "key twice in the metadata": _in_metadata(_doubled),
    "number in the header": _in_header(_no_number),
    "number in the metadata": _in_metadata(_no_number),
}
"""Every kind by its label."""
