"""Codecs that go wrong from a size on: generated, one for each operation, quantity, boundary and kind of fault.

    python -m conformance.mutants.thresholds [--sample] [--seeds N]

Every one must be killed by the test that it names, in the chapter of sizes. They are made from the right codec
(`right.Plain`): one step of it goes over a patch, or over a list, and a fault changes what lies beyond the boundary.
Boundaries of 2^31 are reached by refdelta's own codec (`large`), since the right one is too slow for them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import oracle
from ..engines.codecs import FullCodec, Reference
from ..inputs import sizes
from ..oracle import CODES, Bits, Patch, State, bits, digests
from ..oracle.layouts import Layout
from . import codec_run
from .cells import KILLED
from .right import Plain

Keep = NDArray[Any]
Elements = tuple[NDArray[np.int64], Bits]
"""Flat positions and the bits at them."""


# -- faults: what becomes of the elements beyond a boundary ------------------------------------------------------------


def _lost(order: NDArray[np.int64], boundary: int, size: int, found: Elements) -> Elements:
    keep = order < boundary
    return found[0][keep], found[1][keep]


def _wrapped(order: NDArray[np.int64], boundary: int, size: int, found: Elements) -> Elements:
    """A counter that starts again: of a place, the later one wins; of a number, so many are left over."""
    if order is found[0]:
        last = dict(zip((order % boundary).tolist(), range(len(order)), strict=True))
        at = np.array(sorted(last), np.int64)
        return at, found[1][[last[place] for place in at.tolist()]]
    return (found[0], found[1]) if size < boundary else (found[0][: size % boundary], found[1][: size % boundary])


def _last_chunk(order: NDArray[np.int64], boundary: int, size: int, found: Elements) -> Elements:
    keep = order < (size // boundary * boundary if size > boundary else size)
    return found[0][keep], found[1][keep]


def _first_block(order: NDArray[np.int64], boundary: int, size: int, found: Elements) -> Elements:
    """Later blocks get the bits of the first."""
    beyond = order >= boundary
    new = found[1].copy()
    new[beyond] = np.resize(found[1][~beyond], beyond.sum()) if (~beyond).any() else 0
    return found[0], np.where((new == found[1]) & beyond, found[1] ^ 1, new).astype(found[1].dtype)


def _float32(order: NDArray[np.int64], boundary: int, size: int, found: Elements) -> Elements:
    """Places go through float32; two that become one are one."""
    rounded = found[0].astype(np.float32).astype(np.int64)
    at, first = np.unique(rounded[rounded < max(size, 1)], return_index=True)
    return at, found[1][rounded < max(size, 1)][first]


Fault = Callable[[NDArray[np.int64], int, int, Elements], Elements]
FAULTS: Mapping[str, Fault] = {
    "lost": _lost,
    "wrapped": _wrapped,
    "last chunk skipped": _last_chunk,
    "only the first block right": _first_block,
    "rounded through float32": _float32,
}
ELEMENTS, CHANGES, IN_ALL, TENSORS, AXES, DELTAS, THREADS, COUNTED = (
    "elements",
    "changes",
    "changes in a delta",
    "tensors",
    "axes",
    "deltas",
    "threads",
    "total_elements",
)


@dataclass(frozen=True)
class Threshold:
    """A codec that is wrong from a size on."""

    verb: str
    """What goes wrong: find, write, read, compose, invert (undo), digest, follow (attest), route."""
    quantity: str
    boundary: int
    fault: str
    test: str
    """The function of the chapter that must kill it."""
    case: str = ""
    """The case of it, where it has several; else any."""
    large: bool = False
    """Whether it is made from refdelta's own codec, for sizes beyond 2^31."""

    @property
    def name(self) -> str:
        return f"{self.verb}: {self.quantity} from {sizes.power(self.boundary)} on {self.fault}"

    def patch(self, patch: Patch) -> Patch:
        """One patch after the fault."""
        if self.quantity == AXES:
            return replace(patch, indices=patch.indices[:0], bits=patch.bits[:0]) if self.is_beyond(patch) else patch
        at, new = self.elements((patch.indices, patch.bits), patch.numel)
        return replace(patch, indices=at, bits=new)

    def is_beyond(self, patch: Patch) -> bool:
        return len(patch.shape) >= self.boundary

    def elements(self, found: Elements, size: int) -> Elements:
        """Elements of a tensor of this size after the fault."""
        if self.quantity == THREADS:
            return _last_chunk(found[0], 2**20, size, found) if torch.get_num_threads() >= self.boundary else found
        by_place = self.quantity == ELEMENTS
        order = found[0] if by_place else np.arange(len(found[0]))
        return FAULTS[self.fault](order, self.boundary, size if by_place else len(order), found)

    def listed(self, patches: Sequence[Patch]) -> list[Patch]:
        """All patches after the fault."""
        if self.quantity == TENSORS:
            keep = self.boundary if self.fault == "lost" else len(patches) % self.boundary
            return [*patches] if len(patches) < self.boundary else [*patches[:keep]]
        if self.quantity == IN_ALL:
            return list(self._in_all(patches))
        return [self.patch(patch) for patch in patches]

    def _in_all(self, patches: Sequence[Patch]) -> Iterator[Patch]:
        """One counter for all of a delta."""
        total = sum(len(patch.indices) for patch in patches)
        left = self.boundary if self.fault == "lost" else total % self.boundary if total >= self.boundary else total
        for patch in patches:
            yield replace(patch, indices=patch.indices[: max(0, left)], bits=patch.bits[: max(0, left)])
            left -= len(patch.indices)


