"""The sparse_delta v2 format as code: constants, values, reasons, invariants.

A delta is a directory with two files. ``delta.safetensors`` holds, for layer ``i`` of ``layer_names``, the
one-dimensional tensors ``"{i}.indices"`` (strictly increasing flat row-major positions in the checkpoint tensor) and
``"{i}.values"`` (the new values in the tensor's own dtype: replacements, not differences). ``metadata.json`` names the
layers, their shapes and the counts. Everything here is about bits: two elements are equal when their bit patterns are.
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
from os import PathLike
from types import MappingProxyType, NoneType
from typing import Any, Final, Protocol, Self
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from refdelta.plain import obstacle

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
"""Metadata keys that the format owns, in the order of a written file; every other key is kept in `Delta.extra`."""

_TEXT_KEYS: Final = ("base_model", "model_id", "kind", "created_at")

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest safetensors header that a reader takes, in bytes, as in the safetensors library."""

MAX_ELEMENTS: Final = 2**63 - 1
"""Largest dimension and element count of a tensor; beyond it 64-bit positions wrap."""

I32_MAX_ELEMENTS: Final = 2**31
"""Tensors with at most this many elements have I32 indices: their last position is 2^31 - 1."""

NON_FLOATING_VALUES: Final = "non_floating_values"
"""The extension that a delta with integer, bool or complex values requires."""

EXTENSIONS: Final = frozenset({NON_FLOATING_VALUES})
"""Every entry of ``requires`` that this version reads."""

UNVERSIONED: Final = "unversioned"
"""Run id of an inverse delta that knows digests and no version: the delta that it undoes named none."""

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
"""Safetensors dtype code -> torch dtype. One element of F4 tensors is a pair (one byte), as in torch."""

DTYPE_CODES: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: code for code, dtype in DTYPES.items()})
"""The same table, torch dtype -> safetensors dtype code."""


class Reason(StrEnum):
    """Why something was refused. A closed set: codes are never reused, ``meaning`` says what triggers each."""

    meaning: str

    def __new__(cls, code: str, meaning: str = "") -> Self:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    # Files
    NOT_A_DELTA = "not_a_delta", "no such directory, or one that does not hold both files of a delta"
    NOT_A_CHECKPOINT = "not_a_checkpoint", "no such file, or a directory without the safetensors files of a checkpoint"
    UNREADABLE = "unreadable", "a file exists but cannot be read: not a regular file, an I/O error, cut short meanwhile"
    TARGET_EXISTS = "target_exists", "the place to write to exists already"

    # Metadata
    UNSUPPORTED_FORMAT = "unsupported_format", "`format` is absent or is not sparse_delta"
    UNSUPPORTED_VERSION = "unsupported_version", "`format_version` is absent or is not 2"
    LEGACY_LAYOUT = "legacy_layout", "the payload is keyed as layouts before version 2 were"
    UNSUPPORTED_EXTENSION = "unsupported_extension", "something is required that this version does not have"
    BAD_METADATA = "bad_metadata", "metadata.json is not JSON, or lacks a field, or has one of the wrong type"
    BAD_NAME = "bad_name", "a layer name is not a non-empty text that UTF-8 can encode"
    DUPLICATE_NAME = "duplicate_name", "a layer name occurs twice"
    BAD_SHAPE = "bad_shape", "a shape is not a list of non-negative integers, or has more than 2^63 - 1 elements"
    COUNT_MISMATCH = "count_mismatch", "changed, total or density is not what the payload or the state holds"

    # Payload
    BAD_HEADER = "bad_header", "the safetensors header is malformed or does not describe the bytes of the file"
    KEYS_MISMATCH = "keys_mismatch", "the payload's tensors or layer names are not those that the metadata declares"
    BAD_INDICES = "bad_indices", "indices are not one-dimensional I32 or I64"
    BAD_VALUES = "bad_values", "values are not one-dimensional"
    INDEX_ORDER = "index_order", "indices are not strictly increasing"
    INDEX_RANGE = "index_range", "an index is negative or at least the number of elements"
    LENGTH_MISMATCH = "length_mismatch", "indices and values differ in length"
    UNSUPPORTED_DTYPE = "unsupported_dtype", "a dtype that the format has not, or not without an extension"
    PAYLOAD_MISMATCH = "payload_mismatch", "the payload's SHA-256 is not that of the lineage"

    # State
    UNKNOWN_TENSOR = "unknown_tensor", "a name that the other side does not hold"
    SHAPE_MISMATCH = "shape_mismatch", "shapes of one tensor differ between the two sides"
    DTYPE_MISMATCH = "dtype_mismatch", "dtypes of one tensor differ between the two sides"
    ALIAS_CONFLICT = "alias_conflict", "memory is shared, and not everything that shares it states the change"
    UNSUPPORTED_TENSOR = "unsupported_tensor", "a tensor that does not hold its own elements, or not all of them"
    BASE_MISMATCH = "base_mismatch", "the state, or the delta before, is not what the delta starts from"
    DIGEST_MISMATCH = "digest_mismatch", "a digest does not fit the state that it is said to describe"
    INCOMPLETE = "incomplete", "parts that are not a whole update: missing, repeated, overlapping or of another update"
    WRITE_FAILED = "write_failed", "a write failed; what was written has been undone unless the detail says otherwise"

    # Engine
    UNMAPPED = "unmapped", "a checkpoint tensor has no place in the engine's layout"
    UNATTESTED = "unattested", "a parameter of the engine was not proven to hold what the layout map says"
    UNSUPPORTED_ENGINE = "unsupported_engine", "a configuration of the engine that was not proven"
    NO_SESSION = "no_session", "an update step without an open update session"
    RANK_FAILED = "rank_failed", "another rank refused or failed"
    RANK_DISAGREEMENT = "rank_disagreement", "ranks hold different sessions or payloads"
    FENCED = "fenced", "the engine takes no updates any more, or none of this sender"
    BAD_ANSWER = "bad_answer", "an engine did not answer a call, or not as the call has to be answered"
    BAD_OPTION = "bad_option", "an option or argument that is unknown or has an illegal value"


