"""One fault of a codec is one cause: seven codecs, each `examples/numpy_codec` with one fault that a public codec had.

What the public codecs did stands in `conformance/README.md`'s sources; none of their code is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.suite.runs import CONFORMANCE, REPOSITORY, run

CODEC = (REPOSITORY / "examples" / "numpy_codec" / "codec.py").read_text()
DIFFER = "at = np.flatnonzero(old.bits != new.bits).astype(np.int64)"
FITS = 'need(held[patch.name][:2] == (patch.code, patch.shape), f"{patch.name}: another dtype or shape")'
PAIR = "        old, new = base[name], target[name]\n"
WRITE = "held[patch.name].bits[patch.positions] = patch.bits"
NUMBER = '''def same_number(old: Memory, new: Memory) -> Any:
    """Where both are zeros, with or without a sign."""
    plain = new.code in ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
    return (((old.bits | new.bits) << 1) == 0) & plain


def differences('''
HALF = f"""        for patch in patches:
            {FITS}
        for patch in patches:
            {WRITE}
"""
CAST = """    def cast(self, patch: Patch, tensor: Any) -> None:
        import torch

        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        dtypes = {code: getattr(torch, name) for name, code in CODES.items()}
        raw = torch.from_numpy(patch.bits.view(f"i{WIDTH[patch.code]}" if WIDTH[patch.code] > 1 else "u1").copy())
        values = raw.view(dtypes[patch.code])
        flat = tensor.view(-1)
        flat[torch.from_numpy(patch.positions)] = values.to(tensor.dtype)

    def encode("""

FAULTS: Mapping[str, tuple[tuple[str, str], str, list[tuple[str, str]]]] = {
    "compares values": (
        ("fails alone", "signed_zero"),
        "a change of the sign of zero is never sent",
        [
            (DIFFER, DIFFER.replace("old.bits != new.bits", "(old.bits != new.bits) & ~same_number(old, new)")),
            ("def differences(", NUMBER),
        ],
    ),
    "casts": (
        ("taken, and should be refused", "dtype_mismatch"),
        "values of another dtype are cast instead of refused",
        [
            (FITS, 'need(held[patch.name][1] == patch.shape, f"{patch.name}: another shape")'),
            (
                WRITE,
                f"if held[patch.name].code == patch.code:\n                {WRITE}\n"
                "            else:\n                self.cast(patch, weights[patch.name])",
            ),
            ("    def encode(", CAST),
        ],
    ),
    "one dtype": (
        ("fails alone", "mixed_dtypes"),
        "the values of the first tensor's width are taken for everybody's",
        [
            (
                "            found.append(Patch(name, new.code, new.shape, at, new.bits[at]))",
                "            first = target[sorted(target)[0]]\n"
                "            low = new.bits.dtype.type(0xF0)\n"
                "            kept = new.bits[at] if new.code == first.code else new.bits[at] & low\n"
                "            found.append(Patch(name, new.code, new.shape, at, kept))",
            )
        ],
    ),
    "no scalars": (
        ("fails alone", "scalars"),
        "any 0-d tensor crashes the snapshot",
        [
            (
                "        old, new = base[name], target[name]\n",
                "        old, new = base[name], target[name]\n        old.shape[0]\n",
            )
        ],
    ),
    "loses NaN": (
        ("fails alone", "nan_values"),
        "NaN stands for unchanged",
        [
            (
                DIFFER,
                f"{DIFFER}\n        at = at[~is_nan(new.code, new.bits[at])]",
            ),
            (
                "def differences(",
                '''def is_nan(code: str, bits: Bits) -> NDArray[np.bool_]:
    """Which bit patterns are NaNs, by torch."""
    import torch

    if code[0] not in "FBC" or code == "BOOL":
        return np.zeros(len(bits), dtype=bool)
    dtypes = {code: getattr(torch, name) for name, code in CODES.items()}
    raw = torch.from_numpy(bits.view("u1" if WIDTH[code] == 1 else f"i{WIDTH[code]}").copy())
    wide = torch.complex128 if code == "C64" else torch.float64
    return raw.view(dtypes[code]).to(wide).isnan().numpy()


def differences(''',
            ),
        ],
    ),
    "true bools": (
        ("fails alone", "bool"),
        "a bool tensor becomes all true",
        [(WRITE, f'{WRITE} if patch.code != "BOOL" else 1')],
    ),
    "half written": (
        ("the state changed in a refusal", ""),
        "tensors before a faulty one stay written",
        [(HALF, f"        for patch in patches:\n            {FITS}\n            {WRITE}\n")],
    ),
}
"""Name -> the cause that must be found, what the codec does, and the replacements that make it do so."""
BF16_ALONE = """
import os

from codec import Codec as Whole, Refused


class Codec(Whole):
    name = "bf16"
    capabilities = frozenset({"-float16", "-float32", "-scalars", "-signed_zero", "-mixed_dtypes", "-empty_tensors"})

    def encode(self, base, target, out):
        self.only(base, target)
        super().encode(base, target, out)

    def apply(self, delta, weights):
        self.only(weights)
        super().apply(delta, weights)

    def only(self, *states):
        for state in states:
            for name, tensor in state.items():
                if str(tensor.dtype) != "torch.bfloat16" or not tensor.dim() or not tensor.numel():
                    self.refuse(name)
                if (tensor.isnan() | ((tensor == 0) & tensor.signbit())).any():
                    self.refuse(name)

    def refuse(self, name):
        with open(os.path.join(os.path.dirname(__file__), "seen.txt"), "a") as file:
            print(os.environ["PYTEST_CURRENT_TEST"], file=file)
        raise Refused(f"{name}: not mine")


CODEC = Codec()
"""


QUICK = ("compares values",)
"""Those that each run tries; a run of the whole suite takes ten seconds of processor time."""


def report_on(name: str, home: Path) -> dict[str, Any]:
    """The report of the whole suite on the codec with this fault; `bf16` is a codec of BF16 numbers alone."""
    text = CODEC
    for old, new in FAULTS[name][2] if name in FAULTS else ():
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    (home / "codec.py").write_text(CODEC)
    (home / "mine.py").write_text(text if name in FAULTS else BF16_ALONE)
    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=smoke"]
    run(*options, str(CONFORMANCE), "--engine", "mine:CODEC", "--report", str(home / "report.json"), cwd=home)
    found: dict[str, Any] = json.loads((home / "report.json").read_text())
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in FAULTS]
)
def test_one_fault_is_one_cause(name: str, tmp_path: Path) -> None:
    found = report_on(name, tmp_path)
    assert [(cause["kind"], cause["detail"]) for cause in found["causes"]] == [FAULTS[name][0]]
    assert found["causes"][0]["tests"]
    assert found["verdict"] == "failed"


def test_what_is_taken_back_is_never_put_in(tmp_path: Path) -> None:
    """BF16 alone, without scalars, NaNs, negative zeros, empty tensors: green, and it refuses all else itself."""
    found = report_on("bf16", tmp_path)
    assert found["causes"] == []
    assert found["verdict"] == "passed"
    seen = {Path(line.partition("::")[0]).name for line in (tmp_path / "seen.txt").read_text().splitlines()}
    assert seen == {"test_codec_declines.py"}, "which gives engines what they do not declare"
    verdicts = {level["id"]: level["verdict"] for level in found["levels"]}
    assert verdicts["applier"] == verdicts["reader"] == verdicts["writer"] == "passed"
