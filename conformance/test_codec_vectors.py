"""The golden vectors, whatever the engine: states bit for bit, bytes where they are canonical, reasons of refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from . import oracle
from .driving.codec import (
    Scratch,
    applied,
    assert_reason,
    assert_same_bytes,
    encoded,
    must_refuse,
    raised,
    refusal,
)
from .engines.codecs import FullCodec
from .findings import require
from .golden.corpus import Vector, assert_whole, load
from .oracle import DELTA_FILE, METADATA_FILE, assert_bit_equal, clone

VECTORS = load()
OWN_KEYS = ("format", "format_version", "layer_names", "layer_shapes", "changed_elements", "total_elements", "requires")
"""Keys of metadata.json that follow from the two states; density too, where either neighbour of a tie will do."""


TAKEN: set[str] = set()
"""Names of the vectors that some test takes."""


def _valid(vector: Vector) -> bool:
    return "reason" not in vector.expected


_KEYS = ("changed_", "total_", "density_", "base_model_", "kind_", "created_at_", "timestamp_", "requires_")
"""How names of vectors begin whose fault is in a key that no weight depends on."""


def _needs_of(vector: Vector) -> set[str]:
    """The capabilities without which a vector says nothing of an engine."""
    of_requires = vector.name.startswith("invalid/extensions/requires_")
    return vector.needs | ({"extensions"} if of_requires else set())


def _level_of(vector: Vector) -> list[pytest.MarkDecorator]:
    """Level `strict` for a refusal whose fault is in metadata alone that no weight depends on."""
    _, feature, name = ("", *vector.name.split("/"))[-3:]
    of_keys = feature in ("counts", "metadata", "extensions") and name.startswith(_KEYS)
    return [pytest.mark.level("strict")] if vector.name.startswith("invalid/") and of_keys else []


def _each(which: Callable[[Vector], bool], *needs: str) -> pytest.MarkDecorator:
    """Parametrise over the vectors for which `which` holds, each marked with the capabilities that it needs."""
    chosen = [vector for vector in VECTORS if which(vector)]
    TAKEN.update(vector.name for vector in chosen)
    params = [
        pytest.param(
            vector,
            id=vector.name,
            marks=[*(pytest.mark.needs(need) for need in {*needs, *_needs_of(vector)}), *_level_of(vector)],
        )
        for vector in chosen
    ]
    return pytest.mark.parametrize("vector", params)


@pytest.mark.level("applier")
@pytest.mark.check("bit_exact")
def test_corpus_is_whole() -> None:
    assert_whole(VECTORS)


@pytest.mark.level("applier")
@pytest.mark.check("bit_exact")
def test_every_vector_is_run() -> None:
    """One that no test takes would look like one that passes."""
    missing = sorted({vector.name for vector in VECTORS} - TAKEN)
    assert not missing, f"no test takes {missing}"


@pytest.mark.level("applier")
@_each(lambda v: _valid(v) and v.has("expected.safetensors"))
@pytest.mark.check("bit_exact")
def test_applied(engine: FullCodec, vector: Vector) -> None:
    """The delta, or all of them in order, gives the expected state."""
    state: oracle.State = vector.state("base.safetensors")
    for delta in vector.deltas:
        state = applied(engine, delta, state)
    assert_bit_equal(vector.state("expected.safetensors"), state, vector.name)


@_each(lambda v: bool(v.expected.get("canonical")) and v.has("base.safetensors"), "canonical")
@pytest.mark.check("canonical")
def test_written(engine: FullCodec, scratch: Scratch, vector: Vector) -> None:
    """The two states give the vector's payload byte for byte, and its metadata."""
    with scratch() as tmp:
        base, target = (vector.state(f"{which}.safetensors") for which in ("base", "expected"))
        _assert_same_delta(vector.delta, encoded(engine, base, target, tmp / "delta"))
    if "data_bytes" in vector.expected:
        entries, _, start = oracle.unpack((vector.delta / DELTA_FILE).read_bytes())
        assert sum(len(entry.data) for entry in entries) == vector.expected["data_bytes"], f"after byte {start}"


def _assert_same_delta(expected: Path, found: Path) -> None:
    wanted, got = ((delta / DELTA_FILE).read_bytes() for delta in (expected, found))
    assert_same_bytes(wanted, got)
    one, two = (json.loads((delta / METADATA_FILE).read_text(encoding="utf-8")) for delta in (expected, found))
    for key in OWN_KEYS:
        require(two.get(key) == one.get(key), key, expected=one.get(key), found=two.get(key))
    density, counts = two["density_pct"], (one["changed_elements"], one["total_elements"])
    require(oracle.is_density(density, *counts), "density_pct", expected=one["density_pct"], found=density)


@_each(lambda v: v.has("inverse"), "inverts", "canonical")
@pytest.mark.check("inverts")
def test_inverted(engine: FullCodec, scratch: Scratch, vector: Vector) -> None:
    with scratch() as tmp:
        weights = clone(vector.state("base.safetensors"))
        engine.invert(vector.delta, weights, tmp / "inverse")
        _assert_same_delta(vector.path / "inverse", tmp / "inverse")
        assert_bit_equal(vector.state("base.safetensors"), applied(engine, tmp / "inverse", weights), "back again")