_ERROR_TEXT = re.compile(r'refdelta\[(?P<reason>[a-z_]+)\](?: tensor=(?P<tensor>[^\s:"\\]*))?: (?P<detail>[^"\\\r\n]*)')
# Printable ASCII without '"', '\' and '%': what JSON, HTTP bodies and tracebacks carry unchanged.
_DETAIL_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) not in '"\\%')
_NAME_SAFE = "/[]@+,=!$&*()~"


class DeltaError(ValueError):
    """A refusal: what, why, and of which tensor.

    ``str(error)`` is ``refdelta[<reason>] tensor=<name>: <detail>``, without the tensor part where there is no tensor.
    It is one line of printable ASCII without ``"`` and ``\\``: other characters are percent-encoded as in URLs (in
    names also spaces and colons), so that the text survives JSON, HTTP and process boundaries, and `parse` restores it.
    """

    reason: Reason
    detail: str
    tensor: str | None

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
        """The first error in ``text`` (a traceback, an HTTP body, plain or JSON-escaped once), or None."""
        for match in _ERROR_TEXT.finditer(text):
            if match["reason"] in Reason.__members__.values():
                name = match["tensor"]
                return cls(
                    Reason(match["reason"]),
                    unquote(match["detail"], errors="surrogatepass"),
                    None if name is None else unquote(name, errors="surrogatepass"),
                )
        return None


