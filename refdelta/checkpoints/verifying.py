"""Check that a delta keeps the promises of the format, as far as the delta and the given checkpoints can show it.

Streamed: the delta and a few runs of one tensor are in memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Final

import torch

from refdelta.checkpoints.checks import CHECKS, Check, Run
from refdelta.checkpoints.patching import Advance, StateDigests, check_fits_checkpoint
from refdelta.checkpoints.reading import RUN_BYTES, Checkpoint
from refdelta.codec.digests import ZERO, add
from refdelta.codec.encoding import check_comparable
from refdelta.codec.state import TensorInfo
from refdelta.files.reading import read_delta
from refdelta.files.writing import canonical_payload
from refdelta.spec import DELTA_FILE, INVARIANTS, METADATA_FILE, Delta, DeltaError, Lineage, TensorPatch

__all__ = ["COMPOSED_OF", "Finding", "Status", "verify"]

COMPOSED_OF: Final = "composed_of"
"""Metadata key of a composed delta: of how many deltas it was made. Such a delta need not be minimal."""


class Status(StrEnum):
    """What a check found."""

    HOLDS = "holds"
    FAILS = "fails"
    NOTED = "noted"
    """The check fails, but readers take the delta all the same."""
    NOT_CHECKED = "not_checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    id: str
    """Id of an invariant; or ``fits``, ``holds_values`` (in place of bit_exact where there is no base),
    ``payload_sha256``, ``base_digest``, ``digest``, ``layer_digests``."""
    status: Status
    detail: str = ""


def verify(
    delta_path: Path, base: Checkpoint | None, target: Checkpoint | None, *, advance: Advance = lambda _: None
) -> list[Finding]:
    """Run every check that the inputs allow: the invariants in their order, then fit and lineage.

    Raises `DeltaError` where the delta cannot be read at all.
    """
    delta = read_delta(delta_path)
    found = _of_the_files(delta, delta_path, target if base is None else base)
    misfit = _misfit(delta, base, target)
    if base is not None or target is not None:
        found["fits"] = Finding("fits", Status.HOLDS) if misfit is None else Finding("fits", Status.FAILS, misfit)
    if misfit is None:
        found |= _of_the_states(delta, base, target, advance)
    _judge_writer(found, delta)
    for id_ in INVARIANTS:
        found.setdefault(id_, Finding(id_, Status.NOT_CHECKED, _why_not(id_, misfit)))
    return [*(found.pop(id_) for id_ in INVARIANTS), *found.values()]


def _why_not(id_: str, misfit: str | None) -> str:
    elsewhere = {
        "routes": "needs a layout map",
        "refuses": "needs malformed deltas: pytest conformance/",
    }
    needs = "needs --base" if id_ in ("idempotent", "minimal", "composes", "inverts") else "needs --base and --target"
    return elsewhere.get(id_) or ("the states do not fit" if misfit else needs)


def _judge_writer(found: dict[str, Finding], delta: Delta) -> None:
    """What only canonical writers and minimal deltas need to hold is no failure of others."""
    lineage = delta.lineage
    spans = lineage and lineage.base_version is not None and lineage.version - lineage.base_version > 1
    minimal, again = found.get("minimal"), found.get("deterministic")
    if minimal and minimal.status is Status.FAILS and (spans or COMPOSED_OF in delta.extra):
        found["minimal"] = Finding("minimal", Status.NOTED, f"{minimal.detail}; composed deltas need not be minimal")
    if again and any(found[id_].status is not Status.HOLDS for id_ in ("canonical", "minimal", "bit_exact")):
        reason = "the delta is not what encoding these states gives: see the others"
        found["deterministic"] = Finding("deterministic", Status.NOT_CHECKED, reason)


# The delta alone


def _of_the_files(delta: Delta, path: Path, state: Checkpoint | None) -> dict[str, Finding]:
    metadata = json.loads((path / METADATA_FILE).read_bytes())
    total = None if state is None else state.total_elements
    size = (path / DELTA_FILE).stat().st_size
    other = _not_canonical(delta, path / DELTA_FILE)
    canonical = Finding("canonical", Status.HOLDS) if other is None else Finding("canonical", Status.NOTED, other)
    bound = _of_invariant("density_bound", lambda: INVARIANTS["density_bound"].check(delta, size))
    counted = _of_invariant("counted", lambda: INVARIANTS["counted"].check(delta, metadata, total))
    found = {finding.id: finding for finding in (canonical, bound, counted)}
    if delta.lineage is not None and delta.lineage.payload_sha256 is not None:
        found["payload_sha256"] = Finding("payload_sha256", Status.HOLDS)  # read_delta has compared it
    return found


def _of_invariant(id_: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except AssertionError as error:
        return Finding(id_, Status.FAILS, str(error).removeprefix(f"{id_}: "))
    return Finding(id_, Status.HOLDS)


def _not_canonical(delta: Delta, path: Path) -> str | None:
    at = 0
    with path.open("rb") as file:
        for piece in _pieces(delta):
            if file.read(len(piece)) != piece:
                return f"from byte {at} on the payload is not written as the format prescribes; readers take it"
            at += len(piece)
    return None


def _pieces(delta: Delta) -> Iterator[memoryview]:
    for chunk in canonical_payload(delta):
        view = memoryview(chunk)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        yield from (view[at : at + RUN_BYTES] for at in range(0, len(view), RUN_BYTES))


# The states


def _misfit(delta: Delta, base: Checkpoint | None, target: Checkpoint | None) -> str | None:
    try:
        if base is not None and target is not None:
            check_comparable(base.infos(), target.infos())
        for state in (base, target):
            if state is not None:
                check_fits_checkpoint(delta, state.infos())
    except DeltaError as error:
        return f"[{error.reason}] {error.detail}"
    return None


def _of_the_states(
    delta: Delta, base: Checkpoint | None, target: Checkpoint | None, advance: Advance
) -> dict[str, Finding]:
    state = target if base is None else base
    if state is None:
        return {}
    tally = _Tally([check for check in CHECKS if _is_possible(check, base, target)])
    digests = _Digests(delta.lineage) if delta.lineage is not None and _states_digests(delta.lineage) else None
    patches = {patch.name: patch for patch in delta.patches}
    for name, info in state.infos().items():
        runs = _advancing(_runs(patches.get(name) or _no_patch(name, info), base, target), advance)
        if digests is not None:
            runs = digests.counting(name, info, runs)
        for run in runs:
            tally.add(run)
    found = tally.findings(delta)
    return found if digests is None else found | digests.findings(base is not None)


def _is_possible(check: Check, base: Checkpoint | None, target: Checkpoint | None) -> bool:
    """Whether the states for a check are given, and not those for a stronger one in its place."""
    if base is None:
        return target is not None and not check.needs_base
    return check.needs_base and (target is not None or not check.needs_target)


def _no_patch(name: str, info: TensorInfo) -> TensorPatch:
    return TensorPatch(name, info.shape, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=info.dtype))


def _runs(patch: TensorPatch, base: Checkpoint | None, target: Checkpoint | None) -> Iterator[Run]:
    olds, news = (() if state is None else state.runs(patch.name) for state in (base, target))
    for old, new in zip_longest(olds, news, fillvalue=(None, None)):
        start = new[0] if old[0] is None else old[0]
        assert start is not None  # one of the two is there
        yield Run.of(patch, start, old[1], new[1])


def _advancing(runs: Iterable[Run], advance: Advance) -> Iterator[Run]:
    for run in runs:
        yield run
        advance(max(run.base.nbytes, run.target.nbytes))


class _Tally:
    """In how many places each check failed, and where first."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, run: Run) -> None:
        for check in self._checks:
            wrong = check.wrong(run)
            if len(wrong):
                self._counts[check.id] += len(wrong)
                self._first.setdefault(check.id, f"first in {run.part.name} at {run.start + int(wrong[0])}")

    def findings(self, delta: Delta) -> dict[str, Finding]:
        found = {check.id: self._finding(check) for check in self._checks}
        empty = [patch.name for patch in delta.patches if not patch.changed]
        if empty and "minimal" in found and found["minimal"].status is Status.HOLDS:
            found["minimal"] = Finding("minimal", Status.FAILS, f"layers without positions: {', '.join(empty)}")
        return found

    def _finding(self, check: Check) -> Finding:
        count = self._counts[check.id]
        if not count:
            return Finding(check.id, Status.HOLDS)
        return Finding(check.id, Status.FAILS, f"{count} {check.fault}, {self._first[check.id]}")


