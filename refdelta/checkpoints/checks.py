"""The invariants about whole states, checked on one run of a tensor at a time.

A run is a 1-D piece of a tensor, in the base, in the target or in both, with the delta's changes in that piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from refdelta.checkpoints.patching import part_in_run, write_run
from refdelta.codec import bits
from refdelta.codec.composition import compose
from refdelta.spec import Delta, TensorPatch

__all__ = ["CHECKS", "Check", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """A piece of one tensor. Where a state is not given, its piece is empty, and so is everything derived from it."""

    start: int
    """Position of the first element."""
    part: TensorPatch
    """The delta's positions in the run, numbered as in the tensor."""
    base: Tensor
    target: Tensor
    after: Tensor
    """``base`` with ``part`` written."""
    inverse: TensorPatch
    """What restores ``base`` from ``after``."""

    @classmethod
    def of(cls, patch: TensorPatch, start: int, base: Tensor | None, target: Tensor | None) -> Run:
        """At least one of ``base`` and ``target`` is given, [n] of the tensor's dtype."""
        given = target if base is None else base
        assert given is not None
        none, part = given[:0], part_in_run(patch, start, len(given))
        after = none if base is None else base.clone()
        old = part.values if base is None else write_run(part, start, after)
        inverse = TensorPatch(part.name, part.shape, part.indices, old)
        return cls(start, part, none if base is None else base, none if target is None else target, after, inverse)

    def with_written(self, run: Tensor, *patches: TensorPatch) -> Tensor:
        """A copy of ``run`` with patches written."""
        copy = run.clone()
        for patch in patches:
            write_run(patch, self.start, copy)
        return copy


@dataclass(frozen=True, slots=True)
class Check:
    """One check, on one run."""

    id: str
    """Id of an invariant, or ``holds_values``."""
    wrong: Callable[[Run], Tensor]
    """[n] integers: the places in the run where the check fails."""
    fault: str
    """The fault in words; the number of such places is put before it."""
    needs_base: bool = True
    needs_target: bool = False


def _differs_from_target(run: Run) -> Tensor:
    return bits.differing(run.after, run.target)


def _not_in_target(run: Run) -> Tensor:
    at = run.part.indices - run.start
    return at[bits.differing(bits.gather(run.target, at), run.part.values)]


def _changed_again(run: Run) -> Tensor:
    return bits.differing(run.with_written(run.after, run.part), run.after)


def _kept(run: Run) -> Tensor:
    same = bits.bit_view(run.inverse.values) == bits.bit_view(run.part.values)
    return (run.part.indices - run.start)[same]


def _not_restored(run: Run) -> Tensor:
    return bits.differing(run.with_written(run.after, run.inverse), run.base)


def _not_composed(run: Run) -> Tensor:
    there_and_back = compose(Delta((patch,), patch.numel) for patch in (run.part, run.inverse))
    return bits.differing(run.with_written(run.base, *there_and_back.patches), run.base)


def _encoded_otherwise(run: Run) -> Tensor:
    at = bits.differing(run.target, run.base)
    same = torch.equal(at + run.start, run.part.indices.long())
    return at[:0] if same and bits.equal(bits.gather(run.target, at), run.part.values) else torch.zeros(1)


CHECKS: Final = (
    Check("bit_exact", _differs_from_target, "elements of the base with the delta are not the target's", True, True),
    Check("holds_values", _not_in_target, "values are not the target's", False, True),
    Check("idempotent", _changed_again, "elements change when it is applied again"),
    Check("minimal", _kept, "positions keep the base's bits"),
    Check("deterministic", _encoded_otherwise, "runs of these states are encoded otherwise", True, True),
    Check("composes", _not_composed, "elements differ after the delta composed with its inverse"),
    Check("inverts", _not_restored, "elements are not restored by the inverse"),
)
"""Every check on runs."""