def is_int(value: object) -> bool:
    """Whether ``value`` is an integer; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_argument(name: str, value: object, types: type | tuple[type, ...], expected: str) -> None:
    """Raise `DeltaError` (bad_option), which says what was expected and found, unless ``value`` is of ``types``."""
    if not isinstance(value, types):
        found = type(value).__name__ + (f" {_brief(value)}" if isinstance(value, str | int | float) else "")
        raise DeltaError(Reason.BAD_OPTION, f"{name}: expected {expected}, found {found}")


def check_delta(value: object, name: str = "delta") -> None:
    """Raise `DeltaError` (bad_option) unless ``value`` is a `Delta`."""
    check_argument(name, value, Delta, "a Delta, as read_delta and diff give one")


def check_path(name: str, value: object) -> None:
    """Raise `DeltaError` (bad_option) unless ``value`` is a path: a text or an `os.PathLike`."""
    check_argument(name, value, (str, PathLike), "a path")


def check_name(name: object) -> str:
    """``name`` if it is a non-empty text that UTF-8 can encode, else `DeltaError` (bad_name)."""
    if not isinstance(name, str) or not name:
        raise DeltaError(Reason.BAD_NAME, f"expected a non-empty text, found {_brief(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise DeltaError(Reason.BAD_NAME, "the name has a lone surrogate", name) from None
    return name


def check_shape(shape: object, tensor: str | None = None) -> tuple[int, ...]:
    """``shape`` as a tuple if it is a sequence of non-negative integers below 2^63 in product, else bad_shape."""
    if not isinstance(shape, list | tuple) or not all(is_int(size) and size >= 0 for size in shape):
        raise DeltaError(Reason.BAD_SHAPE, f"expected non-negative integers, found {_brief(shape)}", tensor)
    if any(size > MAX_ELEMENTS for size in shape) or count_elements(shape) > MAX_ELEMENTS:
        raise DeltaError(Reason.BAD_SHAPE, f"more than 2^63 - 1 elements: {_brief(shape)}", tensor)
    return tuple(shape)


def count_elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape; beyond `MAX_ELEMENTS` some number beyond, found without multiplying on."""
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > MAX_ELEMENTS:
            break
    return count


def check_plain(tensor: Tensor, name: str | None = None) -> Tensor:
    """``tensor`` if it holds its own elements (`refdelta.plain`), else `DeltaError` (unsupported_tensor)."""
    if (hindrance := obstacle(tensor)) is not None:
        raise DeltaError(Reason.UNSUPPORTED_TENSOR, hindrance, name)
    return tensor


def check_extra(extra: Mapping[str, object]) -> Mapping[str, object]:
    """``extra`` if its keys are not the format's and the known ones have the right type, else bad_metadata."""
    for key, value in extra.items():
        if not isinstance(key, str) or key in FORMAT_KEYS:
            raise DeltaError(Reason.BAD_METADATA, f"extra: {_brief(key)} is not a text or is a key of the format")
        if key in _TEXT_KEYS and not isinstance(value, str | None):
            raise DeltaError(Reason.BAD_METADATA, f"{key}: expected a text, found {_brief(value)}")
    stamp = extra.get("timestamp")
    if isinstance(stamp, bool) or not isinstance(stamp, int | float | None):
        raise DeltaError(Reason.BAD_METADATA, f"timestamp: expected a number, found {_brief(stamp)}")
    return extra


def index_dtype(numel: int) -> torch.dtype:
    """The dtype of the indices that a writer gives a tensor of ``numel`` elements."""
    return torch.int32 if numel <= I32_MAX_ELEMENTS else torch.int64


def density_pct(changed: int, total: int) -> float:
    """100 * changed / total, in percent, to 3 decimals; 0.0 of nothing. The exact quotient is rounded, half to even."""
    return float(round(Fraction(100 * changed, total), 3)) if total else 0.0


