"""Something wrong in the files of a delta, anywhere: what a bad disk, an impatient writer or a bug may leave.

`conformance.inputs.malformed` has one fault of each kind, made to be refused with its reason; these are drawn, and may
by chance leave a delta that is well-formed. The suite's own reader says which.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from numpy.random import Generator

from ..oracle import DELTA_FILE, METADATA_FILE

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


# -- what was done, for a reader ---------------------------------------------------------------------------------------

_SHOWN = 60


def change_of(whole: Mapping[str, bytes], broken: Mapping[str, bytes]) -> str:
    """What differs first, in one line: the key path with the old and the new value, or the bytes; "" where nothing.

    As in `header."0.values".shape[1]: 3 -> 2147483648` and `metadata.lineage: {"run_id": "a"} -> gone`.
    """
    for name, part in ((METADATA_FILE, "metadata"), (DELTA_FILE, "payload")):
        one, two = whole[name], broken[name]
        if one != two:
            return _change_of_text(part, one, two) if part == "metadata" else _change_of_payload(one, two)
    return ""


def _change_of_payload(one: bytes, two: bytes) -> str:
    if one.startswith(two):
        return _change_of_bytes("payload", one, two)
    end, other = (8 + int.from_bytes(raw[:8], "little") for raw in (one, two))
    # A file of which only the length, or the end, is not as it was has no other header.
    if one[end:] == two[other:] and one[8:end] != two[8:other]:
        return _change_of_text("header", one[8:end], two[8:other])
    if one[8:] == two[8:]:
        return f"length of the header: {end - 8} -> {other - 8}"
    return _change_of_bytes("header" if _first(one, two) < end else "data", one, two)


def _change_of_text(part: str, one: bytes, two: bytes) -> str:
    twice: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in found]
        twice.extend(key for key in dict.fromkeys(keys) if keys.count(key) > 1)
        return dict(found)

    try:
        before, after = json.loads(one), json.loads(two, object_pairs_hook=pairs)
    except ValueError:
        return _change_of_bytes(part, one, two)
    if twice:
        return f"{part}{_step(twice[0])}: twice"
    return _change_of_json(part, before, after) or _change_of_bytes(part, one, two)


def _change_of_json(path: str, one: Any, two: Any) -> str:
    """The first difference in depth; "" where there is none."""
    if isinstance(one, dict) and isinstance(two, dict):
        return _change_of_keys(path, one, two) or next(
            filter(None, (_change_of_json(path + _step(key), one[key], two[key]) for key in one)), ""
        )
    if isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        changes = (_change_of_json(f"{path}[{at}]", *both) for at, both in enumerate(zip(one, two, strict=True)))
        return next(filter(None, changes), "")
    # By their text, so that 1, true and 1.0 differ.
    return "" if json.dumps(one) == json.dumps(two) else f"{path}: {_json(one)} -> {_json(two)}"


def _change_of_keys(path: str, one: dict[str, Any], two: dict[str, Any]) -> str:
    gone, new = ([key for key in these if key not in those] for these, those in ((one, two), (two, one)))
    if gone and new:
        return f"{path}{_step(gone[0])}: now named {_json(new[0])}"
    if gone:
        return f"{path}{_step(gone[0])}: {_json(one[gone[0]])} -> gone"
    return f"{path}{_step(new[0])}: absent -> {_json(two[new[0]])}" if new else ""


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() and key.isascii() and len(key) <= _SHOWN else f".{_json(key)}"


def _json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _change_of_bytes(part: str, one: bytes, two: bytes) -> str:
    if len(one) > len(two) and one.startswith(two):
        return f"{part}: {len(one)} bytes -> the first {len(two)}"
    at = _first(one, two)
    before, after = (repr(raw[max(0, at - 12) : at + 12])[1:] for raw in (one, two))
    return f"{part} at byte {at}: {before} -> {after}"


def _first(one: bytes, two: bytes) -> int:
    """The first byte that differs."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))
