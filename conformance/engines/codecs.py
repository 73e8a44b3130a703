"""Codecs under test: the protocol, refdelta's own codec, and how one is loaded by name.

The smallest codec that can be validated has a `name`, a set of `capabilities` (which may be empty), `encode` and
`apply`. Each capability (`conformance.engines.capabilities`) adds checks; an engine without it skips them, and
the matrix says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from torch import Tensor

from ..findings import EngineFailed, InfrastructureFailed
from ..oracle.layouts import Layout, Piece
from . import capabilities
from .capabilities import CODEC
from .program import TIMEOUT, Program

if TYPE_CHECKING:
    from refdelta.layout_map import LayoutMap, Region

CAPABILITIES: Mapping[str, str] = {name: found.promise for name, found in capabilities.of_kind(CODEC).items()}
"""Everything that a codec in Python may offer beyond the protocol: id -> what it promises."""


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
    capabilities = frozenset(CAPABILITIES) - {"new_tensors"}

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
    """A name that leads to no engine, or an object that is not an engine; the message is one sentence."""


class CannotStart(BadEngine):
    """A module that cannot be imported, or a program that cannot be run: nothing is known of the engine."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How an engine is to be loaded."""

    directory: Path | None = None
    """Searched last for a package, as the current directory is by `python -m`."""
    declared: frozenset[str] | None = None
    """Capabilities by `--capabilities`, instead of what the engine declares itself."""
    timeout: float = TIMEOUT
    """Seconds that one call of a program may take."""


PROGRAM_PREFIX = "exec:"


def load(name: str, how: Loading | None = None) -> FullCodec:
    """The codec of this name: `reference`, `exec:COMMAND`, or `package.module:Object` (or a class of no arguments).

    Raises BadEngine, or CannotStart where what it names does not run at all.
    """
    how = how or Loading()
    if name.startswith(PROGRAM_PREFIX):
        return _load_program(name, how)
    engine = Reference() if name == "reference" else _load_object(name, how.directory)
    label = f"Engine {name!r}"
    offered = _capabilities(engine, label, how.declared)
    needed = (capabilities.BY_ID[capability].method for capability in sorted(offered))
    methods = ("encode", "apply", *filter(None, needed))
    missing = [method for method in methods if not callable(getattr(engine, method, None))]
    if missing or not isinstance(getattr(engine, "name", None), str):
        raise BadEngine(f"{label} lacks {', '.join(missing) or 'a name'}.")
    codec = cast(FullCodec, engine)
    return codec if offered == codec.capabilities else cast(FullCodec, Declaring(codec, offered))


class Declaring:
    """An engine under other capabilities than its own."""

    def __init__(self, engine: FullCodec, offered: frozenset[str]) -> None:
        self._engine = engine
        self.capabilities = offered

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def _capabilities(engine: object, label: str, instead: frozenset[str] | None) -> frozenset[str]:
    declared = getattr(engine, "capabilities", None) if instead is None else instead
    if not isinstance(declared, frozenset | set):
        raise BadEngine(f"{label} has no set `capabilities`; an empty one will do.")
    try:
        return capabilities.checked(declared, CODEC, label)
    except capabilities.UnknownCapability as error:
        raise BadEngine(str(error)) from error


def _load_program(name: str, how: Loading) -> FullCodec:
    try:
        program = Program.of(name.removeprefix(PROGRAM_PREFIX), how.timeout, how.declared)
    except capabilities.UnknownCapability as error:
        raise BadEngine(str(error)) from error
    except InfrastructureFailed as error:
        raise CannotStart(str(error)) from error
    except (EngineFailed, ValueError) as error:
        raise BadEngine(str(error)) from error
    return cast(FullCodec, program)


def _load_object(name: str, directory: Path | None) -> object:
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise BadEngine(f"Engine {name!r} is not one of reference, vllm, package.module:Object and exec:COMMAND.")
    if directory is not None and str(directory) not in sys.path:
        sys.path.append(str(directory))
    with _without_bytecode():
        try:
            found: object = importlib.import_module(module_name)
        except Exception as error:
            text = f"Engine {name!r}: cannot import {module_name}: {type(error).__name__}: {error}."
            raise CannotStart(text) from error
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise BadEngine(f"Engine {name!r}: {module_name} has no {path}.")
        return found() if isinstance(found, type) else found


@contextmanager
def _without_bytecode() -> Iterator[None]:
    """An adopter's module may lie in the working directory, where nothing is to be written."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
