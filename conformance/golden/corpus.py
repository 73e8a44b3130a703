"""The golden vectors as an engine's tests read them; `golden` writes them, `vectors/README.md` defines them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import oracle
from ..inputs.strategies import capabilities_of

CORPUS = Path(__file__).parents[1] / "vectors"
KINDS = ("valid", "invalid")
"""The directories that are generated; the rest of the corpus is written by hand."""


@dataclass(frozen=True, slots=True)
class Vector:
    """One directory of the corpus."""

    path: Path
    expected: Mapping[str, Any]
    """What `expected.json` says."""

    @property
    def name(self) -> str:
        """`valid/FEATURE/CASE` or `invalid/FEATURE/FAULT`."""
        return "/".join(self.path.parts[-3:])

    @property
    def needs(self) -> set[str]:
        """Capabilities that an engine must have: those that `expected.json` names, and those that the files show."""
        needed = set(self.expected.get("needs", []))
        for file in ("base.safetensors", "expected.safetensors"):
            needed |= capabilities_of(self.state(file)) if self.has(file) else set()
        zeros = self.expected.get("zeros", {}).values()
        needed |= {"float8" for what in zeros if what["dtype"].startswith("F8")}
        return needed | ({"i64_positions"} if "reason" not in self.expected and self._needless_i64() else set())

    def _needless_i64(self) -> bool:
        """Whether a delta that is to be taken has I64 positions where I32 would do."""
        for delta in filter(Path.exists, self.deltas):
            shapes = json.loads((delta / oracle.METADATA_FILE).read_text(encoding="utf-8"))["layer_shapes"]
            codes = {entry.key: entry.code for entry in oracle.unpack((delta / oracle.DELTA_FILE).read_bytes())[0]}
            numels = [math.prod(shape) for shape in shapes]
            if any(codes[f"{i}.indices"] == "I64" and n <= oracle.I32_ELEMENTS for i, n in enumerate(numels)):
                return True
        return False

    @property
    def delta(self) -> Path:
        return self.path / "delta"

    @property
    def deltas(self) -> list[Path]:
        """The deltas to apply, in order: several, or the only one."""
        several = sorted(self.path.glob("deltas/*"), key=lambda folder: int(folder.name))
        return several or [self.delta]

    def has(self, file: str) -> bool:
        return (self.path / file).exists()

    def state(self, file: str) -> dict[str, Tensor]:
        """The state in `base.safetensors` or `expected.safetensors`."""
        return oracle.load_state(self.path / file)


def load(corpus: Path = CORPUS) -> list[Vector]:
    """Every vector, in the order of names; a directory without `expected.json` is an error."""
    folders = sorted(path for kind in KINDS for path in (corpus / kind).glob("*/*"))
    return [Vector(path, json.loads((path / "expected.json").read_text(encoding="utf-8"))) for path in folders]


def assert_whole(vectors: Sequence[Vector]) -> None:
    """Raise AssertionError where a good part of the corpus is missing: no vectors would fail nothing."""
    features = {tuple(vector.name.split("/")[:2]) for vector in vectors}
    assert len(vectors) > 300, f"{len(vectors)} vectors"
    assert {kind for kind, _ in features} == set(KINDS), f"kinds {sorted({kind for kind, _ in features})}"
    assert len(features) > 25, f"{len(features)} features: {sorted(features)}"