class Broken(Plain):
    """The right codec, with one threshold."""

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold
        self.name = threshold.name

    def at(self, verb: str) -> bool:
        return self.threshold.verb == verb

    def find(self, base: State, target: State) -> Sequence[Patch]:
        found = super().find(base, target)
        if not self.at("find") or self.threshold.quantity == COUNTED:
            return found
        return [patch for patch in self.threshold.listed(found) if len(patch.indices)]

    def total(self, target: State, patches: Sequence[Patch]) -> int:
        total = super().total(target, patches)
        return max(total % self.threshold.boundary, 1) if self.threshold.quantity == COUNTED else total

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        if self.threshold.quantity != COUNTED:
            super().encode(base, target, out)
            return
        patches, right = self.find(base, target), super().total(target, ())
        parts = oracle.draft(patches, right)
        parts.metadata["total_elements"] = self.total(target, patches)
        parts.write(out)

    def read(self, delta: Path) -> Sequence[Patch]:
        found = super().read(delta)
        return self.threshold.listed(found) if self.at("read") else found

    def write(self, weights: MutableMapping[str, Tensor], patch: Patch) -> None:
        super().write(weights, self.threshold.patch(patch) if self.at("write") else patch)

    def compose(self, deltas: Sequence[Path], out: Path) -> None:
        if not self.at("compose"):
            super().compose(deltas, out)
        elif self.threshold.quantity == DELTAS:
            super().compose(deltas[: self.threshold.boundary - 1], out)
        else:
            with tempfile.TemporaryDirectory() as directory:
                super().compose(deltas, Path(directory) / "right")
                right = oracle.read_delta(Path(directory) / "right")
            oracle.write_delta(out, self.threshold.listed(right.patches), right.metadata["total_elements"])

    def invert(self, delta: Path, weights: MutableMapping[str, Tensor], out: Path) -> None:
        if not self.at("invert"):
            super().invert(delta, weights, out)
            return
        old = [replace(patch, bits=bits(weights[patch.name])[patch.indices]) for patch in self.read(delta)]
        self.apply(delta, weights)
        oracle.write_delta(out, self.threshold.listed(old), oracle.total_elements(weights))

    def digest(self, weights: Mapping[str, Tensor]) -> str:
        if not self.at("digest"):
            return super().digest(weights)
        return digests.text(sum(self._tensor_digest(name, tensor) for name, tensor in self._counted(weights)))

    def _counted(self, weights: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        named = list(weights.items())
        return named[: self.threshold.boundary] if self.threshold.quantity == TENSORS else named

    def _tensor_digest(self, name: str, tensor: Tensor) -> int:
        seed, header = digests.seed_and_header(name, CODES[tensor.dtype], tuple(tensor.shape))
        found: Elements = np.arange(tensor.numel()), bits(tensor)
        if self.threshold.quantity == AXES and tensor.dim() >= self.threshold.boundary:
            found = found[0][:0], found[1][:0]
        elif self.threshold.quantity != TENSORS and self.threshold.quantity != AXES:
            found = self._mixed(found)
        return header + _terms(seed, found)

    def _mixed(self, found: Elements) -> Elements:
        """As `Threshold.elements`, but what is wrapped is counted at the wrong places, not once."""
        if self.threshold.fault == "wrapped":
            return found[0] % self.threshold.boundary, found[1]
        if self.threshold.fault == "rounded through float32":
            return found[0].astype(np.float32).astype(np.int64), found[1]
        return self.threshold.elements(found, len(found[0]))

    def follow(self, delta: Path, weights: MutableMapping[str, Tensor], digest: str) -> str:
        if not self.at("follow"):
            return super().follow(delta, weights, digest)
        total = int(digest.removeprefix("rd1:"), 16)
        for patch in self.threshold.listed(self.read(delta)):
            seed, _ = digests.seed_and_header(patch.name, patch.code, patch.shape)
            old = bits(weights[patch.name])[patch.indices]
            total += _terms(seed, (patch.indices, patch.bits)) - _terms(seed, (patch.indices, old))
        self.apply(delta, weights)
        return digests.text(total)

    def route(self, layout: Layout, name: str, indices: Tensor, values: Tensor) -> Sequence[tuple[str, Tensor, Tensor]]:
        if not self.at("route"):
            return super().route(layout, name, indices, values)
        size = int(np.prod(layout.sources[name], dtype=np.int64))
        if self.threshold.quantity == REGIONS:
            return [self._in_region(layout, found) for found in super().route(layout, name, indices, values)]
        at, new = self.threshold.elements((indices.numpy(), bits(values)), size)
        code = CODES[values.dtype]
        return super().route(layout, name, torch.from_numpy(at), oracle.from_bits(new, code, (len(new),)))

    def _in_region(self, layout: Layout, found: tuple[str, Tensor, Tensor]) -> tuple[str, Tensor, Tensor]:
        """The places of one parameter after the fault."""
        param, indices, values = found
        by_place = replace(self.threshold, quantity=ELEMENTS)
        at, new = by_place.elements((indices.numpy(), bits(values)), int(np.prod(layout.params[param])))
        return param, torch.from_numpy(at), oracle.from_bits(new, CODES[values.dtype], (len(new),))


REGIONS = "elements of a region"


def _terms(seed: int, found: Elements) -> int:
    keys = digests.key(seed, found[0].astype(np.uint64))
    return int(digests.mix64(keys ^ found[1].astype(np.uint64)).sum(dtype=np.uint64))


class BrokenBeyond(Reference):
    """refdelta's codec, with a threshold at what goes into a delta or comes out of one."""

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold

    def encode(self, base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
        if self.threshold.verb != "find":
            super().encode(base, target, out)
            return
        with tempfile.TemporaryDirectory() as directory:
            super().encode(base, target, Path(directory) / "right")
            self._rewrite(Path(directory) / "right", out)

    def apply(self, delta: Path, weights: MutableMapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            changed = self._rewrite(delta, Path(directory) / "wrong") if self.threshold.verb == "write" else delta
            super().apply(changed, weights)

    def _rewrite(self, delta: Path, out: Path) -> Path:
        right = oracle.read_delta(delta)
        return oracle.write_delta(out, self.threshold.listed(right.patches), right.metadata["total_elements"])


# -- which there are ---------------------------------------------------------------------------------------------------

_TESTS = {
    "find": "test_encode",
    "write": "test_apply",
    "read": "test_apply",
    "compose": "test_compose",
    "invert": "test_invert",
    "digest": "test_digest",
    "follow": "test_follow",
    "route": "test_route",
}
_PLACES = ("lost", "wrapped", "last chunk skipped", "only the first block right")
_LARGEST = sizes.power(sizes.LARGE_ELEMENTS[-1])


def generated() -> list[Threshold]:
    """All of them."""
    return [*_of_elements(), *_of_changes(), *_of_lists(), *_of_routes(), *_beyond_32_bits()]


def _of_elements() -> Iterator[Threshold]:
    for verb in ("find", "write", "read", "compose", "invert", "digest", "follow"):
        for boundary in sizes.BOUNDARIES:
            for fault in _PLACES:
                yield Threshold(verb, ELEMENTS, boundary, fault, _TESTS[verb], "elements")
        for fault in (*_PLACES, "rounded through float32"):
            yield Threshold(verb, ELEMENTS, sizes.FLOAT32, fault, _TESTS[verb], _LARGEST)


def _of_changes() -> Iterator[Threshold]:
    for verb in ("find", "write", "read", "compose", "invert", "follow"):
        all_of_them = verb in ("find", "write", "read")
        for boundary in (*sizes.BOUNDARIES[:4], *([2**20] if all_of_them else [])):
            for fault in _PLACES:
                yield Threshold(verb, CHANGES, boundary, fault, _TESTS[verb], "changes" if all_of_them else _FEWER)
        for boundary in (2**8, 2**12, 2**16):
            for fault in ("lost", "wrapped"):
                if verb != "write":
                    yield Threshold(verb, IN_ALL, boundary, fault, _TESTS[verb], "300")


_FEWER = "fewer changes"


def _of_lists() -> Iterator[Threshold]:
    for verb in ("find", "read", "compose", "invert", "follow"):
        for fault in ("lost", "wrapped"):
            yield Threshold(verb, TENSORS, 2**8, fault, _TESTS[verb], "300")
    for verb in ("find", "read"):
        for fault in ("lost", "wrapped"):
            yield Threshold(verb, TENSORS, 2**12, fault, _TESTS[verb], "4097")
    yield Threshold("digest", TENSORS, 2**8, "lost", "test_digest", "300")
    for verb in ("find", "write", "read", "digest"):
        for axes in range(3, 9):
            yield Threshold(verb, AXES, axes, "lost", _TESTS[verb], "dimensions")
    for count in (3, 13, 2**8, 2**8 + 1):
        yield Threshold("compose", DELTAS, count, "lost", "test_compose_many")
    for count in sizes.THREADS[1:]:
        for verb in ("find", "write"):
            yield Threshold(verb, THREADS, count, "last chunk skipped", "test_threads", str(count))
        yield Threshold("digest", THREADS, count, "last chunk skipped", "test_digest_in_threads", str(count))
    for boundary, case in ((2**16, "elements"), (2**20, "elements"), (sizes.FLOAT32, _LARGEST)):
        yield Threshold("find", COUNTED, boundary, "wrapped", "test_encode", case)


def _of_routes() -> Iterator[Threshold]:
    for boundary in (*sizes.BOUNDARIES, sizes.FLOAT32):
        case = "a region of 2^24" if boundary == sizes.FLOAT32 else sizes.power(boundary + 1)
        for fault in (*_PLACES, *(["rounded through float32"] if boundary == sizes.FLOAT32 else [])):
            yield Threshold("route", ELEMENTS, boundary, fault, "test_route", case)
    for boundary in sizes.BOUNDARIES[:4]:
        for fault in _PLACES:
            yield Threshold("route", REGIONS, boundary, fault, "test_route", "a region of 2^18 + 5")
    for boundary in (2**8, 2**12, 2**16):
        for fault in _PLACES:
            yield Threshold("route", CHANGES, boundary, fault, "test_route", "turned")


def _beyond_32_bits() -> Iterator[Threshold]:
    for verb, test in (("find", "test_encode_beyond_32_bits"), ("write", "test_apply_beyond_32_bits")):
        for fault in ("lost", "wrapped", "rounded through float32", "last chunk skipped"):
            yield Threshold(verb, ELEMENTS, sizes.I32, fault, test, large=True)


def sample(every: Sequence[Threshold]) -> list[Threshold]:
    """Of each operation and quantity one at its largest cheap boundary, faults by turns."""
    found: dict[tuple[str, str], list[Threshold]] = {}
    for one in every:
        if not one.large and one.case not in (_LARGEST, "a region of 2^24", "changes", "4097"):
            found.setdefault((one.verb, one.quantity), []).append(one)
    chosen = []
    for turn, group in enumerate(found.values()):
        top = [one for one in group if one.boundary == group[-1].boundary]
        chosen.append(top[turn % len(top)])
    return [*chosen, *(one for one in every if one.case == _LARGEST and one.fault.startswith("rounded"))][:60]


# -- judging -----------------------------------------------------------------------------------------------------------


class Judge:
    """The tests of the suite, to be called on one codec after another."""

    @cached_property
    def tests(self) -> list[codec_run.Test]:
        return [test for test in codec_run.collect() if test.chapter in ("sizes", "large")]

    def finding(self, threshold: Threshold) -> str:
        """What the test that must kill it found; empty where it survives."""
        mine = [test for test in self.tests if test.name == threshold.test and self._is_case(test, threshold.case)]
        assert mine, f"{threshold.name}: no test {threshold.test}[{threshold.case}]"
        for test in mine:
            engine = BrokenBeyond(threshold) if threshold.large else Broken(threshold)
            word, finding = test.run(cast(FullCodec, engine), codec_run.TRACED, codec_run.NAMED_EXAMPLES)
            if word == KILLED:
                return finding
        return ""

    @staticmethod
    def _is_case(test: codec_run.Test, case: str) -> bool:
        return not case or case in {str(getattr(value, "name", value)) for value in test.arguments.values()}

    def unbroken(self, wanted: Sequence[Threshold]) -> str:
        """What a named test finds in the codec without a fault; it must be nothing."""
        named = {(one.test, one.case) for one in wanted if not one.large}
        tests = [t for t in self.tests if any(t.name == test and self._is_case(t, case) for test, case in named)]
        for test in tests:
            word, finding = test.run(cast(FullCodec, Plain()), codec_run.TRACED, codec_run.NAMED_EXAMPLES)
            if word == KILLED:
                return f"{test.id} {dict(test.arguments)}: {finding}"
        return ""


def _rows(wanted: Sequence[Threshold], cell: Callable[[Sequence[Threshold]], str]) -> list[list[str]]:
    """Quantities down, operations across; a cell says something of those of both."""
    verbs, quantities = (list(dict.fromkeys(getattr(one, key) for one in wanted)) for key in ("verb", "quantity"))
    rows = [["quantity", *verbs, "all"]]
    for quantity in quantities:
        of = [one for one in wanted if one.quantity == quantity]
        rows.append([quantity, *(cell([one for one in of if one.verb == verb]) for verb in verbs), cell(of)])
    return [*rows, ["all", *(cell([one for one in wanted if one.verb == verb]) for verb in verbs), cell(wanted)]]


def table(wanted: Sequence[Threshold], killed: Mapping[str, bool]) -> list[str]:
    """Killed of so many, as lines."""
    rows = _rows(wanted, lambda of: f"{sum(killed[one.name] for one in of)}/{len(of)}" if of else "")
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def counted(wanted: Sequence[Threshold]) -> str:
    """How many there are, as a table of Markdown."""
    head, *rows = _rows(wanted, lambda of: str(len(of)) if of else "")
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Kill them, and tell how many by quantity; exit 1 where one survives."""
    parser = argparse.ArgumentParser(prog="python -m conformance.mutants.thresholds", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="those of the quick profile alone")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="as many draws of each state")
    options, began, judge = parser.parse_args(arguments), time.process_time(), Judge()
    wanted = sample(generated()) if options.sample else generated()
    killed = {one.name: True for one in wanted}
    for _ in codec_run.Seeds(options.seeds).numbers():
        if fault := judge.unbroken(wanted):
            print(f"the codec without a fault fails {fault}")
            return 1
        for one in wanted:
            if not judge.finding(one):
                killed[one.name] = False
                print(f"survives: {one.name}", flush=True)
    print("\n".join(table(wanted, killed)))
    survivors = [name for name, dead in killed.items() if not dead]
    spent = round(time.process_time() - began)
    print(f"{len(wanted)} thresholds, {options.seeds} seeds, {spent} s; survivors: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
