"""How a row's deltas are written: the one place of the live suite that uses refdelta.

For refdelta's own backend the product is encoder and backend together, so refdelta encodes. Any other backend gets what
the suite's own oracle writes. Either way the truth comes from the target state, never from the delta.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from .. import oracle

Encode = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Path], None]


def encode_with_refdelta(base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
    """Write the delta from ``base`` to ``target`` into the directory ``out``."""
    from refdelta.encode import DeltaEncoder, write_delta

    write_delta(DeltaEncoder(base).encode(target), out)


def encode_with_oracle(base: Mapping[str, Tensor], target: Mapping[str, Tensor], out: Path) -> None:
    """The same by the suite's own writer."""
    oracle.write_delta(out, oracle.expected_patches(base, target), oracle.total_elements(base))
