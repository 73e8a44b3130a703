"""A right codec on the suite's own oracle, without refdelta: what the broken ones are made from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import oracle
from ..engines.codecs import CAPABILITIES
from ..oracle import CODES, Patch, State, bits, digests, from_bits
from ..oracle.layouts import Layout, Piece


class Plain:
    """A correct codec: slow, and dense throughout."""

    name = "plain"
    capabilities = frozenset(CAPABILITIES) - {"large", "reasons", "new_tensors"}

    def find(self, base: State, target: State) -> Sequence[Patch]:
        """The patches that encode writes."""
        return oracle.expected_patches(base, target)

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        return oracle.total_elements(target)

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        what = [{name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} for state in (base, target)]
        if what[0] != what[1]:
            raise ValueError("base and target are states of different tensors")
        patches = self.find(base, target)
        self.check_target(out)
        oracle.write_delta(out, patches, self.total(target, patches))

    def check_target(self, out: Path) -> None:
        """Refuse a path where something is."""
        if os.path.lexists(out):
            raise FileExistsError(f"{out} exists")

    def read(self, delta: Path) -> Sequence[Patch]:
        """The patches of a delta; raises where anything is wrong with it."""
        return oracle.read_delta(delta).patches

    def check(self, patches: Sequence[Patch], weights: Mapping[str, Tensor]) -> None:
        for patch in patches:
            tensor = weights[patch.name]
            if (tuple(tensor.shape), CODES[tensor.dtype]) != (patch.shape, patch.code):
                raise ValueError(f"{patch.name}: {patch.code} {patch.shape} does not fit {tensor.dtype} {tensor.shape}")
            if any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(f"{patch.name}: several of its elements are one in memory")

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        """Write one patch through the tensor."""
        tensor = weights[patch.name]
        new = bits(tensor)
        new[patch.indices] = patch.bits
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        with torch.inference_mode():  # outside of it, what was made in it takes no writes
            tensor.detach().view(carrier).copy_(from_bits(new, patch.code, patch.shape).view(carrier))

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        patches = self.read(delta)
        self.check(patches, weights)
        for patch in patches:
            self.write(weights, patch)

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        patches = self.read(delta)
        inverse = [replace(patch, bits=bits(weights[patch.name])[patch.indices]) for patch in patches]
        self.apply(delta, weights)
        oracle.write_delta(out, inverse, oracle.total_elements(weights))

    def merge(self, earlier: dict[int, Any], later: dict[int, Any]) -> dict[int, Any]:
        """Bits by position, of two successive patches of one tensor."""
        return {**earlier, **later}

    def follows(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
        """Whether a delta of lineage `after` may come after one of lineage `before`."""
        known = [
            (before.get(old), after.get(new)) for old, new in (("version", "base_version"), ("digest", "base_digest"))
        ]
        links = [link for link in known if None not in link]
        return before.get("run_id") == after.get("run_id") and all(a == b for a, b in links) and bool(links)

    def span(self, deltas: Sequence[Path], names: Sequence[str]) -> dict[str, Any] | None:
        """The lineage of the whole range; `names` are the layers that it changes."""
        lineages = [lineage for delta in deltas if (lineage := oracle.read_lineage(delta))]
        if not lineages:
            return None
        layers: dict[str, str] = {}
        for lineage in lineages:
            layers |= lineage.get("layer_digests", {})
        first, last = lineages[0], lineages[-1]
        ends = {key: first.get(key) for key in ("base_version", "base_digest")}
        ends |= {key: last.get(key) for key in ("run_id", "version", "digest")}
        return {**ends, "layer_digests": {name: layers[name] for name in names if name in layers}}

    def check_chain(self, deltas: Sequence[Path]) -> None:
        for delta in deltas:
            if (oracle.read_lineage(delta) or {}).get("part") not in (None, [0, 1]):
                raise ValueError("one part of several")
        for before, after in pairwise(deltas):
            one, two = oracle.read_lineage(before), oracle.read_lineage(after)
            if (one is None) != (two is None) or (one and two and not self.follows(one, two)):
                raise ValueError(f"{two} does not follow {one}")
        raw = [oracle.read_delta(delta) for delta in deltas]
        seen: dict[str, tuple[object, ...]] = {}
        for patch in (patch for delta in raw for patch in delta.patches):
            if seen.setdefault(patch.name, (patch.shape, patch.code)) != (patch.shape, patch.code):
                raise ValueError(f"{patch.name} differs between the deltas")
        if len({delta.metadata["total_elements"] for delta in raw}) != 1:
            raise ValueError("the deltas are of different states")

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        self.check_chain(deltas)
        self.check_target(out)
        found: dict[str, tuple[Patch, dict[int, Any]]] = {}
        for patch in (patch for delta in deltas for patch in self.read(delta)):
            own = dict(zip(patch.indices.tolist(), patch.bits, strict=True))
            found[patch.name] = patch, self.merge(found[patch.name][1], own) if patch.name in found else own
        merged = [
            replace(patch, indices=np.array(sorted(new)), bits=np.array([new[at] for at in sorted(new)]))
            for _, (patch, new) in sorted(found.items())
            if new
        ]
        totals = [oracle.read_delta(delta).metadata["total_elements"] for delta in deltas]
        span = self.span(deltas, [patch.name for patch in merged])
        parts = oracle.draft(merged, totals[0])
        parts.metadata |= {"lineage": span} if span else {}
        parts.write(out)

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        return digests.state_digest(weights)

    def fits(self, lineage: Mapping[str, Any], before: str, after: str) -> bool:
        """Whether a lineage describes the change between states of these digests."""
        whole = lineage.get("part") in (None, [0, 1])
        return whole and lineage.get("base_digest", before) == before and lineage.get("digest", after) == after

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        patches = self.read(delta)
        self.check(patches, weights)
        lineage = {key: value for key, value in (oracle.read_lineage(delta) or {}).items() if value is not None}
        after = self.digest(oracle.expected_state(weights, patches))
        if not self.fits(lineage, digest, after):
            raise ValueError(f"the state goes from {digest} to {after}, the delta's lineage is {lineage}")
        self.apply(delta, weights)
        return after

    def pieces(self, layout: Layout, name: str) -> Sequence[Piece]:
        return [piece for piece in layout.pieces if piece.source == name]

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        place = np.unravel_index(indices.numpy(), layout.sources[name]) if layout.sources[name] else ()
        routed = []
        for piece in self.pieces(layout, name):
            inside = np.ones(len(indices), dtype=bool)
            for axis, (first, stop) in zip(place, piece.taken, strict=True):
                inside &= (axis >= first) & (axis < stop)
            moved = [place[axis][inside] - piece.taken[axis][0] for axis in piece.order]
            lead = [np.zeros(inside.sum(), np.int64)] * (len(piece.start) - len(moved))
            at = [axis + start for axis, start in zip([*lead, *moved], piece.start, strict=True)]
            flat = np.ravel_multi_index(at, layout.params[piece.param]) if at else np.zeros(inside.sum(), np.int64)
            routed.append((piece.param, torch.from_numpy(flat), values[torch.from_numpy(inside)]))
        return routed


def reread(parts: oracle.Draft) -> Sequence[Patch]:
    """The patches of a delta that was taken apart."""
    with tempfile.TemporaryDirectory() as directory:
        return oracle.read_delta(parts.write(Path(directory) / "delta")).patches
