"""Deltas that are told apart by their version, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refdelta import Delta, DeltaError, Lineage, TensorPatch, read_delta


def versioned(version: int, changed: int = 3) -> Delta:
    """A delta of ``changed`` elements, each of them ``version``."""
    patch = TensorPatch("w", (changed, 2), torch.arange(changed), torch.full((changed,), float(version)))
    return Delta((patch,), 2 * changed, Lineage("run", version))


def version_at(path: Path) -> int:
    """The version of the delta at ``path``."""
    lineage = read_delta(path).lineage
    assert lineage is not None
    return lineage.version


def refusal(attempt: Callable[[], object]) -> DeltaError:
    """The error that an attempt ends with."""
    with pytest.raises(DeltaError) as caught:
        attempt()
    return caught.value
