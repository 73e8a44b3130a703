"""Regions of several blocks of the real size, and block digests that go wrong from a size on, each of which is seen.

The others are tested with small blocks (`test_shares`); here a block has its 2^18 elements, and what is right below a
boundary and wrong from there on fails one of three checks: where a position's block is, what a block's digest is, and
that rolled digests are the measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.inputs import sizes
from conformance.oracle import CODES, bits, digests
from refdelta.codec import digests as refdelta_digests
from refdelta.encode import diff
from refdelta.layout_map import Box, LayoutMap, Region, TensorInfo
from refdelta.vllm.proof.attest import Attestation
from refdelta.vllm.proof.memory import Memory
from refdelta.vllm.update import updating
from refdelta.vllm.update.block_digests import BLOCK, BlockDigests, boxes_by_source, ownership
from refdelta.vllm.update.proven_layout import Piece, ProvenLayout
from refdelta.vllm.update.updating import DeltaUpdate
from tests.engine.modules import module_of

ROWS, COLUMNS, CUT = 1031, 769, 300
LINE = 2 * BLOCK + 5
SOURCES = {"run": (ROWS, COLUMNS), "cut": (ROWS, COLUMNS), "line": (LINE,)}
PARAMS = {"run": (ROWS, COLUMNS), "left": (ROWS, CUT), "right": (ROWS, COLUMNS - CUT), "line": (LINE,)}


def _layout() -> LayoutMap:
    """Four blocks in a run, two in each of two column slices, two and five elements in a line."""
    whole = Box(0, (ROWS, COLUMNS), (COLUMNS, 1))
    right = COLUMNS - CUT
    return LayoutMap(
        sources={name: TensorInfo(shape, torch.bfloat16) for name, shape in SOURCES.items()},
        params={name: TensorInfo(shape, torch.bfloat16) for name, shape in PARAMS.items()},
        regions=(
            Region("run", whole, "run", whole),
            Region("cut", Box(0, (ROWS, CUT), (COLUMNS, 1)), "left", Box(0, (ROWS, CUT), (CUT, 1))),
            Region("cut", Box(CUT, (ROWS, right), (COLUMNS, 1)), "right", Box(0, (ROWS, right), (right, 1))),
            Region("line", Box(0, (LINE,), (1,)), "line", Box(0, (LINE,), (1,))),
        ),
    )


def _state(turn: int) -> dict[str, Tensor]:
    """The state before and the one after; every boundary of a block is changed on both sides."""
    found = {}
    for name, shape in SOURCES.items():
        rng = np.random.default_rng([len(name), len(shape)])
        size = int(np.prod(shape))
        edges = np.arange(0, size, BLOCK // 4)
        at = np.unique(np.concatenate([sizes.spots(size, rng), edges, edges[1:] - 1]))
        found[name] = sizes.changed(shape, "BF16", at, rng)[turn]
    return found


def _live(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    left, right = state["cut"][:, :CUT].contiguous(), state["cut"][:, CUT:].contiguous()
    return {"run": state["run"].clone(), "left": left, "right": right, "line": state["line"].clone()}


@dataclass
class Held:
    """One rank with its blocks measured."""

    live: dict[str, Tensor]
    blocks: BlockDigests
    proven: ProvenLayout

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Held:
        layout, live = _layout(), _live(state)
        empty = BlockDigests.of(layout, {}, ownership(layout, [boxes_by_source(layout)], 0))
        memory = {name: Memory.of(tensor) for name, tensor in live.items()}
        proven = ProvenLayout(layout, Attestation(module_of(live), memory, {}), {})
        return cls(live, empty.with_values(empty.measured(live)), proven)


def _positions(blocks: BlockDigests, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The checkpoint positions of a block, in its order, from its box alone."""
    box = blocks.blocks[number].source_box
    axes = [np.arange(size) * stride for size, stride in zip(box.shape, box.strides, strict=True)]
    return np.asarray(box.offset + sum(np.ix_(*axes))).reshape(-1)


def check_block_of(held: Held) -> None:
    """Every element of every block, by the number of its block."""
    for number, block in enumerate(held.blocks.blocks):
        found = held.blocks.block_of(block.region, torch.from_numpy(_positions(held.blocks, number)))
        assert bool((found == number).all()), f"block {number} of {block.source}"


def check_measured(held: Held, state: Mapping[str, Tensor]) -> None:
    """The digest of every block, by the suite's own definition."""
    for number, block in enumerate(held.blocks.blocks):
        tensor = state[block.source]
        seed, _ = digests.seed_and_header(block.source, CODES[tensor.dtype], tuple(tensor.shape))
        at = _positions(held.blocks, number)
        terms = digests.mix64(digests.key(seed, at.astype(np.uint64)) ^ bits(tensor)[at].astype(np.uint64))
        found = int(held.blocks.values[number]) % digests.WORDS
        assert found == int(terms.sum(dtype=np.uint64)), f"digest of block {number} of {block.source}"


