"""Routers that are wrong about one rule of the layout each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..oracle.layouts import Layout, Piece
from .registry import codec_mutants
from .right import Plain

caught_by = codec_mutants("router")


@caught_by("routes", fault=39)
class SwapsKeyAndValue(Plain):
    """k lands where v belongs."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        other = {"k": "v", "v": "k"}.get(name, name) if "qkv" in layout.params else name
        return [replace(piece, source=name) for piece in layout.pieces if piece.source == other]


@caught_by("routes", fault=27)
class ServesFirstRankOnly(Plain):
    """Every rank gets the first one's slice."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        taken = [tuple((0, stop - start) for start, stop in piece.taken) for piece in layout.pieces]
        moved = [replace(piece, taken=cut) for piece, cut in zip(layout.pieces, taken, strict=True)]
        return [piece for piece in moved if piece.source == name]


@caught_by("routes", fault=24)
class ForgetsTheSecondPlace(Plain):
    """A tensor that stands in two places is written to the first."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        return list(super().pieces(layout, name))[:1]


@caught_by("routes", fault=26)
class ForgetsToTranspose(Plain):
    """Writes a transposed slice as it is read, clipped to the parameter."""

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        if any(piece.axes for piece in self.pieces(layout, name)):
            return [(piece.param, indices, values) for piece in self.pieces(layout, name)]
        return super().route(layout, name, indices, values)


@caught_by("routes", fault=25)
class CutsFusedEvenly(Plain):
    """Takes the sections of a fused tensor for equal thirds, clipped to what fits."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        found = super().pieces(layout, name)
        if name not in ("q", "k", "v"):
            return found
        at = "qkv".index(name) * (layout.params["qkv"][0] // 3)
        return [self._clipped(piece, at, layout.params["qkv"][0]) for piece in found]

    def _clipped(self, piece: Piece, at: int, rows: int) -> Piece:
        (first, stop), columns = piece.taken
        return replace(piece, start=(at, 0), taken=((first, min(stop, first + rows - at)), columns))


@caught_by("routes", fault=27)
class NumbersExpertsFromOne(Plain):
    """Every expert's change goes to the next one."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        found = super().pieces(layout, name)
        experts = {param: shape[0] for param, shape in layout.params.items() if len(shape) == 3}
        return [
            replace(p, start=((p.start[0] + 1) % experts[p.param], *p.start[1:])) if p.param in experts else p
            for p in found
        ]


@caught_by("routes", fault=28)
class SwapsGateAndUp(Plain):
    """The halves of a stacked parameter change places."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        expert, _, part = name.partition(".")
        other = {"gate": "up", "up": "gate"}.get(part)
        found = super().pieces(layout, f"{expert}.{other}" if other else name)
        return [replace(piece, source=name) for piece in found]


@caught_by("routes", fault=31)
class ForgetsVocabularyPadding(Plain):
    """Cuts the vocabulary as it is, not as it is padded: from the second rank on rows are off."""

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        found = super().pieces(layout, name)
        return [self._unpadded(layout, piece) for piece in found] if name == "embed" else found

    def _unpadded(self, layout: Layout, piece: Piece) -> Piece:
        vocabulary, part = layout.sources["embed"][0], layout.params["embed"][0]
        (first, stop), columns = piece.taken
        rank, ranks = first // part, -(-vocabulary // part)
        moved = rank * (vocabulary // ranks)
        return replace(piece, taken=((moved, moved + stop - first), columns))
