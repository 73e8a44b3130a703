"""routes: routing a patch and writing equals writing and laying out densely, on every rank of every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from . import oracle
from .engines.codecs import FullCodec
from .findings import require
from .oracle import Bits, assert_bit_equal
from .oracle.layouts import LAYOUTS, Layout, lay_out

pytestmark = [pytest.mark.check("routes"), pytest.mark.needs("routes")]

CODE = "BF16"
Arrays = dict[str, Bits]


def _filled(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """Different bits everywhere, so that no slice can stand for another."""
    rng = np.random.default_rng(seed)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    pool = rng.permutation(2**16)[:total].astype(np.uint16)
    arrays = {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name], pool = pool[:size].reshape(shape), pool[size:]
    return arrays


def _assert_routes(engine: FullCodec, layout: Layout, changes: Mapping[str, Sequence[int]]) -> None:
    """`changes`: positions to change per checkpoint tensor; the new bits are the old ones inverted."""
    sources = _filled(layout.sources, 1)
    before = lay_out(layout, sources, _filled(layout.params, 2))
    after = {name: array.copy() for name, array in sources.items()}
    routed = {name: array.copy() for name, array in before.items()}
    for name, positions in changes.items():
        at = np.array(positions, dtype=np.int64)
        flat = after[name].reshape(-1)
        flat[at] = ~flat[at]
        values = oracle.from_bits(flat[at], CODE, (len(at),))
        for param, indices, new in engine.route(layout, name, torch.from_numpy(at), values):
            wanted = oracle.DTYPES[CODE]
            require(new.dtype == wanted, f"dtype of values of {name}", tensor=param, expected=wanted, found=new.dtype)
            routed[param].reshape(-1)[indices.numpy()] = oracle.bits(new)
    expected = lay_out(layout, after, before)
    for param, array in expected.items():
        assert_bit_equal({param: _tensor(array)}, {param: _tensor(routed[param])}, layout.name)


def _tensor(array: Bits) -> Tensor:
    return oracle.from_bits(array.reshape(-1), CODE, array.shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_element(engine: FullCodec, layout: Layout) -> None:
    """One patch per tensor that changes all of it."""
    everything = {name: range(int(np.prod(shape))) for name, shape in layout.sources.items()}
    _assert_routes(engine, layout, everything)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_each_element_alone(engine: FullCodec, layout: Layout) -> None:
    for name, shape in layout.sources.items():
        for position in range(int(np.prod(shape))):
            _assert_routes(engine, layout, {name: [position]})


@given(st.data())
def test_any_elements(engine: FullCodec, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    changes = {}
    for name, shape in layout.sources.items():
        positions = st.integers(0, int(np.prod(shape)) - 1)
        changes[name] = sorted(data.draw(st.sets(positions, max_size=20)))
    _assert_routes(engine, layout, changes)
