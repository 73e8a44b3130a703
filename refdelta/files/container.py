"""The safetensors container, read without the safetensors library. A malformed file is refused with a reason before any
tensor is made. Tensors may be unaligned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import NoReturn

from refdelta.files.opening import read_exactly, size_of
from refdelta.spec import DTYPES, MAX_HEADER_BYTES, DeltaError, Reason, count_elements
from refdelta.values import is_int

__all__ = ["Entry", "Header", "read_header", "shown", "strict_json"]


def shown(value: object) -> str:
    """A JSON value for a message: a short value as it is, a long one by its type."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else f"a {type(value).__name__} of {len(text)} characters"


def strict_json(data: bytes, reason: Reason, where: str) -> object:
    """Strict JSON: UTF-8, no duplicate keys, finite numbers."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"duplicate key {key}")
            found[key] = value
        return found

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is no JSON number")

    def finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else constant(text)

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=constant, parse_float=finite)
    except RecursionError:
        raise DeltaError(reason, f"{where}: nested too deeply") from None
    except ValueError as error:
        raise DeltaError(reason, f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: str
    """Safetensors dtype code, a key of `DTYPES`."""
    shape: tuple[int, ...]
    """Shape in elements of the code: an F4 element is half a byte."""
    start: int
    """First byte, from the end of the header."""
    end: int
    """First byte behind it."""


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of a safetensors file."""

    entries: Mapping[str, Entry]
    """Tensors by key, in the order of their bytes, which they cover without gap or overlap."""
    metadata: Mapping[str, str]
    """``__metadata__``, empty where there is none."""
    raw: bytes
    """The length field and the JSON, byte for byte as in the file."""


def read_header(file: FileIO) -> Header:
    """Read the header of a safetensors file that is open at its start. Afterwards the file stands at the tensors'
    bytes.

    Raises `DeltaError` (bad_header, bad_shape, unsupported_dtype, unreadable) unless it describes the file exactly.
    """
    size = size_of(file)
    if size < 8:
        raise DeltaError(Reason.BAD_HEADER, f"{size} bytes are too few for a safetensors file")
    prefix = bytes(read_exactly(file, 8).numpy())
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise DeltaError(Reason.BAD_HEADER, f"header of {length} bytes, more than {MAX_HEADER_BYTES}")
    if length > size - 8:
        raise DeltaError(Reason.BAD_HEADER, f"header of {length} bytes reaches beyond the file of {size}")
    text = bytes(read_exactly(file, length).numpy())
    if not text.startswith(b"{"):
        raise DeltaError(Reason.BAD_HEADER, "the header does not start with {")
    raw = strict_json(text, Reason.BAD_HEADER, "header")
    assert isinstance(raw, dict)  # it starts with {
    metadata = _check_header_metadata(raw.pop("__metadata__", {}))
    entries = sorted(((key, _entry(key, value)) for key, value in raw.items()), key=lambda e: (e[1].start, e[1].end))
    _check_coverage(entries, size - 8 - length)
    return Header(dict(entries), metadata, prefix + text)


def _check_header_metadata(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise DeltaError(Reason.BAD_HEADER, "__metadata__ is not an object of strings")
    return value


def _entry(key: str, value: object) -> Entry:
    def refuse(reason: Reason, detail: str) -> NoReturn:
        raise DeltaError(reason, f"{key}: {detail}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(Reason.BAD_HEADER, "expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(Reason.UNSUPPORTED_DTYPE, f"dtype {shown(dtype)}")
    if not isinstance(shape, list) or not all(is_int(n) and n >= 0 for n in shape):
        refuse(Reason.BAD_HEADER, f"shape {shown(shape)} is not a list of non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(n) and n >= 0 for n in offsets):
        refuse(Reason.BAD_HEADER, f"data_offsets {shown(offsets)} are not two non-negative integers")
    bits_needed = count_elements(shape) * (4 if dtype == "F4" else 8 * DTYPES[dtype].itemsize)
    if bits_needed != 8 * (offsets[1] - offsets[0]):
        refuse(Reason.BAD_HEADER, f"{dtype} of shape {shown(shape)} does not fill bytes {shown(offsets)}")
    if dtype == "F4" and shape and shape[-1] % 2:
        detail = "an element is a pair of halves along the last dimension, which is odd"
        refuse(Reason.BAD_HEADER, f"F4 of shape {shown(shape)}: {detail}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _check_coverage(entries: Sequence[tuple[str, Entry]], size: int) -> None:
    at = 0
    for key, entry in entries:
        if entry.start != at:
            fault = "overlaps the tensor before it" if entry.start < at else "leaves a gap before it"
            raise DeltaError(Reason.BAD_HEADER, f"{key}: starts at byte {entry.start}, {fault} (ends at {at})")
        at = entry.end
    if at != size:
        raise DeltaError(Reason.BAD_HEADER, f"tensors end at byte {at}, the file's data at {size}")