class _Digests:
    """Digests of the base, and per tensor of the base with the delta; of the target where there is no base."""

    def __init__(self, stated: Lineage) -> None:
        self._stated = stated
        self._base = ZERO
        self._layers: dict[str, str] = {}

    def counting(self, name: str, info: TensorInfo, runs: Iterable[Run]) -> Iterator[Run]:
        """``runs`` of one tensor as they come."""
        digests = StateDigests()
        digests.add_tensor(name, info)
        for run in runs:
            has_base = len(run.base) > 0
            digests.add_run(name, info, run.start, run.base if has_base else run.target)
            if has_base:
                digests.change(run.part, run.inverse.values)
            yield run
        self._base = add(self._base, digests.before)
        self._layers[name] = digests.after

    def findings(self, has_base: bool) -> dict[str, Finding]:
        """What the lineage states, compared."""
        stated, found = self._stated, {}
        if stated.base_digest is not None:
            found["base_digest"] = (
                _compared("base_digest", stated.base_digest, self._base)
                if has_base
                else Finding("base_digest", Status.NOT_CHECKED, "needs --base")
            )
        if stated.digest is not None:
            found["digest"] = _compared("digest", stated.digest, add(ZERO, *self._layers.values()))
        if stated.layer_digests is not None:
            wrong = [name for name, digest in stated.layer_digests.items() if self._layers.get(name) != digest]
            detail = f"{len(wrong)} of {len(stated.layer_digests)} differ, first {wrong[0]}" if wrong else ""
            found["layer_digests"] = Finding("layer_digests", Status.FAILS if wrong else Status.HOLDS, detail)
        return found


def _states_digests(lineage: Lineage) -> bool:
    return any(x is not None for x in (lineage.base_digest, lineage.digest, lineage.layer_digests))


def _compared(id_: str, stated: str, found: str) -> Finding:
    if stated == found:
        return Finding(id_, Status.HOLDS, stated)
    return Finding(id_, Status.FAILS, f"the lineage states {stated}, the state is {found}")
