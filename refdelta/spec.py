"""The sparse_delta v2 format as code: constants, types, reasons for refusal, and invariants. docs/SPEC.md is the text.

A delta is what changed between two states of a model. On disk it is a directory with two files. For layer ``i`` of
``layer_names``, ``delta.safetensors`` holds two one-dimensional tensors: ``"{i}.indices"``, the strictly increasing
flat row-major positions in the checkpoint tensor that changed, and ``"{i}.values"``, the new values in the tensor's own
dtype. Values replace what was there; they are not differences. ``metadata.json`` holds the names and shapes of the
layers, and counts. Two elements are equal when their bits are: +0.0 and -0.0 differ, and a NaN equals itself.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from types import MappingProxyType, NoneType
from typing import Any, Final, Protocol, Self
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from refdelta.plain import obstacle
from refdelta.values import brief, is_int

__all__ = [
    "DELTA_FILE",
    "DTYPES",
    "DTYPE_CODES",
    "EXTENSIONS",
    "FORMAT",
    "FORMAT_KEYS",
    "FORMAT_VERSION",
    "I32_MAX_ELEMENTS",
    "INVARIANTS",
    "MAX_ELEMENTS",
    "MAX_HEADER_BYTES",
    "METADATA_FILE",
    "NON_FLOATING_VALUES",
    "UNVERSIONED",
    "Apply",
    "Delta",
    "DeltaError",
    "Invariant",
    "Lineage",
    "Reason",
    "ReasonGroup",
    "Routed",
    "Router",
    "State",
    "TensorPatch",
    "assert_same_state",
    "check_argument",
    "check_bit_exact",
    "check_canonical",
    "check_composes",
    "check_counted",
    "check_density_bound",
    "check_deterministic",
    "check_extra",
    "check_idempotent",
    "check_inverts",
    "check_minimal",
    "check_name",
    "check_plain",
    "check_refuses",
    "check_routes",
    "check_shape",
    "copy_state",
    "count_elements",
    "density_pct",
    "differing_positions",
    "elements",
    "header_bound",
    "index_dtype",
    "is_density_pct",
    "raw_bytes",
]

FORMAT: Final = "sparse_delta"
FORMAT_VERSION: Final = 2
DELTA_FILE: Final = "delta.safetensors"
METADATA_FILE: Final = "metadata.json"

FORMAT_KEYS: Final = (
    "format",
    "format_version",
    "requires",
    "changed_elements",
    "total_elements",
    "density_pct",
    "layer_names",
    "layer_shapes",
    "lineage",
)
"""Keys of metadata.json that the format owns, in the order of a written file. `Delta.extra` keeps all others."""

_TEXT_KEYS: Final = ("base_model", "model_id", "kind", "created_at")

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest safetensors header, and longest metadata.json, that a reader accepts, in bytes. The safetensors library has
the same limit for headers."""

MAX_ELEMENTS: Final = 2**63 - 1
"""Largest dimension, and largest number of elements, of a tensor. Positions beyond it would wrap in 64 bits."""

I32_MAX_ELEMENTS: Final = 2**31
"""A writer gives I32 indices to tensors of at most this many elements, because the last position is then 2^31 - 1."""

NON_FLOATING_VALUES: Final = "non_floating_values"
"""The extension that a delta must require when it has integer, bool or complex values."""

EXTENSIONS: Final = frozenset({NON_FLOATING_VALUES})
"""Every extension that this version can read, as named in ``requires``."""

UNVERSIONED: Final = "unversioned"
"""Run id of an inverse delta whose digests are known and whose version is not: the delta that it undoes named none."""

DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F4": torch.float4_e2m1fn_x2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""Safetensors dtype code -> torch dtype. One element of an F4 tensor is a pair of halves (one byte), as in torch."""

DTYPE_CODES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
"""The same table, torch dtype -> safetensors dtype code."""


class ReasonGroup(StrEnum):
    """What a `Reason` is about, so that a caller can treat reasons alike. A closed set, listed in docs/SPEC.md."""

    meaning: str
    """What is wrong where a reason of this group is given."""

    def __new__(cls, code: str, meaning: str = "") -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    IO = "io", "a place to read or write: nothing is there, something is in the way, or reading or writing failed"
    METADATA = "metadata", "what `metadata.json` says, by itself or beside the payload"
    PAYLOAD = "payload", "what `delta.safetensors` holds"
    STATE = "state", "the tensors that a delta is made from, applied to or composed with"
    LINEAGE = "lineage", "where a delta stands in its run: versions, digests, parts"
    LAYOUT = "layout", "where an engine holds a checkpoint tensor: it has no place, or its place was not proven"
    ENGINE = "engine", "the engine itself, its ranks, or the conversation with it"
    OPTION = "option", "the call: an argument or an option"