def is_density_pct(found: object, changed: int, total: int) -> bool:
    """Whether ``found`` is the density to 3 decimals; half way between two of them either will do."""
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= 100:
        return False
    exact = 100 * changed / total if total else 0.0
    return round(found, 3) == found and abs(found - exact) <= 0.0005 + 1e-9


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True, slots=True, eq=False)
class TensorPatch:
    """The change of one tensor. Everything but the order and range of the positions is checked on construction;
    `check_indices` does those, at the cost of the change."""

    name: str
    """Name in the checkpoint's safetensors files."""
    shape: tuple[int, ...]
    """Shape of the whole tensor; ``()`` for a scalar, which has one element."""
    indices: Tensor
    """[changed], int32 or int64: strictly increasing flat row-major positions in ``shape``, each in [0, numel)."""
    values: Tensor
    """[changed], the tensor's dtype: what the positions hold afterwards."""

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
        """Changed share of this tensor, in percent."""
        return density_pct(self.changed, self.numel)

    @property
    def payload_bytes(self) -> int:
        """Bytes of indices and values as they are held."""
        return self.changed * (self.indices.dtype.itemsize + self.values.dtype.itemsize)

    def to(self, device: str | torch.device) -> TensorPatch:
        """The same patch with its tensors on ``device``."""
        return TensorPatch(self.name, self.shape, self.indices.to(device), self.values.to(device))

    def check_indices(self) -> None:
        """Raise `DeltaError` unless positions are strictly increasing and in [0, numel). O(changed)."""
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
    """Where a delta stands in a run: refdelta's own part of the metadata, which other v2 readers ignore."""

    run_id: str
    """Names the run; versions of different runs are never compared."""
    version: int
    """Version of the state after the delta, >= 0."""
    base_version: int | None = None
    """Version of the state before the delta, >= 0."""
    base_digest: str | None = None
    """State digest before the delta."""
    digest: str | None = None
    """State digest after the delta."""
    layer_digests: Mapping[str, str] | None = None
    """Layer name -> digest of that tensor after the delta."""
    payload_sha256: str | None = None
    """SHA-256 of the bytes of ``delta.safetensors``, 64 lower-case hexadecimal digits; set by `write_delta`."""
    part: tuple[int, int] | None = None
    """(i, n), 0 <= i < n, when one update comes in n directories."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Keys that this version does not know; kept."""

    def __post_init__(self) -> None:
        _field("run_id", self.run_id, isinstance(self.run_id, str) and bool(self.run_id), "a non-empty text")
        _field("version", self.version, _is_version(self.version), "an integer >= 0")
        base = self.base_version
        _field("base_version", base, base is None or _is_version(base), "an integer >= 0")
        for name in ("base_digest", "digest"):
            value = getattr(self, name)
            _field(name, value, value is None or isinstance(value, str), "a text")
        layers = self.layer_digests
        _field("layer_digests", layers, layers is None or _is_text_map(layers), "texts by layer name")
        sha = self.payload_sha256
        _field("payload_sha256", sha, sha is None or _is_sha256(sha), "64 lower-case hexadecimal digits")
        part = self.part
        _field("part", part, part is None or _is_part(part), "[i, n] with 0 <= i < n")

    @property
    def is_partial(self) -> bool:
        """Whether the delta is one part of several."""
        return self.part is not None and self.part[1] > 1

    @property
    def base_name(self) -> str:
        """The state before the delta, for messages."""
        version = "no stated version" if self.base_version is None else f"version {self.base_version}"
        return f"{version} of run {self.run_id}, {self.base_digest or 'no stated digest'}"

    @classmethod
    def from_json(cls, value: object) -> Lineage:
        """The lineage in a JSON value; `DeltaError` (bad_metadata) unless it is an object with the right types."""
        if not isinstance(value, Mapping):
            raise DeltaError(Reason.BAD_METADATA, f"lineage: expected an object, found {_brief(value)}")
        known: dict[str, Any] = {name: value.get(name) for name in _LINEAGE_FIELDS}
        if isinstance(known["part"], list):
            known["part"] = tuple(known["part"])
        return cls(**known, extra={k: v for k, v in value.items() if k not in _LINEAGE_FIELDS})

    def to_json(self) -> dict[str, object]:
        """The JSON object: fields that are None are absent."""
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
        raise DeltaError(Reason.BAD_METADATA, f"lineage.{name}: expected {expected}, found {_brief(value)}")


def _is_version(value: object) -> bool:
    return isinstance(value, int) and is_int(value) and value >= 0


def _is_text_map(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(x, str) for item in value.items() for x in item)


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_part(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(is_int, value)) and 0 <= value[0] < value[1]


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """The change of a whole state."""

    patches: tuple[TensorPatch, ...]
    """One patch per changed tensor; names are unique."""
    total_elements: int
    """Elements of every tracked tensor, changed or not; at least those of the patched ones."""
    lineage: Lineage | None = None
    """Where the delta stands in a run, if it says so."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Other metadata by key: base_model, model_id, kind, created_at, timestamp, and keys that nobody here knows."""

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
            expected, found = f"an integer from {least} to 2^63 - 1", _brief(self.total_elements)
            raise DeltaError(Reason.COUNT_MISMATCH, f"total_elements: expected {expected}, found {found}")

    @property
    def changed_elements(self) -> int:
        """Number of positions over all patches."""
        return sum(patch.changed for patch in self.patches)

    @property
    def density_pct(self) -> float:
        """100 * changed / total, rounded to 3 decimals."""
        return density_pct(self.changed_elements, self.total_elements)

    @property
    def payload_bytes(self) -> int:
        """Bytes of all indices and values, without the safetensors header."""
        return sum(patch.payload_bytes for patch in self.patches)