def check_rolled(held: Held, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """After an update the weights are the new ones, rolled digests the measured ones; undone, the old ones."""
    made = DeltaUpdate.of(diff(before, after), held.proven, held.blocks, repeated=False)
    made.prepare()
    made.write()
    assert all(torch.equal(held.live[name], tensor) for name, tensor in _live(after).items()), "written"
    rolled = made.block_digests()
    assert torch.equal(rolled.values, rolled.measured(held.live)), "rolled digests"
    moved = (rolled.values != held.blocks.values).nonzero().flatten().tolist()
    assert moved == made.touched() == list(range(len(held.blocks.blocks))), "touched blocks"
    made.undo()
    assert all(torch.equal(held.live[name], tensor) for name, tensor in _live(before).items()), "undone"


def check_all() -> None:
    before, after = _state(0), _state(1)
    held = Held.of(before)
    check_block_of(held)
    check_measured(held, before)
    check_rolled(held, before, after)


def test_blocks_of_the_real_size() -> None:
    check_all()
    blocks = Held.of(_state(0)).blocks
    counts = [blocks.first[n + 1] - blocks.first[n] for n in range(4)]
    assert counts == [4, 2, 2, 3]
    assert blocks.blocks[-1].source_box.numel == 5


# -- what goes wrong from a size on ------------------------------------------------------------------------------------

Broken = Callable[[pytest.MonkeyPatch, int], None]


def _first_of_a_region(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """Positions beyond are counted in the first block of their region."""
    right = BlockDigests.block_of

    def block_of(self: BlockDigests, number: int, indices: Tensor) -> Tensor:
        return torch.where(indices < boundary, right(self, number, indices), self.first[number])

    patch.setattr(BlockDigests, "block_of", block_of)


def _unmeasured(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """Elements of a block beyond are not read."""
    right = BlockDigests.held

    def held(self: BlockDigests, live: Mapping[str, Tensor], block: object) -> Tensor:
        found = right(self, live, block).clone()  # type: ignore[arg-type]
        found.reshape(-1)[min(boundary, found.numel() - 1) :] = 0
        return found

    patch.setattr(BlockDigests, "held", held)


def _changed(patch: pytest.MonkeyPatch, keep: Callable[[Piece], Tensor]) -> None:
    right = updating._route

    def route(*arguments: object) -> list[Piece]:
        pieces = right(*arguments)  # type: ignore[arg-type]
        kept = [(piece, keep(piece)) for piece in pieces]
        return [Piece(p.region, p.positions[mask], p.param, p.indices[mask], p.values[mask]) for p, mask in kept]

    patch.setattr(updating, "_route", route)


def _positions_lost(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """Changes at positions beyond are lost."""
    _changed(patch, lambda piece: piece.indices < boundary)


def _last_chunk_lost(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """What lies in the last, short chunk of a parameter is lost."""
    sized = {name: int(np.prod(shape)) for name, shape in PARAMS.items()}
    _changed(patch, lambda piece: piece.indices < sized[piece.param] // boundary * boundary)


def _not_undone(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """Undoing writes back what lies below alone."""
    right, undoing = updating._put, [False]
    undo = DeltaUpdate.undo

    def put(tensor: Tensor, piece: Piece) -> None:
        mask = piece.indices < (boundary if undoing[0] else tensor.numel())
        right(
            tensor,
            Piece(piece.region, piece.positions[mask], piece.param, piece.indices[mask], piece.values[mask]),
        )

    def undone(self: DeltaUpdate) -> None:
        undoing[0] = True
        undo(self)

    patch.setattr(updating, "_put", put)
    patch.setattr(DeltaUpdate, "undo", undone)


def _terms_wrapped(patch: pytest.MonkeyPatch, boundary: int) -> None:
    """Rolling takes positions modulo the boundary."""
    right = refdelta_digests.terms_at
    patch.setattr(
        refdelta_digests, "terms_at", lambda name, dtype, shape, at, new: right(name, dtype, shape, at % boundary, new)
    )


_SMALL = (2**12, 2**16)
FAULTS: Mapping[Broken, tuple[int, ...]] = {
    _first_of_a_region: (BLOCK, 2 * BLOCK),
    _unmeasured: (*_SMALL, BLOCK - 1),
    _positions_lost: (*_SMALL, BLOCK, 2 * BLOCK),
    _last_chunk_lost: (*_SMALL, BLOCK, 2 * BLOCK),
    _not_undone: (*_SMALL, BLOCK, 2 * BLOCK),
    _terms_wrapped: (*_SMALL, BLOCK, 2 * BLOCK),
}
"""What goes wrong, and from which sizes on."""
CASES = [
    pytest.param(broken, boundary, id=f"{broken.__name__.strip('_')}-{sizes.power(boundary)}")
    for broken, boundaries in FAULTS.items()
    for boundary in boundaries
]


@pytest.mark.parametrize(("broken", "boundary"), CASES)
def test_what_goes_wrong_from_a_size_on_is_seen(broken: Broken, boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, boundary)
    with pytest.raises(AssertionError):
        check_all()