class Reason(StrEnum):
    """Why something was refused: a closed set. A code is never reused, and never changes its meaning."""

    group: ReasonGroup
    """What the reason is about: where to look."""
    meaning: str
    """What triggers it, in the words of docs/SPEC.md."""

    def __new__(cls, code: str, group: str = "", meaning: str = "") -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.group = ReasonGroup(group)
        member.meaning = meaning
        return member

    NOT_A_DELTA = "not_a_delta", "io", "no such directory, or one that does not hold both files of a delta"
    NOT_A_CHECKPOINT = (
        "not_a_checkpoint",
        "io",
        "no such file, or a directory without the safetensors files of a checkpoint",
    )
    UNREADABLE = (
        "unreadable",
        "io",
        "a file exists but cannot be read: no regular file, an I/O error, or cut short meanwhile",
    )
    TARGET_EXISTS = "target_exists", "io", "the place to write to exists already"

    UNSUPPORTED_FORMAT = "unsupported_format", "metadata", "`format` is absent or is not sparse_delta"
    UNSUPPORTED_VERSION = "unsupported_version", "metadata", "`format_version` is absent or is not 2"
    LEGACY_LAYOUT = "legacy_layout", "metadata", "the payload has the keys of a layout before version 2"
    UNSUPPORTED_EXTENSION = (
        "unsupported_extension",
        "metadata",
        "`requires` lists an extension that this version does not have",
    )
    BAD_METADATA = (
        "bad_metadata",
        "metadata",
        "`metadata.json` is not JSON, lacks a field, or has one of the wrong type",
    )
    BAD_NAME = "bad_name", "metadata", "a layer name is not a non-empty string that UTF-8 can encode"
    DUPLICATE_NAME = "duplicate_name", "metadata", "a layer name occurs twice"
    BAD_SHAPE = (
        "bad_shape",
        "metadata",
        "a shape is not a list of non-negative integers, or has more than 2^63 - 1 elements",
    )
    COUNT_MISMATCH = (
        "count_mismatch",
        "metadata",
        "a count or the density is not that of the payload, or not that of the state",
    )

    BAD_HEADER = (
        "bad_header",
        "payload",
        "the safetensors header is malformed or does not describe the bytes of the file",
    )
    KEYS_MISMATCH = (
        "keys_mismatch",
        "payload",
        "the payload's tensors or layer names are not those that the metadata declares",
    )
    BAD_INDICES = "bad_indices", "payload", "indices are not one-dimensional I32 or I64"
    BAD_VALUES = "bad_values", "payload", "values are not one-dimensional"
    INDEX_ORDER = "index_order", "payload", "indices are not strictly increasing"
    INDEX_RANGE = "index_range", "payload", "an index is negative or at least the number of elements"
    LENGTH_MISMATCH = "length_mismatch", "payload", "indices and values differ in length"
    UNSUPPORTED_DTYPE = (
        "unsupported_dtype",
        "payload",
        "a dtype that the format does not have, or that needs an extension not listed",
    )
    PAYLOAD_MISMATCH = "payload_mismatch", "payload", "the payload's SHA-256 is not that of the lineage"

    UNKNOWN_TENSOR = "unknown_tensor", "state", "the other side has no tensor of this name"
    SHAPE_MISMATCH = "shape_mismatch", "state", "shapes of one tensor differ between the two sides"
    DTYPE_MISMATCH = "dtype_mismatch", "state", "dtypes of one tensor differ between the two sides"
    ALIAS_CONFLICT = "alias_conflict", "state", "tensors share memory, and not each of them states the change"
    UNSUPPORTED_TENSOR = (
        "unsupported_tensor",
        "state",
        "a tensor does not hold its own elements, or holds only a part of them",
    )

    BASE_MISMATCH = "base_mismatch", "lineage", "the delta does not start from this state, or from the delta before it"
    DIGEST_MISMATCH = "digest_mismatch", "lineage", "a digest is not that of the state that it describes"
    INCOMPLETE = (
        "incomplete",
        "lineage",
        "the parts are not one whole update: missing, repeated, overlapping or of another update",
    )
    WRITE_FAILED = (
        "write_failed",
        "io",
        "a write failed; what was written has been undone unless the detail says otherwise",
    )

    UNMAPPED = "unmapped", "layout", "a checkpoint tensor has no place in the engine's layout"
    UNATTESTED = "unattested", "layout", "a parameter of the engine was not proven to hold what the layout map says"

    UNSUPPORTED_ENGINE = "unsupported_engine", "engine", "the engine has a configuration that was not proven"
    NO_SESSION = "no_session", "engine", "an update step was called without an open update session"
    RANK_FAILED = "rank_failed", "engine", "another rank refused or failed"
    RANK_DISAGREEMENT = "rank_disagreement", "engine", "ranks have different sessions or payloads"
    FENCED = "fenced", "engine", "the engine accepts no updates any more, or none from this sender"
    BAD_ANSWER = (
        "bad_answer",
        "engine",
        "an engine did not answer a call, or its answer does not have the expected form",
    )

    BAD_OPTION = "bad_option", "option", "an option or argument is unknown or has an illegal value"


