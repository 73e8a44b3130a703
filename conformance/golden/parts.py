"""What golden vectors are made of: tensors from formulas, files as bytes, and what is stated about them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .. import oracle
from ..oracle import DELTA_FILE, METADATA_FILE, Bits, Draft, Patch, State, digests


@dataclass(frozen=True, slots=True)
class Vector:
    """One directory of the corpus."""

    path: str
    """`valid/FEATURE/CASE` or `invalid/FEATURE/FAULT`: its name."""
    files: Mapping[str, bytes]
    """Content by path below the directory."""
    expected: Mapping[str, object]
    """What `expected.json` says."""

    def content(self) -> dict[str, bytes]:
        """Every file by its path in the corpus."""
        files = {**self.files, "expected.json": json_bytes(self.expected)}
        return {f"{self.path}/{name}": content for name, content in files.items()}


def json_bytes(value: object) -> bytes:
    """JSON as the corpus has it: indented, UTF-8, a line feed at the end."""
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()


# -- states ----------------------------------------------------------------------------------------------------------


def words(code: str, count: int, salt: int = 0) -> Bits:
    """`count` bit patterns of a dtype: the high bits of (salt + 1, salt + 2, ...) times 2^64 / golden ratio."""
    products = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    high = products >> np.uint64(64 - 8 * oracle.width(code))
    return (high & np.uint64(1) if code == "BOOL" else high).astype(oracle.unsigned(code))


def tensor(code: str, shape: Sequence[int], *patterns: int, salt: int = 0) -> Tensor:
    """A tensor of these bit patterns; without any, of `words`."""
    count = int(np.prod(shape, dtype=object)) if shape else 1
    return oracle.from_bits(list(patterns) if patterns else words(code, count, salt), code, shape)


def flipped(base: Tensor, positions: Iterable[int], mask: int = 1) -> Tensor:
    """A copy with the bits of `mask` flipped at flat positions."""
    code, patterns = oracle.CODES[base.dtype], oracle.bits(base)
    at = list(positions)
    patterns[at] ^= patterns.dtype.type(mask)
    return oracle.from_bits(patterns, code, base.shape)


def packed_state(state: State) -> bytes:
    """A state as the bytes of a safetensors file, in name order."""
    with tempfile.TemporaryDirectory() as folder:
        return oracle.save_state(Path(folder) / "state", state).read_bytes()


# -- deltas ----------------------------------------------------------------------------------------------------------


def delta_files(parts: Draft, folder: str = "delta") -> dict[str, bytes]:
    """Both files of a delta, below `folder`."""
    payload = parts.files()[DELTA_FILE]
    return {f"{folder}/{DELTA_FILE}": payload, f"{folder}/{METADATA_FILE}": json_bytes(parts.metadata)}


def draft_of(base: State, target: State) -> Draft:
    """The canonical delta between two states, taken apart."""
    return oracle.draft(oracle.expected_patches(base, target), oracle.total_elements(base))


def inverse_patches(patches: Iterable[Patch], base: State) -> list[Patch]:
    """The same positions with the bits that `base` has there."""
    return [replace(patch, bits=oracle.bits(base[patch.name])[patch.indices]) for patch in patches]


def composed_patches(chain: Sequence[Sequence[Patch]]) -> list[Patch]:
    """The positions of all patches, the later ones' bits, in name order."""
    kinds: dict[str, Patch] = {}
    found: dict[str, dict[int, Any]] = {}
    for patch in (patch for patches in chain for patch in patches):
        kinds[patch.name] = patch
        found.setdefault(patch.name, {}).update(zip(patch.indices.tolist(), patch.bits, strict=True))
    return [
        replace(kinds[name], indices=np.array(sorted(new)), bits=np.array([new[at] for at in sorted(new)]))
        for name, new in sorted(found.items())
    ]


def needs_of(*states: State) -> list[str]:
    """Capabilities that an engine needs for these dtypes."""
    codes = {oracle.CODES[t.dtype] for state in states for t in state.values()}
    needs = {"non_floating": bool(codes - oracle.FLOATING), "sub_byte": oracle.SUB_BYTE in codes}
    return [capability for capability, needed in needs.items() if needed]


def lineage_of(base: State, target: State, version: int, **fields: object) -> dict[str, object]:
    """A lineage that says all that one may, but for the payload's hash and a part; None takes a field out."""
    changed = {patch.name for patch in oracle.expected_patches(base, target)}
    layers = {n: digests.text(digests.tensor_digest(n, target[n])) for n in sorted(changed)}
    said = {
        "run_id": "run-7",
        "version": version,
        "base_version": version - 1,
        "base_digest": digests.state_digest(base),
        "digest": digests.state_digest(target),
        "layer_digests": layers,
        **fields,
    }
    return {key: value for key, value in said.items() if value is not None}


# -- the corpus ------------------------------------------------------------------------------------------------------


class Corpus:
    """Collects vectors, each under a path of its own."""

    def __init__(self) -> None:
        self.vectors: dict[str, Vector] = {}

    def add(self, path: str, why: str, files: Mapping[str, bytes], **expected: object) -> None:
        assert path not in self.vectors, f"two vectors at {path}"
        said = {key: value for key, value in expected.items() if value not in (None, [], False)}
        self.vectors[path] = Vector(path, dict(files), {"why": why, **said})
