"""Codecs under test: the protocol, the capabilities, refdelta's own codec, and how one is loaded by name.

The smallest codec that can be validated has a `name`, a set of `capabilities` (which may be empty), `encode` and
`apply`. Each capability adds checks; an engine without it skips them, and the matrix prints the capability.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from conformance.layouts import Layout, Piece

if TYPE_CHECKING:
    from refdelta.layout_map import LayoutMap, Region

CAPABILITIES: Mapping[str, str] = {
    "non_floating": "integer, bool and complex tensors",
    "sub_byte": "F4 tensors, an element being a pair of values (one byte), as in torch",
    "large": "tensors of more than 2^31 elements, with I64 positions",
    "strided": "encode takes views that are not contiguous, in logical row-major order",
    "in_place": "apply writes through the tensors that it is given, strided views included, and replaces none of them",
    "canonical": "delta.safetensors has exactly the bytes that the format prescribes",
    "reasons": "a refusal carries the format's reason code as `reason` of the exception",
    "inverts": "invert(delta, weights, out): apply, and write the inverse delta",
    "composes": "compose(deltas, out): write one delta that equals several applied in order",
    "digests": "digest(weights): the state digest `rd1` of a state",
    "lineage": "follow(delta, weights, digest): apply to the state of this digest, or refuse; return the one after",
    "routes": "route(layout, name, indices, values): a patch in the coordinates of one rank's parameters",
}
"""Everything that an engine may offer beyond the protocol: id -> what it promises."""

_METHODS = {
    "inverts": "invert",
    "composes": "compose",
    "digests": "digest",
    "lineage": "follow",
    "routes": "route",
}


class Codec(Protocol):
    """What every engine offers."""

    name: str
    """Shown in the matrix."""
    capabilities: frozenset[str]
    """Keys of CAPABILITIES."""

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        """Write the delta from `base` to `target` into the directory `out`, which does not exist yet."""

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        """Apply the delta directory to `weights` in place; refuse by raising, with nothing changed."""


class FullCodec(Codec, Protocol):
    """The methods behind the capabilities."""

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        """Apply as `apply` does, and write the inverse delta into the directory `out`."""

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        """Write into `out` one delta that does what `deltas` do when applied in this order."""

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        """The state digest as text, `rd1:` and sixteen hexadecimal digits."""

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        """Apply as `apply` does to weights whose state digest is `digest`, and return the one after.

        Refuse by raising, with nothing changed, a delta whose lineage states another base digest, or a digest that the
        change does not lead to, another SHA-256 of the payload, or that it is one part of several.
        """

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        """Where the change of checkpoint tensor `name` goes: parameter, I64 flat row-major positions in it, values.

        indices: I64, ascending, flat row-major in `layout.sources[name]`; values: as many, of any dtype.
        """


class Reference:
    """refdelta's own codec, and its layout map."""

    name = "reference"
    capabilities = frozenset(CAPABILITIES)

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        from refdelta.encode import diff, write_delta

        write_delta(diff(base, target), out)

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        from refdelta.apply import apply_delta, read_delta

        apply_delta(read_delta(delta), weights)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        from refdelta.apply import apply_delta, read_delta
        from refdelta.encode import write_delta

        write_delta(apply_delta(read_delta(delta), weights), out)

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        from refdelta.apply import compose, read_delta
        from refdelta.encode import write_delta

        write_delta(compose([read_delta(delta) for delta in deltas]), out)

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        from refdelta.digest import state_digest

        return state_digest(weights)

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        from refdelta.apply import apply_delta, read_delta

        lineage = apply_delta(read_delta(delta), weights, digest=digest).lineage
        assert lineage is not None, "an inverse that was made with a digest states digests"
        return str(lineage.base_digest)

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        from refdelta.spec import TensorPatch

        patch = TensorPatch(name=name, shape=layout.sources[name], indices=indices, values=values)
        return [(r.param, r.indices, r.values) for r in _layout_map(layout, values).route(patch)]


def _layout_map(layout: Layout, values: Tensor) -> LayoutMap:
    """The suite's slices as refdelta's strided boxes."""
    from refdelta.layout_map import LayoutMap, TensorInfo

    return LayoutMap(
        sources={name: TensorInfo(shape, values.dtype) for name, shape in layout.sources.items()},
        params={name: TensorInfo(shape, values.dtype) for name, shape in layout.params.items()},
        regions=tuple(_region(layout, piece) for piece in layout.pieces),
        dropped=dict.fromkeys(layout.dropped, "the layout drops it"),
    )


def _region(layout: Layout, piece: Piece) -> Region:
    from refdelta.layout_map import Box, Region

    taken = _row_major(layout.sources[piece.source])
    placed = _row_major(layout.params[piece.param])
    strides = [0] * len(piece.sizes)
    for axis, stride in zip(piece.order, placed[len(placed) - len(piece.sizes) :], strict=True):
        strides[axis] = stride
    source_offset = sum(first * stride for (first, _), stride in zip(piece.taken, taken, strict=True))
    param_offset = sum(first * stride for first, stride in zip(piece.start, placed, strict=True))
    return Region(
        piece.source,
        Box(source_offset, piece.sizes, taken),
        piece.param,
        Box(param_offset, piece.sizes, tuple(strides)),
    )


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Element strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


class BadEngine(ValueError):
    """A name that gives no engine, or an engine that is none; the text is one sentence."""


def load(name: str, directory: Path | None = None) -> FullCodec:
    """The codec of this name: `reference`, or `package.module:Object` (an object, or a class made without arguments).

    directory: searched last for the package, as the current directory is by `python -m`. Raises BadEngine.
    """
    engine = Reference() if name == "reference" else _load_object(name, directory)
    label = f"Engine {name!r}"
    methods = (
        "encode",
        "apply",
        *(m for capability, m in _METHODS.items() if capability in _capabilities(engine, label)),
    )
    missing = [method for method in methods if not callable(getattr(engine, method, None))]
    if missing or not isinstance(getattr(engine, "name", None), str):
        raise BadEngine(f"{label} lacks {', '.join(missing) or 'a name'}.")
    return cast(FullCodec, engine)


def _capabilities(engine: object, label: str) -> frozenset[str]:
    declared = getattr(engine, "capabilities", None)
    if not isinstance(declared, frozenset | set):
        raise BadEngine(f"{label} has no set `capabilities`; an empty one will do.")
    unknown = sorted(declared - CAPABILITIES.keys())
    if unknown:
        raise BadEngine(f"{label} declares unknown capabilities {unknown}; known are {sorted(CAPABILITIES)}.")
    return frozenset(declared)


def _load_object(name: str, directory: Path | None) -> object:
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise BadEngine(f"Engine {name!r} is none of reference, vllm and package.module:Object.")
    if directory is not None and str(directory) not in sys.path:
        sys.path.append(str(directory))
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        raise BadEngine(f"Engine {name!r}: cannot import {module_name}: {type(error).__name__}: {error}.") from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise BadEngine(f"Engine {name!r}: {module_name} has no {path}.")
    return found() if isinstance(found, type) else found