_ERROR_TEXT = re.compile(r'refdelta\[(?P<reason>[a-z_]+)\](?: tensor=(?P<tensor>[^\s:"\\]*))?: (?P<detail>[^"\\\r\n]*)')
# Printable ASCII without '"', '\' and '%': what JSON, HTTP bodies and tracebacks carry unchanged.
_DETAIL_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) not in '"\\%')
_NAME_SAFE = "/[]@+,=!$&*()~"


class DeltaError(ValueError):
    """A refusal. Unless ``detail`` says otherwise, nothing was changed.

    ``str(error)`` is ``refdelta[<reason>] tensor=<name>: <detail>``, without the tensor part where there is no tensor.
    It is one line of printable ASCII without ``"`` and ``\\``. Other characters are percent-encoded as in URLs, and in
    names spaces and colons too. So the string survives JSON, HTTP and process boundaries, and `parse` restores the
    error.
    """

    reason: Reason
    """Why: one of a closed set."""
    detail: str
    """What was expected and what was found, for people."""
    tensor: str | None
    """The checkpoint tensor that it is about, if it is about one."""

    def __init__(self, reason: Reason, detail: str, tensor: str | None = None) -> None:
        super().__init__(reason, detail, tensor)
        self.reason = reason
        self.detail = detail
        self.tensor = tensor

    def __str__(self) -> str:
        name = "" if self.tensor is None else f" tensor={quote(self.tensor, _NAME_SAFE, errors='surrogatepass')}"
        return f"refdelta[{self.reason.value}]{name}: {quote(self.detail, _DETAIL_SAFE, errors='surrogatepass')}"

    @classmethod
    def parse(cls, text: str) -> DeltaError | None:
        """The first refusal in ``text``, or None.

        ``text`` may be a traceback, an HTTP body or a log line, plain or JSON-escaped once.
        """
        for match in _ERROR_TEXT.finditer(text):
            if match["reason"] in Reason.__members__.values():
                name = match["tensor"]
                return cls(
                    Reason(match["reason"]),
                    unquote(match["detail"], errors="surrogatepass"),
                    None if name is None else unquote(name, errors="surrogatepass"),
                )
        return None


def check_argument(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Raise `DeltaError` (bad_option) unless ``value``, the argument ``name``, is an instance of ``types``.

    ``expected`` says in words what was expected.
    """
    if not isinstance(value, types):
        found = type(value).__name__ + (f" {brief(value)}" if isinstance(value, str | int | float) else "")
        raise DeltaError(Reason.BAD_OPTION, f"{name}: expected {expected}, found {found}")


def check_name(name: object) -> str:
    """Return ``name``. Raise `DeltaError` (bad_name) unless it is a non-empty string that UTF-8 can encode."""
    if not isinstance(name, str) or not name:
        raise DeltaError(Reason.BAD_NAME, f"expected a non-empty string, found {brief(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DeltaError(Reason.BAD_NAME, "the name has a lone surrogate", name) from None
    return name


def check_shape(shape: object, tensor: str | None = None) -> tuple[int, ...]:
    """Return ``shape`` as a tuple.

    Raise `DeltaError` (bad_shape, for ``tensor``) unless it is a list or tuple of integers from 0 to `MAX_ELEMENTS`
    whose product is at most `MAX_ELEMENTS`.
    """
    if not isinstance(shape, list | tuple) or not all(is_int(size) and size >= 0 for size in shape):
        raise DeltaError(Reason.BAD_SHAPE, f"expected non-negative integers, found {brief(shape)}", tensor)
    if any(size > MAX_ELEMENTS for size in shape) or count_elements(shape) > MAX_ELEMENTS:
        raise DeltaError(Reason.BAD_SHAPE, f"more than 2^63 - 1 elements: {brief(shape)}", tensor)
    return tuple(shape)


def count_elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape. Beyond `MAX_ELEMENTS` it is some number beyond, not the product.

    A file may state a long shape of huge dimensions, so multiplying stops as soon as the answer is known.
    """
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            break
    return count


def check_plain(tensor: Tensor, name: str | None = None) -> Tensor:
    """Return ``tensor``. Raise `DeltaError` (unsupported_tensor, for ``name``) unless it holds its own elements.

    `refdelta.plain` says what does not: shards, placeholders, wrappers, freed memory.
    """
    if (hindrance := obstacle(tensor)) is not None:
        raise DeltaError(Reason.UNSUPPORTED_TENSOR, hindrance, name)
    return tensor


def check_extra(extra: Mapping[str, object]) -> Mapping[str, object]:
    """Return ``extra``, metadata that the format does not own.

    Raise `DeltaError` (bad_metadata) where a key is not a string or is in `FORMAT_KEYS`, and where base_model,
    model_id, kind or created_at is not a string or timestamp not a number. None is allowed for each.
    """
    for key, value in extra.items():
        if not isinstance(key, str) or key in FORMAT_KEYS:
            raise DeltaError(Reason.BAD_METADATA, f"extra: {brief(key)} is not a string or is a key of the format")
        if key in _TEXT_KEYS and not isinstance(value, str | None):
            raise DeltaError(Reason.BAD_METADATA, f"{key}: expected a string, found {brief(value)}")
    stamp = extra.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, int | float | None):
        raise DeltaError(Reason.BAD_METADATA, f"timestamp: expected a number, found {brief(stamp)}")
    return extra


