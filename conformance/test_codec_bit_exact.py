"""bit_exact: applying encode(a, b) to a gives b, bit for bit; writing and reading are judged apart, too."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, applied, encoded, skip_for
from .engines.capabilities import BASIC
from .engines.codecs import FullCodec
from .inputs import strategies
from .oracle import assert_bit_equal, expected_patches, expected_state, total_elements

pytestmark = pytest.mark.check("bit_exact")


@given(st.data())
def test_round_trip(engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject) -> None:
    base, target = data.draw(strategies.pairs(codes))
    with scratch() as tmp:
        assert_bit_equal(target, applied(engine, encoded(engine, base, target, tmp / "delta"), base))


@pytest.mark.level("writer")
@given(st.data())
def test_written_delta_gives_target(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    base, target = data.draw(strategies.pairs(codes))
    with scratch() as tmp:
        written = oracle.read_delta(encoded(engine, base, target, tmp / "delta"))
    assert_bit_equal(target, expected_state(base, written.patches), "what encode wrote, applied by the oracle")


@pytest.mark.level("applier")
@given(st.data())
def test_delta_of_another_writer_is_applied(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, data: st.DataObject
) -> None:
    base, patches, indices = data.draw(strategies.loose_deltas(codes))
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base), indices=indices)
        found = applied(engine, delta, base)
    assert_bit_equal(expected_state(base, patches), found, "what the oracle wrote, applied by the engine")


@pytest.mark.level("applier")
@given(st.data())
def test_delta_of_the_v2_trainer_is_applied(engine: FullCodec, scratch: Scratch, data: st.DataObject) -> None:
    """As the first producer of v2 writes: payload by the safetensors library, which orders tensors by dtype and name,
    JSON with spaces and escapes, and keys that say where the delta comes from."""
    base, target = data.draw(strategies.pairs(strategies.domain_of(engine.capabilities & {*BASIC, "nan_values"})))
    patches = expected_patches(base, target)
    parts = oracle.draft(patches, total_elements(base))
    tensors = {}
    for number, patch in enumerate(patches):
        tensors[f"{number}.indices"] = torch.from_numpy(patch.indices.astype(np.int32))
        tensors[f"{number}.values"] = oracle.from_bits(patch.bits, patch.code, patch.bits.shape)
    with scratch() as tmp:
        names = json.dumps(parts.metadata["layer_names"])
        save_file(tensors, tmp / oracle.DELTA_FILE, metadata={"layer_names": names})
        origin = {"base_model": "m", "model_id": "é", "kind": "sampler", "created_at": "2026-01-01", "timestamp": 1.5}
        (tmp / oracle.METADATA_FILE).write_text(json.dumps({**parts.metadata, **origin, "later": {"key": [None]}}))
        assert_bit_equal(target, applied(engine, tmp, base))


@pytest.mark.parametrize("code", list(oracle.DTYPES))
def test_every_special_pattern_becomes_every_other(
    engine: FullCodec, codes: tuple[str, ...], scratch: Scratch, code: str
) -> None:
    if code not in codes:
        capability = next(iter(strategies.capabilities_of({"": oracle.from_bits([0], code, (1,))})))
        skip_for(capability)
    specials = strategies.SPECIALS[code]
    if "nan_values" not in engine.capabilities:
        specials = specials[~strategies.is_nan(code, specials)]
    if "signed_zero" not in engine.capabilities:
        specials = specials[~strategies.is_negative_zero(code, specials)]
    before, after = (grid.reshape(-1) for grid in np.meshgrid(specials, specials, indexing="ij"))
    shape = (len(before),)
    base, target = ({"specials": oracle.from_bits(patterns, code, shape)} for patterns in (before, after))
    with scratch() as tmp:
        assert_bit_equal(target, applied(engine, encoded(engine, base, target, tmp / "delta"), base))


def test_more_than_ten_layers_keep_their_places(engine: FullCodec, scratch: Scratch) -> None:
    """Layer 10 sorts before layer 2 as text; all tensors are alike in shape and dtype, so that only bits tell."""
    names = [f"layer.{number}.weight" for number in range(23)]
    base = {name: oracle.from_bits(np.arange(6) + 100 * at, "F32", (2, 3)) for at, name in enumerate(names)}
    target = {name: oracle.from_bits(np.arange(6) + 100 * at + 50, "F32", (2, 3)) for at, name in enumerate(names)}
    with scratch() as tmp:
        assert_bit_equal(target, applied(engine, encoded(engine, base, target, tmp / "own"), base))
        patches = expected_patches(base, target)
        other = oracle.write_delta(tmp / "other", patches, total_elements(base))
        assert_bit_equal(target, applied(engine, other, base), "what the oracle wrote, applied by the engine")


@pytest.mark.level("applier")
@pytest.mark.needs("float64")
@pytest.mark.needs("float8")
def test_unaligned_payload(engine: FullCodec, scratch: Scratch) -> None:
    """One byte of float8 values puts everything after it at odd offsets."""
    shapes = {"a": ("F8_E4M3", (1, 3)), "b": ("F64", (2, 1)), "c": ("BF16", (5, 3))}
    base: dict[str, Tensor] = {n: oracle.from_bits(np.zeros(np.prod(s)), c, s) for n, (c, s) in shapes.items()}
    target = {n: oracle.from_bits(np.arange(np.prod(s)) % 2, c, s) for n, (c, s) in shapes.items()}
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", expected_patches(base, target), total_elements(base))
        assert_bit_equal(target, applied(engine, delta, base))


def test_three_million_elements(engine: FullCodec, scratch: Scratch) -> None:
    """Changes around every power of two, where chunks of a larger tensor may meet, and one element in a hundred."""
    shape = (1031, 3079)
    numel = shape[0] * shape[1]
    rng = np.random.default_rng(0)
    before = rng.integers(0, 2**16, numel).astype(np.uint16) & 0xBFFF  # no NaN
    powers = [2**k + step for k in range(2, 22) for step in (-1, 0, 1)]
    at = np.unique([0, numel - 1, *(p for p in powers if p < numel), *rng.integers(0, numel, numel // 100)])
    after = before.copy()
    after[at] ^= np.uint16(0x8000)
    base, target = {"w": oracle.from_bits(before, "BF16", shape)}, {"w": oracle.from_bits(after, "BF16", shape)}
    with scratch() as tmp:
        delta = encoded(engine, base, target, tmp / "delta")
        assert_bit_equal(target, expected_state(base, oracle.read_delta(delta).patches))
        assert_bit_equal(target, applied(engine, delta, base))