# Invariants. Each check takes states, deltas and, where it needs a codec, the codec's functions, and raises
# AssertionError with its finding. `State` is name -> tensor; `Apply` writes a delta into a state in place.

State = Mapping[str, Tensor]
Apply = Callable[[Delta, MutableMapping[str, Tensor]], Any]


class Routed(Protocol):
    """One routed write: 1-D int64 flat row-major ``indices`` into parameter ``param``, and as many ``values``."""

    @property
    def param(self) -> str: ...
    @property
    def indices(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...


class Router(Protocol):
    """What `check_routes` needs of a layout map."""

    def route(self, patch: TensorPatch, /) -> Iterable[Routed]: ...


def raw_bytes(tensor: Tensor) -> Tensor:
    """[numel * itemsize] uint8: a copy of the elements' bytes in logical row-major order, on the CPU."""
    detached = check_plain(tensor).detach().resolve_conj().resolve_neg()
    return detached.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def elements(tensor: Tensor) -> Tensor:
    """[numel, itemsize] uint8: a copy of the elements' bytes, one row each."""
    return raw_bytes(tensor).reshape(tensor.numel(), tensor.dtype.itemsize)


def copy_state(state: State) -> dict[str, Tensor]:
    """A contiguous copy of every tensor, on the CPU."""
    return {name: raw_bytes(check_plain(t, name)).view(t.dtype).reshape(t.shape) for name, t in state.items()}


def differing_positions(a: Tensor, b: Tensor) -> list[int]:
    """Flat row-major positions at which the bits differ."""
    return [int(i) for i in (elements(a) != elements(b)).any(dim=1).nonzero().reshape(-1)]


def assert_same_state(found: State, expected: State, what: str) -> None:
    """Raise AssertionError unless names, shapes, dtypes and bits are equal."""
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
    """``apply(delta, base)`` gives ``target``."""
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
    """``delta`` holds exactly the positions whose bits differ."""
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
    """``data``, the bytes of delta.safetensors, are the canonical ones of ``delta``."""
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
    """Upper bound of the bytes of delta.safetensors that are not payload: 64 + 256 per layer + twice its JSON name.

    Two header entries take at most 120 and 127 bytes, with six digits for the layer's number (a header of 100 MB holds
    no more layers) and nineteen for all others. A name stands in a JSON text inside a JSON text, which at most doubles
    it, with a comma. The rest is the length field, ``__metadata__`` and padding: at most 52 bytes.
    """
    return 64 + sum(256 + 2 * len(_compact(patch.name).encode()) for patch in delta.patches)


def check_density_bound(delta: Delta, file_bytes: int) -> None:
    """Payload bytes follow from the change alone, and delta.safetensors has at most `header_bound` bytes more."""
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
    """Counts in ``metadata`` (content of metadata.json) are those of the payload, and of the whole state if given."""
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
    """What ``apply`` returns restores ``base``."""
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
    """Routing ``patch`` and writing equals writing it into ``base`` and laying out densely, for every rank's layout.

    ``lay_out(layout, state)`` gives one rank's runtime parameters for a checkpoint state, computed densely.
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
    """``attempt()`` raises `DeltaError` (of ``reason``, if given) and leaves ``state`` as it was; returns the error."""
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
    """A promise of the format or of the codec."""

    id: str
    """Stable; cited by tests, reports and docs."""
    statement: str
    """The promise, an absolute sentence."""
    check: Callable[..., Any]
    """Raises AssertionError with the finding where the promise is broken; see the function for its arguments."""


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
"""Every invariant by id."""
