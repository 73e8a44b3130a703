"""Engine layouts for the `routes` check, by hand: slices of checkpoint tensors in the parameters of one rank.

The truth is dense: `lay_out` copies whole slices of whole tensors with numpy. Nothing here knows of positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import Bits

Range = tuple[int, int]
"""First and one past the last, along one axis."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One slice of a checkpoint tensor and where it stands in a runtime parameter."""

    source: str
    """Checkpoint tensor."""
    taken: tuple[Range, ...]
    """What is taken of it, per axis."""
    param: str
    """Runtime parameter."""
    start: tuple[int, ...]
    """Where the slice begins in the parameter, per axis of the parameter; leading axes that it lacks have size 1."""
    axes: tuple[int, ...] | None = None
    """Axis i of the parameter is axis `axes[i]` of the slice; None: as they are."""

    @property
    def order(self) -> tuple[int, ...]:
        """`axes`, spelled out."""
        return self.axes if self.axes is not None else tuple(range(len(self.taken)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The slice's sizes, per axis of the checkpoint tensor."""
        return tuple(stop - start for start, stop in self.taken)


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank holds."""

    name: str
    sources: Mapping[str, tuple[int, ...]]
    """Checkpoint tensor -> shape."""
    params: Mapping[str, tuple[int, ...]]
    """Runtime parameter -> shape. What no piece covers is padding."""
    pieces: tuple[Piece, ...]
    dropped: frozenset[str] = frozenset()
    """Checkpoint tensors that the engine does not hold."""


def lay_out(layout: Layout, sources: Mapping[str, Bits], params: Mapping[str, Bits]) -> dict[str, Bits]:
    """The rank's parameters after loading `sources` densely over `params` (shaped arrays of bits); padding stays."""
    after = {name: array.copy() for name, array in params.items()}
    for piece in layout.pieces:
        cut = sources[piece.source][tuple(slice(*taken) for taken in piece.taken)].transpose(piece.order)
        cut = cut.reshape((1,) * (len(piece.start) - cut.ndim) + cut.shape)
        place = tuple(slice(first, first + size) for first, size in zip(piece.start, cut.shape, strict=True))
        after[piece.param][place] = cut
    return after


def _whole(shape: tuple[int, ...]) -> tuple[Range, ...]:
    return tuple((0, size) for size in shape)


def _rows(source: str, first: int, stop: int, columns: int, param: str, at: int) -> Piece:
    return Piece(source, ((first, stop), (0, columns)), param, (at, 0))


def fused_qkv(tp: int, rank: int) -> Layout:
    """q, k and v stacked in one parameter; 8 query and 2 kv heads of 4; kv heads replicated when tp > 2."""
    hidden, head, q_heads, kv_heads = 6, 4, 8, 2
    q, kv = q_heads * head // tp, max(1, kv_heads // tp) * head
    kv_first = (rank * kv_heads // tp) * head
    sources = {"q": (q_heads * head, hidden), "k": (kv_heads * head, hidden), "v": (kv_heads * head, hidden)}
    pieces = (
        _rows("q", rank * q, rank * q + q, hidden, "qkv", 0),
        _rows("k", kv_first, kv_first + kv, hidden, "qkv", q),
        _rows("v", kv_first, kv_first + kv, hidden, "qkv", q + kv),
    )
    return Layout(f"fused_qkv tp={tp} rank={rank}", sources, {"qkv": (q + 2 * kv, hidden)}, pieces)


def column_shard(tp: int, rank: int) -> Layout:
    """A column slice of one matrix, beside a norm that every rank holds whole."""
    rows, columns = 5, 12
    part = columns // tp
    taken = ((0, rows), (rank * part, (rank + 1) * part))
    pieces = (Piece("o", taken, "o", (0, 0)), Piece("norm", ((0, 7),), "norm", (0,)))
    return Layout(
        f"column_shard tp={tp} rank={rank}",
        {"o": (rows, columns), "norm": (7,)},
        {"o": (rows, part), "norm": (7,)},
        pieces,
    )


def padded_vocabulary(tp: int, rank: int) -> Layout:
    """A vocabulary of 13 rows padded to 16, sliced by rows: the last rank's padding is never written."""
    vocabulary, padded, hidden = 13, 16, 3
    part = padded // tp
    stop = min(vocabulary, (rank + 1) * part)
    pieces = (_rows("embed", rank * part, stop, hidden, "embed", 0),)
    return Layout(
        f"padded_vocabulary tp={tp} rank={rank}", {"embed": (vocabulary, hidden)}, {"embed": (part, hidden)}, pieces
    )


def shared_k(tp: int, rank: int) -> Layout:
    """One checkpoint tensor in two places (k is also v), one transposed, one dropped, and a scalar."""
    rows, columns = 4, 6
    part = rows // tp
    taken = ((rank * part, (rank + 1) * part), (0, columns))
    pieces = (
        Piece("k", taken, "kv", (0, 0)),
        Piece("k", taken, "kv", (part, 0)),
        Piece("t", _whole((3, 5)), "t", (0, 0), axes=(1, 0)),
        Piece("scale", (), "scale", ()),
    )
    sources = {"k": (rows, columns), "t": (3, 5), "scale": (), "gone": (2, 3)}
    params = {"kv": (2 * part, columns), "t": (5, 3), "scale": ()}
    return Layout(f"shared_k tp={tp} rank={rank}", sources, params, pieces, frozenset({"gone"}))


def stacked_experts(tp: int, rank: int) -> Layout:
    """gate and up of 3 experts, one tensor each, as halves of one 3-D parameter; down as column slices."""
    experts, inner, hidden = 3, 4, 5
    part = inner // tp
    first, stop = rank * part, (rank + 1) * part
    sources: dict[str, tuple[int, ...]] = {}
    pieces: list[Piece] = []
    for e in range(experts):
        sources |= {f"{e}.gate": (inner, hidden), f"{e}.up": (inner, hidden), f"{e}.down": (hidden, inner)}
        for half, name in enumerate(("gate", "up")):
            pieces.append(Piece(f"{e}.{name}", ((first, stop), (0, hidden)), "w13", (e, half * part, 0)))
        pieces.append(Piece(f"{e}.down", ((0, hidden), (first, stop)), "w2", (e, 0, 0)))
    params = {"w13": (experts, 2 * part, hidden), "w2": (experts, hidden, part)}
    return Layout(f"stacked_experts tp={tp} rank={rank}", sources, params, tuple(pieces))


LAYOUTS: tuple[Layout, ...] = tuple(
    make(tp, rank)
    for make, sizes in (
        (fused_qkv, (1, 2, 4)),
        (column_shard, (1, 2, 3)),
        (padded_vocabulary, (1, 2, 4)),
        (shared_k, (1, 2)),
        (stacked_experts, (1, 2)),
    )
    for tp in sizes
    for rank in range(tp)
)
"""Every layout, for every rank of every size."""
