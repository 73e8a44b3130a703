"""The truth the suite judges by, restated in plain numpy, torch and struct. Imports nothing from refdelta.

Bits (a tensor's elements as unsigned integers of the same width, flat, in logical row-major order)::

    DTYPES                                safetensors dtype code -> torch dtype, every dtype of safetensors.torch
    bits(tensor) -> ndarray               a copy
    from_bits(bits, code, shape) -> Tensor
    difference(expected, found) -> str    "" when equal bit for bit, else one finding; tensors or states
    finding(expected, found)              the same as a `Finding`, or None
    assert_bit_equal(expected, found)     raises a `Mismatch` with it
    state_hash(state) -> str              sha256 over names, dtypes, shapes and bytes

Deltas (a *state* is a mapping name -> tensor)::

    Patch                                 name, shape, code, indices (I64), bits
    expected_patches(base, target)        what a minimal delta from base to target holds, in name order
    expected_state(base, patches)         the state after; base is not touched
    delta_patch(tensor_name, tensor, indices, new_values) -> Patch
    write_delta(directory, patches, total_elements, **overrides) -> Path
    draft(patches, total), disassemble(directory) -> Draft    a delta taken apart, to be changed and written
    read_delta(directory) -> RawDelta     strict: raises OracleError naming the first thing that is wrong
    read_lineage(directory)               its lineage as strictly, None where it has none
    canonical_payload(patches) -> bytes   the bytes of `delta.safetensors` that the format prescribes

Whole states as safetensors files, for children and for programs: ``save_state(path, state)``, ``load_state(path)``.

Malformed deltas are made in `conformance.inputs.malformed` from `draft` (a delta taken apart) and `pack`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..findings import Finding, Mismatch

State = Mapping[str, Tensor]
Bits = NDArray[Any]

DELTA_FILE = "delta.safetensors"
METADATA_FILE = "metadata.json"
I32_ELEMENTS = 2**31
"""A tensor of up to this many elements has I32 indices, a larger one I64."""
MAX_HEADER_BYTES = 100_000_000
NON_FLOATING = "non_floating_values"
"""The extension that values of integer, bool and complex tensors need in `requires`."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
FLOATING = frozenset(code for code in DTYPES if code.startswith(("F", "BF")))
SUB_BYTE = "F4"
"""Its element is a pair (one byte), as in torch; safetensors files count the halves, so their last size is doubled."""
_UNSIGNED: Mapping[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OracleError(ValueError):
    """A delta that does not follow the format; the text names the first fault found."""


# -- bits ------------------------------------------------------------------------------------------------------------


def width(code: str) -> int:
    """Bytes per element of the dtype `code`."""
    return DTYPES[code].itemsize


def file_shape(code: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that a safetensors file states for a tensor of this torch shape."""
    return (*shape[:-1], shape[-1] * 2) if code == SUB_BYTE else tuple(shape)


def _torch_shape(code: str, shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // 2) if code == SUB_BYTE else tuple(shape)


def unsigned(code: str) -> np.dtype[Any]:
    """The numpy unsigned dtype that carries the bits of `code`."""
    return np.dtype(_UNSIGNED[width(code)])


def bits(tensor: Tensor) -> Bits:
    """The bit patterns of `tensor`, one unsigned integer per element, 1-D, logical row-major order, a copy."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    carried = plain.view(_CARRIER[plain.dtype.itemsize]).contiguous().reshape(-1)
    return carried.numpy().view(_UNSIGNED[plain.dtype.itemsize]).copy()


def from_bits(patterns: Bits | Sequence[int], code: str, shape: Sequence[int]) -> Tensor:
    """The contiguous tensor of dtype `code` and `shape` whose elements have these bit patterns."""
    raw = np.array(patterns, dtype=unsigned(code), copy=True).reshape(-1).view(np.uint8)
    carried = torch.from_numpy(raw).view(_CARRIER[width(code)])
    return carried.view(DTYPES[code]).reshape(tuple(shape))


def difference(expected: Tensor | State, found: Tensor | State) -> str:
    """ "" when equal bit for bit, else the first difference: tensor, position, expected and found bits in hex."""
    first = finding(expected, found)
    return str(first) if first else ""


def finding(expected: Tensor | State, found: Tensor | State, context: str = "") -> Finding | None:
    """The first difference between two tensors or two states, None when they are equal bit for bit."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensor_finding("tensor", expected, found, context)
    assert isinstance(expected, Mapping), "compare a tensor with a tensor, a state with a state"
    assert isinstance(found, Mapping), "compare a tensor with a tensor, a state with a state"
    if expected.keys() != found.keys():
        missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        return Finding(f"names differ: missing {missing}, unexpected {extra}", context=context)
    findings = (_tensor_finding(name, expected[name], found[name], context) for name in sorted(expected))
    return next(filter(None, findings), None)


def _tensor_finding(name: str, expected: Tensor, found: Tensor, context: str) -> Finding | None:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        wanted, got = (f"{t.dtype} {list(t.shape)}" for t in (expected, found))
        return Finding("dtype and shape", name, expected=wanted, found=got, context=context)
    left, right = bits(expected), bits(found)
    wrong = np.flatnonzero(left != right)
    if not wrong.size:
        return None
    flat, shape = int(wrong[0]), tuple(expected.shape)
    digits = 2 * expected.dtype.itemsize
    return Finding(
        "bits",
        name,
        tuple(int(axis) for axis in np.unravel_index(flat, shape)) if shape else (),
        flat,
        f"0x{int(left[flat]):0{digits}x}",
        f"0x{int(right[flat]):0{digits}x}",
        str(expected.dtype),
        int(wrong.size),
        int(left.size),
        context=context,
    )


def assert_bit_equal(expected: Tensor | State, found: Tensor | State, context: str = "") -> None:
    """Raise a Mismatch with the finding, after `context`, unless the two are equal bit for bit."""
    first = finding(expected, found, context)
    if first:
        raise Mismatch(first)


def clone(state: State) -> dict[str, Tensor]:
    """A contiguous copy of every tensor, bit for bit."""
    return {name: from_bits(bits(tensor), CODES[tensor.dtype], tensor.shape) for name, tensor in state.items()}


def state_hash(state: State) -> str:
    """sha256 (hex) over names, dtypes, shapes and bytes, in name order: equal exactly for equal states."""
    total = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        head = json.dumps([name, CODES[tensor.dtype], list(tensor.shape)]).encode()
        total.update(struct.pack("<Q", len(head)) + head)
        total.update(bits(tensor).view(np.uint8).data)
    return total.hexdigest()


# -- what a delta must do --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Patch:
    """The change of one tensor."""

    name: str
    """The tensor's name in the checkpoint."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    code: str
    """Its safetensors dtype code, a key of DTYPES."""
    indices: NDArray[np.int64]
    """Flat row-major positions that change."""
    bits: Bits
    """The new bit pattern of each position, unsigned integers of the dtype's width."""

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1


def delta_patch(name: str, tensor: Tensor, indices: Iterable[int], new_values: Tensor) -> Patch:
    """The patch that puts `new_values` (1-D, the dtype of `tensor`) at `indices` of a tensor like `tensor`."""
    assert new_values.dtype == tensor.dtype, f"{name}: values are {new_values.dtype}, the tensor is {tensor.dtype}"
    positions = np.array(list(indices), dtype=np.int64)
    return Patch(name, tuple(tensor.shape), CODES[tensor.dtype], positions, bits(new_values))


def expected_patches(base: State, target: State) -> tuple[Patch, ...]:
    """Exactly the positions whose bits differ, ascending; unchanged tensors absent; in name order."""
    assert base.keys() == target.keys(), "a delta is between states of equal names"
    patches = []
    for name in sorted(base):
        old, new = bits(base[name]), bits(target[name])
        changed = np.flatnonzero(old != new)
        if changed.size:
            shape, code = tuple(target[name].shape), CODES[target[name].dtype]
            patches.append(Patch(name, shape, code, changed.astype(np.int64), new[changed]))
    return tuple(patches)


def expected_state(base: State, patches: Iterable[Patch]) -> dict[str, Tensor]:
    """A new state: `base` with each patch's bits at its positions."""
    after = clone(base)
    for patch in patches:
        new = bits(after[patch.name])
        new[patch.indices] = patch.bits
        after[patch.name] = from_bits(new, patch.code, patch.shape)
    return after


def total_elements(state: State) -> int:
    """Elements of every tensor of the state, changed or not."""
    return sum(tensor.numel() for tensor in state.values())


# -- safetensors bytes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file."""

    key: str
    code: str
    shape: tuple[int, ...]
    data: bytes


def pack(entries: Sequence[Entry], header_metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file: entries in the given order without gaps, compact JSON, padded with spaces to 8 bytes."""
    header: dict[str, object] = {} if header_metadata is None else {"__metadata__": dict(header_metadata)}
    offset = 0
    for entry in entries:
        end = offset + len(entry.data)
        header[entry.key] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    return pack_raw(json.dumps(header, separators=(",", ":"), ensure_ascii=False), (e.data for e in entries))


def pack_raw(header: str, data: Iterable[bytes]) -> bytes:
    """A safetensors file with this header text, whatever it says."""
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded + b"".join(data)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(keys) != len(set(keys)):
        raise OracleError(f"duplicate JSON keys among {keys}")
    return dict(pairs)


def _no_constant(text: str) -> None:
    raise OracleError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise OracleError(f"{text} is no finite number")
    return number


def strict_json(raw: bytes) -> Any:
    """JSON in UTF-8 without doubled keys and without numbers that are not finite; ValueError for anything else."""
    return json.loads(raw.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_float=_finite)


def unpack(raw: bytes) -> tuple[list[Entry], dict[str, str], int]:
    """Entries in the order of their data, header metadata, and the bytes before the data; strict."""
    if len(raw) < 8:
        raise OracleError(f"a safetensors file of {len(raw)} bytes")
    (length,) = struct.unpack("<Q", raw[:8])
    start = 8 + length
    if start > len(raw) or length > MAX_HEADER_BYTES:
        raise OracleError(f"header of {length} bytes in a file of {len(raw)}")
    if raw[8:9] != b"{":
        raise OracleError("the header does not start with {")
    header = strict_json(raw[8:start])
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise OracleError(f"__metadata__ {metadata}")
    entries, offset = [], 0
    for key, spec in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if spec.keys() != {"dtype", "shape", "data_offsets"}:
            raise OracleError(f"{key}: an entry of {sorted(spec)}")
        begin, end = spec["data_offsets"]
        if not all(type(number) is int for number in (*spec["shape"], begin, end)):  # JSON's true is no number
            raise OracleError(f"{key}: shape {spec['shape']}, offsets [{begin}, {end}] are not all integers")
        elements = int(np.prod(spec["shape"], dtype=object)) if spec["shape"] else 1
        stored = elements * width(spec["dtype"]) // (2 if spec["dtype"] == SUB_BYTE else 1)
        if begin != offset or end - begin != stored:
            raise OracleError(
                f"{key}: offsets [{begin}, {end}] for {spec['dtype']} {spec['shape']} after byte {offset}"
            )
        entries.append(Entry(key, spec["dtype"], tuple(spec["shape"]), raw[start + begin : start + end]))
        offset = end
    if start + offset != len(raw):
        raise OracleError(f"{len(raw) - start - offset} bytes after the last tensor")
    return entries, metadata, start


def save_state(path: Path, state: State) -> Path:
    """Write a state as one safetensors file, in name order. F4 scalars have no place in one."""
    entries = [
        Entry(n, (c := CODES[t.dtype]), file_shape(c, t.shape), bits(t).tobytes()) for n, t in sorted(state.items())
    ]
    path.write_bytes(pack(entries))
    return path


def load_state(path: Path) -> dict[str, Tensor]:
    """The state that a safetensors file holds."""
    entries, _, _ = unpack(path.read_bytes())
    return {
        e.key: from_bits(np.frombuffer(e.data, unsigned(e.code)), e.code, _torch_shape(e.code, e.shape))
        for e in entries
    }


# -- writing a delta -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Draft:
    """A delta taken apart, so that one part can be replaced before it is written."""

    metadata: dict[str, Any]
    """What `metadata.json` will say; a key removed here is absent there."""
    entries: list[Entry]
    """The tensors of `delta.safetensors`, in file order; duplicates are possible."""
    header_metadata: dict[str, str] | None = field(default_factory=dict)
    """`__metadata__` of the safetensors header."""

    def files(self) -> dict[str, bytes]:
        """The content of both files, the payload first."""
        text = json.dumps(self.metadata, ensure_ascii=False)
        return {DELTA_FILE: pack(self.entries, self.header_metadata), METADATA_FILE: text.encode()}

    def write(self, directory: Path) -> Path:
        """Write both files; the directory is made."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (directory / name).write_bytes(content)
        return directory

    def entry(self, key: str) -> Entry:
        return next(entry for entry in self.entries if entry.key == key)

    def replace(self, key: str, change: Callable[[Entry], Entry]) -> None:
        """Replace the entry `key` by `change(entry)`."""
        self.entries = [change(entry) if entry.key == key else entry for entry in self.entries]


def index_code(numel: int) -> str:
    """I32 for up to 2^31 elements, else I64."""
    return "I32" if numel <= I32_ELEMENTS else "I64"


def patch_entries(number: int, patch: Patch, indices: str | None = None) -> list[Entry]:
    """`{number}.indices` and `{number}.values`; `indices` forces I32 or I64."""
    code = indices or index_code(patch.numel)
    positions = patch.indices.astype(np.int32 if code == "I32" else np.int64)
    values = patch.bits.astype(unsigned(patch.code))
    return [
        Entry(f"{number}.indices", code, (len(positions),), positions.tobytes()),
        Entry(f"{number}.values", patch.code, file_shape(patch.code, (len(values),)), values.tobytes()),
    ]


def draft(patches: Sequence[Patch], total: int, *, indices: str | None = None) -> Draft:
    """The well-formed delta of these patches, taken apart. `total`: elements of the whole state."""
    changed = sum(len(patch.indices) for patch in patches)
    names = [patch.name for patch in patches]
    metadata: dict[str, Any] = {
        "format": "sparse_delta",
        "format_version": 2,
        "layer_names": names,
        "layer_shapes": [list(patch.shape) for patch in patches],
        "changed_elements": changed,
        "total_elements": total,
        "density_pct": density_pct(changed, total),
    }
    if any(patch.code not in FLOATING for patch in patches):
        metadata["requires"] = [NON_FLOATING]
    entries = [e for number, patch in enumerate(patches) for e in patch_entries(number, patch, indices)]
    return Draft(metadata, entries, {"layer_names": json.dumps(names, ensure_ascii=False, separators=(",", ":"))})


def disassemble(directory: Path) -> Draft:
    """The parts of a delta whose files can be read, whatever they say."""
    metadata = json.loads((directory / METADATA_FILE).read_text(encoding="utf-8"))
    entries, header_metadata, _ = unpack((directory / DELTA_FILE).read_bytes())
    return Draft(metadata, entries, header_metadata)


def density_pct(changed: int, total: int) -> float:
    """100 * changed / total to 3 decimals; 0 for a state without elements. One of two where it lies half way."""
    return round(100 * changed / total, 3) if total else 0.0


def is_density(found: object, changed: int, total: int) -> bool:
    """Whether `found` is a number of three decimals within 0.0005 of 100 * changed / total, both ends included."""
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 100:
        return False
    thousandths, total = round(1000 * found), max(total, 1)  # of nothing it is 0
    return found == thousandths / 1000 and 2 * abs(thousandths * total - 100_000 * changed) <= total


def write_delta(
    directory: Path, patches: Sequence[Patch], total_elements: int, *, indices: str | None = None, **overrides: object
) -> Path:
    """Write a delta of `patches` in their order. `overrides` replace or add keys of `metadata.json`.

    directory: created; total_elements: elements of the whole state; indices: force "I32" or "I64".
    """
    parts = draft(patches, total_elements, indices=indices)
    parts.metadata.update(overrides)
    return parts.write(directory)


def canonical_payload(patches: Sequence[Patch]) -> bytes:
    """The bytes of `delta.safetensors` for these patches: layers in name order, parts by number, no gaps."""
    parts = draft(sorted(patches, key=lambda patch: patch.name), 0)
    return pack(parts.entries, parts.header_metadata)


# -- reading a delta -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawDelta:
    """A well-formed delta as it lies on disk."""

    metadata: Mapping[str, Any]
    patches: tuple[Patch, ...]
    """In the order of `layer_names`."""
    index_codes: tuple[str, ...]
    """I32 or I64, one per patch."""
    header_bytes: int
    """Bytes of the payload file before the data, its length field included."""
    data_bytes: int
    """Bytes of the tensors' data."""


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise OracleError(text)


def _metadata(directory: Path) -> dict[str, Any]:
    text = (directory / METADATA_FILE).read_bytes()
    _require(len(text) <= MAX_HEADER_BYTES, f"metadata of {len(text)} bytes")
    metadata = strict_json(text)
    _require(isinstance(metadata, dict), f"metadata {metadata!r}")
    _require(metadata.get("format") == "sparse_delta", f"format {metadata.get('format')!r}")
    _require(metadata.get("format_version") == 2, f"format_version {metadata.get('format_version')!r}")
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    _require(isinstance(names, list) and all(isinstance(name, str) and name for name in names), f"layer_names {names}")
    _require(isinstance(shapes, list) and all(isinstance(shape, list) for shape in shapes), f"layer_shapes {shapes}")
    _require(len(names) == len(shapes) == len(set(names)), f"names {names} against shapes {shapes}")
    dims = [dim for shape in shapes for dim in shape]
    _require(all(type(dim) is int and dim >= 0 for dim in dims), f"layer_shapes {shapes}")
    requires = metadata.get("requires") or []
    _require(isinstance(requires, list) and set(requires) <= {NON_FLOATING}, f"requires {requires}")
    for key in ("base_model", "model_id", "kind", "created_at"):
        _require(isinstance(metadata.get(key), str | None), f"{key} {metadata.get(key)!r}")
    stamp = metadata.get("timestamp")
    _require(isinstance(stamp, int | float | None) and not isinstance(stamp, bool), f"timestamp {stamp!r}")
    return dict(metadata)


def read_delta(directory: Path) -> RawDelta:
    """Read and check a delta as the format defines it; OracleError names the first fault."""
    metadata = _metadata(directory)
    entries, header_metadata, start = unpack((directory / DELTA_FILE).read_bytes())
    names, shapes = metadata["layer_names"], metadata["layer_shapes"]
    declared = strict_json(header_metadata.get("layer_names", json.dumps(names)).encode())
    _require(declared == names, f"the header's layer_names {declared} against the metadata's {names}")
    by_key = {entry.key: entry for entry in entries}
    keys = {f"{i}.{part}" for i in range(len(names)) for part in ("indices", "values")}
    _require(by_key.keys() == keys, f"payload keys {sorted(by_key)} for {len(names)} layers")
    patches = tuple(
        _read_patch(i, name, shape, by_key) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    )
    _check_counts(metadata, patches)
    undeclared = [
        p.code for p in patches if p.code not in FLOATING and NON_FLOATING not in (metadata.get("requires") or [])
    ]
    _require(not undeclared, f"values of {undeclared} without the extension {NON_FLOATING}")
    codes = tuple(by_key[f"{i}.indices"].code for i in range(len(names)))
    return RawDelta(metadata, patches, codes, start, sum(len(entry.data) for entry in entries))


def read_lineage(directory: Path) -> dict[str, Any] | None:
    """The lineage of a delta, None where it has none; OracleError names the first field that is wrong."""
    lineage = json.loads((directory / METADATA_FILE).read_text(encoding="utf-8")).get("lineage")
    if lineage is None:
        return None
    _require(isinstance(lineage, dict), f"lineage {lineage!r}")
    for field_name, is_right in _LINEAGE.items():
        required = field_name in ("run_id", "version")
        value = lineage.get(field_name)
        _require((value is None and not required) or is_right(value), f"lineage.{field_name} {value!r}")
    expected = lineage.get("payload_sha256")
    found = hashlib.sha256((directory / DELTA_FILE).read_bytes()).hexdigest()
    _require(expected in (None, found), f"payload_sha256 {expected}, not {found}")
    return dict(lineage)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


_LINEAGE: Mapping[str, Callable[[Any], bool]] = {
    "run_id": lambda value: _is_text(value) and bool(value),
    "version": _is_count,
    "base_version": _is_count,
    "base_digest": _is_text,
    "digest": _is_text,
    "layer_digests": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
    "payload_sha256": lambda value: _is_text(value) and len(value) == 64 and set(value) <= set("0123456789abcdef"),
    "part": lambda value: (
        isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] < value[1]
    ),
}
"""Field of a lineage -> whether its value is right."""


def _read_patch(number: int, name: str, shape: Sequence[int], by_key: Mapping[str, Entry]) -> Patch:
    positions, values = by_key[f"{number}.indices"], by_key[f"{number}.values"]
    _require(positions.code in ("I32", "I64"), f"{name}: indices are {positions.code}")
    _require(len(positions.shape) == len(values.shape) == 1, f"{name}: {positions.shape}, {values.shape} are not 1-D")
    lengths = positions.shape, _torch_shape(values.code, values.shape)
    _require(lengths[0] == lengths[1], f"{name}: indices and values have lengths {lengths}")
    indices = np.frombuffer(positions.data, "<i4" if positions.code == "I32" else "<i8").astype(np.int64)
    patch = Patch(name, tuple(shape), values.code, indices, np.frombuffer(values.data, unsigned(values.code)))
    _require(bool(np.all(np.diff(indices) > 0)), f"{name}: indices are not strictly increasing")
    _require(not indices.size or (indices[0] >= 0 and indices[-1] < patch.numel), f"{name}: an index out of range")
    return patch


def _check_counts(metadata: Mapping[str, Any], patches: Sequence[Patch]) -> None:
    changed, total = sum(len(patch.indices) for patch in patches), metadata["total_elements"]
    counted = metadata["changed_elements"]
    _require(type(counted) is int and counted == changed, f"changed_elements {counted!r}, not {changed}")
    least = sum(patch.numel for patch in patches)
    _require(type(total) is int and least <= total < 2**63, f"total_elements {total!r}")
    density = metadata.get("density_pct")
    _require(is_density(density, changed, total), f"density_pct {density!r}, not {density_pct(changed, total)}")