def index_dtype(numel: int) -> torch.dtype:
    """The dtype that a writer gives the indices of a tensor of ``numel`` elements: int32 or int64."""
    return torch.int32 if numel <= I32_MAX_ELEMENTS else torch.int64


def density_pct(changed: int, total: int) -> float:
    """100 * changed / total, in percent, rounded to 3 decimals. It is 0.0 where ``total`` is 0.

    The exact quotient is rounded, half to even, not the nearest float.
    """
    return float(round(Fraction(100 * changed, total), 3)) if total else 0.0


def is_density_pct(found: object, changed: int, total: int) -> bool:
    """Whether ``found`` is the density in percent, to 3 decimals. Half way between two such numbers both are right."""
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 100:
        return False
    exact = 100 * changed / total if total else 0.0
    return round(found, 3) == found and abs(found - exact) <= 0.0005 + 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class TensorPatch:
    """The change of one tensor: positions and new values.

    The constructor raises `DeltaError` where a name, shape, dtype or length is wrong (bad_name, bad_shape, bad_indices,
    bad_values, unsupported_dtype, length_mismatch, unsupported_tensor). It does not look at the positions themselves:
    `check_indices` does.
    """

    name: str
    """Name in the checkpoint's safetensors files."""
    shape: tuple[int, ...]
    """Shape of the whole tensor; ``()`` for a scalar, which has one element."""
    indices: Tensor
    """[changed], int32 or int64: strictly increasing flat row-major positions in ``shape``, each in [0, numel)."""
    values: Tensor
    """[changed], the tensor's own dtype: what the positions hold afterwards."""

    def __post_init__(self) -> None:
        check_name(self.name)
        object.__setattr__(self, "shape", check_shape(self.shape, self.name))
        for part, reason in (("indices", Reason.BAD_INDICES), ("values", Reason.BAD_VALUES)):
            if not isinstance(getattr(self, part), Tensor):
                self._refuse(reason, f"expected a torch tensor, found {type(getattr(self, part)).__name__}")
            check_plain(getattr(self, part), self.name)
        if self.indices.dtype not in (torch.int32, torch.int64) or self.indices.dim() != 1:
            self._refuse(Reason.BAD_INDICES, f"expected 1-D I32 or I64, found {_describe(self.indices)}")
        if self.values.dim() != 1:
            self._refuse(Reason.BAD_VALUES, f"expected 1-D, found {_describe(self.values)}")
        if self.values.dtype not in DTYPE_CODES:
            self._refuse(Reason.UNSUPPORTED_DTYPE, f"values of {self.values.dtype}")
        if len(self.indices) != len(self.values):
            self._refuse(Reason.LENGTH_MISMATCH, f"{len(self.indices)} indices, {len(self.values)} values")

    def _refuse(self, reason: Reason, detail: str) -> None:
        raise DeltaError(reason, detail, self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.values.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def changed(self) -> int:
        """Number of positions."""
        return len(self.indices)

    @property
    def density_pct(self) -> float:
        """Changed elements of this tensor, in percent of all of its elements, to 3 decimals."""
        return density_pct(self.changed, self.numel)

    @property
    def payload_bytes(self) -> int:
        """Bytes of indices and values, with the index dtype that this patch has."""
        return self.changed * (self.indices.dtype.itemsize + self.values.dtype.itemsize)

    def to(self, device: str | torch.device) -> TensorPatch:
        """The same patch with its tensors on ``device``."""
        return TensorPatch(self.name, self.shape, self.indices.to(device), self.values.to(device))

    def check_indices(self) -> None:
        """Raise `DeltaError` unless positions are strictly increasing (index_order) and in [0, numel) (index_range).

        O(changed).
        """
        steps = self.indices[1:] > self.indices[:-1]
        if not bool(steps.all()):
            at = int(steps.logical_not().nonzero()[0]) + 1
            before, here = (int(i) for i in self.indices[at - 1 : at + 1])
            self._refuse(Reason.INDEX_ORDER, f"position {here} at {at} follows {before}")
        if not self.changed:
            return
        first, last = int(self.indices[0]), int(self.indices[-1])
        if first < 0 or last >= self.numel:
            wrong = first if first < 0 else last
            self._refuse(Reason.INDEX_RANGE, f"position {wrong} outside [0, {self.numel}) of shape {list(self.shape)}")


def _describe(tensor: Tensor) -> str:
    return f"{DTYPE_CODES.get(tensor.dtype, tensor.dtype)} {list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which two states of a run a delta lies between. Plain v2 readers ignore this part of the metadata.

    The constructor raises `DeltaError` (bad_metadata) where a field has the wrong type or an illegal value.
    """

    run_id: str
    """Non-empty name of the run. Versions of different runs are never compared."""
    version: int
    """Version of the state after the delta, >= 0."""
    base_version: int | None = None
    """Version of the state before the delta, >= 0."""
    base_digest: str | None = None
    """State digest before the delta, as `refdelta.state_digest` gives it."""
    digest: str | None = None
    """State digest after the delta."""
    layer_digests: Mapping[str, str] | None = None
    """Layer name -> digest of that tensor after the delta."""
    payload_sha256: str | None = None
    """SHA-256 of the bytes of ``delta.safetensors``, as 64 lower-case hexadecimal digits. `write_delta` sets it."""
    part: tuple[int, int] | None = None
    """(i, n) with 0 <= i < n: this is part i of an update that comes in n directories. None: it is the whole update."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Fields that this version does not know. They are written again, and are lost when deltas are composed."""

    def __post_init__(self) -> None:
        _field("run_id", self.run_id, isinstance(self.run_id, str) and bool(self.run_id), "a non-empty string")
        _field("version", self.version, _is_version(self.version), "an integer >= 0")
        base = self.base_version
        _field("base_version", base, base is None or _is_version(base), "an integer >= 0")
        for name in ("base_digest", "digest"):
            value = getattr(self, name)
            _field(name, value, value is None or isinstance(value, str), "a string")
        layers = self.layer_digests
        _field("layer_digests", layers, layers is None or _is_string_map(layers), "strings by layer name")
        sha = self.payload_sha256
        _field("payload_sha256", sha, sha is None or _is_sha256(sha), "64 lower-case hexadecimal digits")
        part = self.part
        _field("part", part, part is None or _is_part(part), "[i, n] with 0 <= i < n")

    @property
    def is_partial(self) -> bool:
        """Whether the delta is one part of several, which must not be applied alone."""
        return self.part is not None and self.part[1] > 1

    @property
    def base_name(self) -> str:
        """The state before the delta in words, for messages: version, run and digest as far as they are stated."""
        version = "no stated version" if self.base_version is None else f"version {self.base_version}"
        return f"{version} of run {self.run_id}, {self.base_digest or 'no stated digest'}"

    @classmethod
    def from_json(cls, value: object) -> Lineage:
        """The lineage in a parsed JSON value. Raise `DeltaError` (bad_metadata) where it is no lineage."""
        if not isinstance(value, Mapping):
            raise DeltaError(Reason.BAD_METADATA, f"lineage: expected an object, found {brief(value)}")
        known: dict[str, Any] = {name: value.get(name) for name in _LINEAGE_FIELDS}
        if isinstance(known["part"], list):
            known["part"] = tuple(known["part"])
        return cls(**known, extra={k: v for k, v in value.items() if k not in _LINEAGE_FIELDS})

    def to_json(self) -> dict[str, object]:
        """The object that metadata.json holds. Fields that are None are left out."""
        found: dict[str, object] = {name: getattr(self, name) for name in _LINEAGE_FIELDS}
        found = {name: value for name, value in found.items() if value is not None}
        if self.part is not None:
            found["part"] = list(self.part)
        if self.layer_digests is not None:
            found["layer_digests"] = dict(self.layer_digests)
        return {**found, **{k: v for k, v in self.extra.items() if k not in _LINEAGE_FIELDS}}


_LINEAGE_FIELDS: Final = (
    "run_id",
    "version",
    "base_version",
    "base_digest",
    "digest",
    "layer_digests",
    "payload_sha256",
    "part",
)


def _field(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise DeltaError(Reason.BAD_METADATA, f"lineage.{name}: expected {expected}, found {brief(value)}")


def _is_version(value: object) -> bool:
    return isinstance(value, int) and is_int(value) and value >= 0


def _is_string_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(x, str) for item in value.items() for x in item)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_part(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_int, value)) and 0 <= value[0] < value[1]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The change of a whole state: one patch for each tensor that changed.

    The constructor raises `DeltaError`: duplicate_name where two patches have the same name, count_mismatch where
    ``total_elements`` cannot be right, bad_metadata as `check_extra` does, bad_option for arguments of another type.
    """

    patches: tuple[TensorPatch, ...]
    """One patch for each changed tensor. Names are unique. A delta without patches changes nothing."""
    total_elements: int
    """Number of elements of the whole state, changed or not: at least that of the patched tensors, below 2^63."""
    lineage: Lineage | None = None
    """Which two states of a run the delta lies between; None where it does not say."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Other keys of metadata.json with their JSON values: base_model, model_id, kind, created_at, timestamp, and keys
    that this version does not know."""

    def __post_init__(self) -> None:
        check_argument("patches", self.patches, Iterable, "TensorPatches")
        object.__setattr__(self, "patches", tuple(self.patches))
        check_argument("lineage", self.lineage, (Lineage, NoneType), "a Lineage or None")
        check_argument("extra", self.extra, Mapping, "a mapping")
        seen: set[str] = set()
        for patch in self.patches:
            check_argument("patches", patch, TensorPatch, "TensorPatches")
            if patch.name in seen:
                raise DeltaError(Reason.DUPLICATE_NAME, "two patches of one tensor", patch.name)
            seen.add(patch.name)
        check_extra(self.extra)
        least = sum(patch.numel for patch in self.patches)
        if not is_int(self.total_elements) or not least <= self.total_elements <= MAX_ELEMENTS:
            expected, found = f"an integer from {least} to 2^63 - 1", brief(self.total_elements)
            raise DeltaError(Reason.COUNT_MISMATCH, f"total_elements: expected {expected}, found {found}")

    @property
    def changed_elements(self) -> int:
        """Number of positions over all patches."""
        return sum(patch.changed for patch in self.patches)

    @property
    def density_pct(self) -> float:
        """Changed elements in percent of the whole state, rounded to 3 decimals."""
        return density_pct(self.changed_elements, self.total_elements)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all indices and values, without the header of the safetensors file."""
        return sum(patch.payload_bytes for patch in self.patches)