@_each(lambda v: v.has("composed"), "composes")
@pytest.mark.check("composes")
def test_composed(engine: FullCodec, scratch: Scratch, vector: Vector) -> None:
    with scratch() as tmp:
        engine.compose(vector.deltas, tmp / "composed")
        if "canonical" in engine.capabilities:
            _assert_same_delta(vector.path / "composed", tmp / "composed")
        if "lineage" in engine.capabilities:
            assert _lineage(tmp / "composed") == _lineage(vector.path / "composed"), "the range's lineage"
        found = applied(engine, tmp / "composed", vector.state("base.safetensors"))
        assert_bit_equal(vector.state("expected.safetensors"), found, vector.name)


def _lineage(delta: Path) -> dict[str, Any] | None:
    """What a composed delta's lineage says of the range; the hash is that of its own payload."""
    lineage = oracle.read_lineage(delta)
    return lineage and {key: value for key, value in lineage.items() if key != "payload_sha256"}


@pytest.mark.level("versioned")
@_each(lambda v: _valid(v) and "base_digest" in v.expected, "digests")
@pytest.mark.check("refuses")
def test_digests(engine: FullCodec, vector: Vector) -> None:
    """What a receiver tells states apart by."""
    for which, key in (("base", "base_digest"), ("expected", "digest")):
        if key in vector.expected:
            found = engine.digest(vector.state(f"{which}.safetensors"))
            require(found == vector.expected[key], f"digest of {which}", expected=vector.expected[key], found=found)


@pytest.mark.level("versioned")
@_each(lambda v: bool(v.expected.get("lineage")), "lineage")
@pytest.mark.check("refuses")
def test_followed(engine: FullCodec, vector: Vector) -> None:
    """A lineage that fits is taken, and leads to the expected digest."""
    weights, digest = vector.state("base.safetensors"), vector.expected["base_digest"]
    for delta in vector.deltas:
        digest = engine.follow(delta, weights, digest)
    require(digest == vector.expected["digest"], "digest", expected=vector.expected["digest"], found=digest)
    assert_bit_equal(vector.state("expected.safetensors"), weights, vector.name)


@_each(lambda v: not _valid(v) and v.has("base.safetensors") and not v.has("deltas"))
@pytest.mark.check("refuses")
def test_refused(engine: FullCodec, vector: Vector) -> None:
    """Refused for its reason, with the state as it was; to a digest where the fault is in the lineage."""
    base, reason = vector.state("base.safetensors"), vector.expected["reason"]
    if "digest" in vector.expected:
        error = raised(lambda weights: engine.follow(vector.delta, weights, vector.expected["digest"]), base, reason)
    else:
        error = refusal(engine, vector.delta, base, reason)
    assert_reason(engine, error, reason)


@pytest.mark.level("versioned")
@_each(lambda v: not _valid(v) and v.has("deltas"), "composes")
@pytest.mark.check("refuses")
def test_not_composed(engine: FullCodec, scratch: Scratch, vector: Vector) -> None:
    with scratch() as tmp:
        base, reason = vector.state("base.safetensors"), vector.expected["reason"]
        error = raised(lambda _: engine.compose(vector.deltas, tmp / "composed"), base, reason)
        assert not (tmp / "composed").exists(), "refused, and yet something was written"
    assert_reason(engine, error, vector.expected["reason"])


# -- beyond 2^31: states of zeros, whose memory is not touched unless something is written ---------------------------


def _zeros(vector: Vector) -> dict[str, Tensor]:
    state = {}
    for name, what in vector.expected["zeros"].items():
        code, shape = what["dtype"], what["shape"]
        assert oracle.width(code) == 1, f"{name}: tensors of {code} would be too large"
        state[name] = torch.zeros(shape, dtype=torch.uint8).view(oracle.DTYPES[code])
    return state


def _assert_after(state: dict[str, Tensor], after: dict[str, dict[str, list[int]]]) -> None:
    for name, tensor in state.items():
        flat = tensor.view(torch.uint8).view(-1)
        expected = after.get(name, {"positions": [], "bits": []})
        found = [int(flat[at]) for at in expected["positions"]]
        place = f"bits at {expected['positions']}"
        require(found == expected["bits"], place, tensor=name, expected=expected["bits"], found=found)
        written = sum(_nonzero(part) for part in flat.split(2**26))
        require(written == len(found), "elements written", tensor=name, expected=len(found), found=written)


def _nonzero(part: Tensor) -> int:
    return int(torch.count_nonzero(part))


@pytest.mark.level("applier")
@_each(lambda v: _valid(v) and "zeros" in v.expected)
@pytest.mark.check("bit_exact")
def test_large_applied(engine: FullCodec, vector: Vector) -> None:
    state = _zeros(vector)
    engine.apply(vector.delta, state)
    _assert_after(state, vector.expected["after"])


@_each(lambda v: not _valid(v) and "zeros" in v.expected)
@pytest.mark.check("refuses")
def test_large_refused(engine: FullCodec, vector: Vector) -> None:
    state = _zeros(vector)
    reason = vector.expected["reason"]
    assert_reason(engine, must_refuse(lambda: engine.apply(vector.delta, state), reason), reason)
    _assert_after(state, {})
