"""`conformance.driving.features`: what a state has, and what an engine is spared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import oracle
from conformance.driving.features import FEATURES, OF_CODE, PLAIN, Guarded, of_delta, of_state, small, trying
from conformance.engines.capabilities import BASIC, CODEC, checked
from conformance.inputs.strategies import SPECIALS, is_negative_zero
from conformance.mutants.right import Plain
from tests.suite.runs import CONFORMANCE, QUIET, run

EVERYTHING = frozenset(Plain.capabilities)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_smallest_change_has_its_feature_and_no_other(feature: str) -> None:
    base, target = small(feature, EVERYTHING)
    found = of_state(base) | of_state(target)
    second = {"float16"} if feature == "mixed_dtypes" else set()
    assert found == {PLAIN, feature} | second
    assert oracle.difference(base, target)


@pytest.mark.parametrize("code", [code for code in oracle.DTYPES if code not in ("C64", "F4")])
def test_negative_zeros_are_those_that_equal_zero_and_have_other_bits(code: str) -> None:
    """By torch's own numbers."""
    patterns = SPECIALS[code]
    tensor = oracle.from_bits(patterns, code, (len(patterns),))
    zeros = (tensor.to(torch.float64) == 0).numpy()
    assert (is_negative_zero(code, patterns) == (zeros & (patterns != 0))).all()


def test_a_delta_has_the_features_of_its_values(tmp_path: Path) -> None:
    base, target = small("nan_values", EVERYTHING)
    delta = oracle.write_delta(tmp_path / "delta", oracle.expected_patches(base, target), 6)
    assert of_delta(delta) == {PLAIN, "nan_values"}
    (tmp_path / "delta" / oracle.METADATA_FILE).unlink()
    assert of_delta(tmp_path / "delta") == set()


class Declares(Plain):
    """The right codec, declaring BF16 numbers alone."""

    capabilities = checked({f"-{name}" for name in BASIC}, CODEC, "it")


@pytest.mark.parametrize("feature", FEATURES[1:])
def test_what_is_not_declared_is_skipped_by_name(tmp_path: Path, feature: str) -> None:
    base, target = small(feature, EVERYTHING)
    engine = Guarded(Declares())
    with pytest.raises(pytest.skip.Exception, match=r"does not declare the capability") as found:
        engine.encode(base, target, tmp_path / "delta")
    assert getattr(found.value, "capability", None) in {feature, "float16", "mixed_dtypes"}
    assert not (tmp_path / "delta").exists()


def test_what_failed_alone_is_withdrawn(tmp_path: Path) -> None:
    """What needs it is not judged, by name; the rest is; sets that hold it are gone."""
    engine = Guarded(Plain())
    with pytest.raises(ValueError, match="broken"), trying(engine, "bool"):
        raise ValueError("broken")
    assert EVERYTHING - engine.capabilities == {"bool", "non_floating"}
    with pytest.raises(pytest.skip.Exception, match="not judged: needs bool, which failed alone") as found:
        engine.encode(*small("bool", EVERYTHING), tmp_path / "delta")
    assert getattr(found.value, "withdrawn", None) == "bool"
    engine.encode(*small("integers", EVERYTHING), tmp_path / "other")
    assert (tmp_path / "other").is_dir()


def test_every_dtype_is_a_feature_or_plain() -> None:
    assert OF_CODE.keys() | {"BF16"} == oracle.DTYPES.keys()


NEW = """
import torch
from conformance import oracle
from conformance.mutants.right import Plain


class Codec(Plain):
    name = "new"
    capabilities = Plain.capabilities | {"new_tensors"}
    lost = 0

    def encode(self, base, target, out):
        known = {name: tensor for name, tensor in target.items() if name in base}
        patches = [*self.find(base, known)]
        for name in target.keys() - base.keys():
            at = range(self.lost, target[name].numel())
            patches.append(oracle.delta_patch(name, target[name], list(at), target[name].reshape(-1)[self.lost:]))
        oracle.write_delta(out, sorted(patches, key=lambda patch: patch.name), oracle.total_elements(target))

    def apply(self, delta, weights):
        patches = self.read(delta)
        new = [patch for patch in patches if patch.name not in weights]
        for patch in new:
            if len(patch.indices) != patch.numel:
                raise ValueError("not whole")
        self.check([patch for patch in patches if patch not in new], weights)
        for patch in new[self.lost:]:
            weights[patch.name] = oracle.from_bits(patch.bits, patch.code, patch.shape)
        for patch in patches:
            if patch not in new:
                self.write(weights, patch)


class Loses(Codec):
    lost = 1
"""


@pytest.mark.parametrize(("name", "code"), [("Codec", 0), ("Loses", 1)])
def test_new_tensors_are_judged_where_they_are_declared(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "mine.py").write_text(NEW)
    chapter = str(CONFORMANCE / "test_codec_declines.py")
    found: Any = run(*QUIET, chapter, "-k", "new_tensor", "--engine", f"mine:{name}", cwd=tmp_path)
    assert found.code == code, found.text
    assert ("2 failed" in found.text) == bool(code)