# Invariants. Each check takes states, deltas and, where it needs a codec, the codec's functions. It raises
# AssertionError with its finding. None of them uses refdelta's codec: they judge it, and any other one.

State = Mapping[str, Tensor]
"""Name -> tensor."""
Apply = Callable[[Delta, MutableMapping[str, Tensor]], Any]
"""A codec's function that writes a delta into a state in place."""


class Routed(Protocol):
    """One write into a runtime parameter, as a layout map gives it.

    ``param`` is the parameter's name. ``indices`` are [n] int64, flat row-major positions in it. ``values`` are [n].
    """

    @property
    def param(self) -> str: ...
    @property
    def indices(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...


class Router(Protocol):
    """The part of a layout map that `check_routes` needs."""

    def route(self, patch: TensorPatch, /) -> Iterable[Routed]: ...


def raw_bytes(tensor: Tensor) -> Tensor:
    """[numel * itemsize] uint8, on the CPU: a copy of the elements' bytes in logical row-major order."""
    detached = check_plain(tensor).detach().resolve_conj().resolve_neg()
    return detached.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def elements(tensor: Tensor) -> Tensor:
    """[numel, itemsize] uint8, on the CPU: a copy of the elements' bytes, one row for each element."""
    return raw_bytes(tensor).reshape(tensor.numel(), tensor.dtype.itemsize)


def copy_state(state: State) -> dict[str, Tensor]:
    """Name -> a contiguous copy of the tensor, on the CPU."""
    return {name: raw_bytes(check_plain(t, name)).view(t.dtype).reshape(t.shape) for name, t in state.items()}


def differing_positions(a: Tensor, b: Tensor) -> list[int]:
    """Flat row-major positions at which the bits of two tensors of one shape and dtype differ."""
    return [int(i) for i in (elements(a) != elements(b)).any(dim=1).nonzero().reshape(-1)]


def assert_same_state(found: State, expected: State, what: str) -> None:
    """Raise AssertionError, which begins with ``what``, unless names, shapes, dtypes and bits are equal."""
    assert found.keys() == expected.keys(), f"{what}: names differ: {sorted(found.keys() ^ expected.keys())}"
    for name, want in expected.items():
        have = check_plain(found[name], name)
        check_plain(want, name)
        where = f"{what}: tensor {name}"
        assert have.dtype == want.dtype, f"{where}: dtype expected {want.dtype}, found {have.dtype}"
        assert have.shape == want.shape, f"{where}: shape expected {list(want.shape)}, found {list(have.shape)}"
        if not torch.equal(raw_bytes(have), raw_bytes(want)):
            at = differing_positions(have, want)
            a, b = (elements(t)[at[0]].tolist() for t in (want, have))
            raise AssertionError(f"{where}: {len(at)} elements differ, first {at[0]}: expected bytes {a}, found {b}")


def check_bit_exact(delta: Delta, base: State, target: State, apply: Apply) -> None:
    """``apply(delta, base)`` gives ``target``, bit for bit."""
    state = copy_state(base)
    apply(delta, state)
    assert_same_state(state, target, "bit_exact: base after the delta")


def check_idempotent(delta: Delta, base: State, apply: Apply) -> None:
    """A second application changes nothing."""
    state = copy_state(base)
    apply(delta, state)
    once = copy_state(state)
    apply(delta, state)
    assert_same_state(state, once, "idempotent: state after the second application")


def check_minimal(delta: Delta, base: State, target: State) -> None:
    """``delta`` holds exactly the positions whose bits differ between ``base`` and ``target``."""
    found = {patch.name: patch.indices.tolist() for patch in delta.patches}
    for name, t in itertools.chain(base.items(), target.items()):
        check_plain(t, name)
    expected = {name: at for name in target if (at := differing_positions(base[name], target[name]))}
    assert found.keys() == expected.keys(), f"minimal: layers expected {sorted(expected)}, found {sorted(found)}"
    for name, at in expected.items():
        assert found[name] == at, f"minimal: tensor {name}: positions expected {at[:20]}, found {found[name][:20]}"


def check_deterministic(produce: Callable[[], bytes], threads: Sequence[int] = (1, 2, 4)) -> None:
    """``produce()``, the bytes of delta.safetensors, is the same on every call and for every number of threads."""
    before = torch.get_num_threads()
    try:
        outputs = []
        for n in threads:
            torch.set_num_threads(n)
            outputs += [(n, produce()), (n, produce())]
    finally:
        torch.set_num_threads(before)
    for n, data in outputs:
        assert data == outputs[0][1], f"deterministic: bytes with {n} threads differ from those with {threads[0]}"


def check_canonical(delta: Delta, data: bytes) -> None:
    """``data``, the bytes of delta.safetensors, are the canonical bytes of ``delta`` (docs/SPEC.md, section 6)."""
    names = sorted(patch.name for patch in delta.patches)
    header: dict[str, object] = {"__metadata__": {"layer_names": _compact(names)}}
    body = bytearray()
    by_name = {patch.name: patch for patch in delta.patches}
    for number, name in enumerate(names):
        patch = by_name[name]
        for key, tensor in (("indices", patch.indices.to(index_dtype(patch.numel))), ("values", patch.values)):
            start = len(body)
            body += bytes(raw_bytes(tensor).tolist())
            header[f"{number}.{key}"] = {
                "dtype": DTYPE_CODES[tensor.dtype],
                "shape": [len(tensor) * (2 if tensor.dtype == torch.float4_e2m1fn_x2 else 1)],
                "data_offsets": [start, len(body)],
            }
    text = _compact(header).encode()
    text += b" " * (-len(text) % 8)
    expected = len(text).to_bytes(8, "little") + text + bytes(body)
    if data != expected:
        at = next((i for i, pair in enumerate(zip(data, expected, strict=False)) if len(set(pair)) > 1), -1)
        raise AssertionError(
            f"canonical: first difference at byte {at} (-1: length) of {len(expected)}: "
            f"expected {expected[at:][:24]!r}, found {data[at:][:24]!r} of {len(data)}"
        )


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def header_bound(delta: Delta) -> int:
    """Most bytes that a canonical delta.safetensors has besides its data: 64, and for each layer 256 + twice its name.

    The name counts as JSON. docs/SPEC.md, section 7.2, derives the bound.
    """
    return 64 + sum(256 + 2 * len(_compact(patch.name).encode()) for patch in delta.patches)


def check_density_bound(delta: Delta, file_bytes: int) -> None:
    """The size of the payload follows from the change alone. The file has at most `header_bound` bytes more.

    ``file_bytes`` is the size of delta.safetensors in bytes.
    """
    expected = sum(
        patch.changed * ((4 if patch.numel <= I32_MAX_ELEMENTS else 8) + patch.values.element_size())
        for patch in delta.patches
    )
    assert delta.payload_bytes == expected, f"density_bound: payload expected {expected}, found {delta.payload_bytes}"
    for patch in delta.patches:
        if patch.values.element_size() == 2 and patch.indices.element_size() == 4:
            smaller = patch.payload_bytes < 2 * patch.numel
            below = 3 * patch.changed < patch.numel
            assert smaller == below, f"density_bound: tensor {patch.name}: not 6 bytes a change"
    over = file_bytes - expected
    assert 0 <= over <= header_bound(delta), f"density_bound: overhead {over} not in [0, {header_bound(delta)}]"


def check_counted(delta: Delta, metadata: Mapping[str, object], total_elements: int | None = None) -> None:
    """The counts in ``metadata``, the content of metadata.json, are those of ``delta``.

    ``total_elements`` is the number of elements of the whole state. Without it, the delta's own is taken for right.
    """
    changed = sum(len(patch.values) for patch in delta.patches)
    total = delta.total_elements if total_elements is None else total_elements
    expected: dict[str, object] = {
        "changed_elements": changed,
        "total_elements": total,
        "density_pct": density_pct(changed, total),
    }
    found = {key: metadata.get(key) for key in expected}
    if is_density_pct(found["density_pct"], changed, total):
        expected["density_pct"] = found["density_pct"]
    assert found == expected, f"counted: expected {expected}, found {found}"


def check_composes(deltas: Sequence[Delta], composed: Delta, base: State, apply: Apply) -> None:
    """``composed`` applied once gives the state that ``deltas`` applied in order give."""
    stepwise = copy_state(base)
    for delta in deltas:
        apply(delta, stepwise)
    at_once = copy_state(base)
    apply(composed, at_once)
    assert_same_state(at_once, stepwise, f"composes: {len(deltas)} deltas in one")


def check_inverts(delta: Delta, base: State, apply: Callable[[Delta, MutableMapping[str, Tensor]], Delta]) -> None:
    """``apply`` returns a delta that restores ``base``."""
    state = copy_state(base)
    inverse = apply(delta, state)
    apply(inverse, state)
    assert_same_state(state, base, "inverts: state after the inverse")


def check_routes(
    layouts: Sequence[Router],
    patch: TensorPatch,
    base: State,
    lay_out: Callable[[Router, State], State],
) -> None:
    """Two ways to a rank's parameters give the same bits, for each of ``layouts``, one a rank.

    One lays ``base`` out and writes what ``layout.route(patch)`` says. The other writes ``patch`` into ``base`` and
    lays the result out. ``lay_out(layout, state)`` gives one rank's runtime parameters for a whole checkpoint state.
    """
    target = copy_state(base)
    _overwrite(target[patch.name], patch.indices, patch.values)
    for rank, layout in enumerate(layouts):
        params = copy_state(lay_out(layout, base))
        for routed in layout.route(patch):
            _overwrite(params[routed.param], routed.indices, routed.values)
        assert_same_state(params, lay_out(layout, target), f"routes: rank {rank} after {patch.name}")


def _overwrite(tensor: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write ``values`` at flat positions of a contiguous CPU tensor, byte by byte."""
    assert tensor.dtype == values.dtype, f"dtype expected {tensor.dtype}, found {values.dtype}"
    rows = tensor.view(-1).view(torch.uint8).view(tensor.numel(), tensor.dtype.itemsize)
    rows[indices.cpu().long()] = elements(values)


def check_refuses(attempt: Callable[[], object], state: State, reason: Reason | None = None) -> DeltaError:
    """``attempt()`` raises `DeltaError` and leaves ``state`` as it was, bit for bit. Return the error.

    With ``reason`` given, the error must have that one.
    """
    before = copy_state(state)
    try:
        attempt()
    except DeltaError as error:
        refused = error
    else:
        raise AssertionError(f"refuses: accepted, expected {reason or 'a DeltaError'}")
    assert_same_state(state, before, f"refuses: state after {refused.reason}")
    assert reason in (None, refused.reason), f"refuses: reason expected {reason}, found {refused}"
    return refused


@dataclass(frozen=True, slots=True)
class Invariant:
    """A promise of the format or of the codec, with a check that can be run against any codec."""

    id: str
    """Its name, such as ``bit_exact``. It never changes; tests, reports and documents cite it."""
    statement: str
    """The promise, an absolute sentence."""
    check: Callable[..., Any]
    """Raises AssertionError with the finding where the promise is broken. Its docstring says what it takes."""


INVARIANTS: Final[Mapping[str, Invariant]] = MappingProxyType(
    {
        invariant.id: invariant
        for invariant in (
            Invariant(
                "bit_exact",
                "Applying encode(a, b) to a gives b, bit for bit, for every dtype: signs of zero, NaN payloads, "
                "infinities and subnormals included.",
                check_bit_exact,
            ),
            Invariant("idempotent", "Applying a delta twice equals applying it once.", check_idempotent),
            Invariant(
                "minimal",
                "What diff and encode emit is exactly the positions whose bits differ; unchanged tensors are absent "
                "(composed deltas are exempt: a -> b -> a keeps its positions).",
                check_minimal,
            ),
            Invariant(
                "deterministic",
                "The same two states give byte-identical delta.safetensors, on every run and thread count.",
                check_deterministic,
            ),
            Invariant(
                "canonical",
                "The bytes are those that SPEC.md prescribes: layers in name order, tensors in {i}.indices, {i}.values "
                "order by number, header bytes and padding fixed.",
                check_canonical,
            ),
            Invariant(
                "density_bound",
                "Payload bytes are changed * (index size + value size): with I32 and a 2-byte dtype 6 bytes a change, "
                "smaller than dense exactly below 1/3 density; header overhead is at most 64 bytes, and per layer 256 "
                "bytes and twice its JSON name.",
                check_density_bound,
            ),
            Invariant(
                "counted",
                "Changed, total and density in the metadata equal what the payload holds.",
                check_counted,
            ),
            Invariant(
                "composes",
                "compose(d1, ..., dn) applied once gives the state that d1, ..., dn applied in order give.",
                check_composes,
            ),
            Invariant(
                "inverts",
                "Apply returns the inverse delta; applied to the state that apply left, it restores the state that "
                "apply saw, bit for bit.",
                check_inverts,
            ),
            Invariant(
                "routes",
                "Routing a patch through a layout map then writing equals writing then laying out densely, on every "
                "rank.",
                check_routes,
            ),
            Invariant(
                "refuses",
                "A malformed or misplaced delta is refused with its reason; the state after equals the state before, "
                "bit for bit.",
                check_refuses,
            ),
        )
    }
)
"""Id -> invariant, in the order of docs/SPEC.md."""
