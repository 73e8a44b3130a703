"""The state digest: as SPEC.md defines it, additive, bound to names, dtypes and shapes, sensitive to every bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import oracle
from conformance.inputs import strategies
from conformance.oracle import digests
from refdelta import DeltaError, Reason, TensorPatch, diff
from refdelta.codec import bits
from refdelta.codec import digests as digest
from tests.codec.support import LAYOUTS, bf16, strided_like

ALL = tuple(oracle.DTYPES)
State = Mapping[str, Tensor]


@pytest.fixture(params=["small blocks", "usual blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and blocks of a few elements, so that small tensors have several."""
    if request.param == "small blocks":
        monkeypatch.setattr(bits, "_CPU_CHUNK", 13)
        monkeypatch.setattr(digest, "_CPU_BLOCK", 5)


def patterns(code: str, *values: int, shape: tuple[int, ...] | None = None) -> Tensor:
    return oracle.from_bits(
        np.array(values, dtype=np.uint64).astype(oracle.unsigned(code)), code, shape or (len(values),)
    )


# As defined


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", ALL)
def test_every_dtype_and_layout_has_the_digest_that_the_specification_gives(code: str, layout: str) -> None:
    for shape in ((), (1,), (3, 5), (2, 3, 7), (0, 3)):
        count = int(np.prod(shape))
        tensor = oracle.from_bits(np.resize(strategies.SPECIALS[code], count), code, shape)
        expected = digests.text(digests.tensor_digest("m.w", tensor))
        assert digest.tensor_digest("m.w", strided_like(tensor, layout)) == expected, (shape, tensor)


@pytest.mark.usefixtures("blocks")
def test_any_state_has_the_digest_that_the_specification_gives() -> None:
    @given(strategies.states(ALL))
    def check(state: State) -> None:
        assert digest.state_digest(state) == digests.state_digest(state)
        assert digest.state_digest({name: state[name] for name in sorted(state, reverse=True)}) == digests.state_digest(
            state
        )

    check()


def test_blocks_and_pieces_of_their_usual_sizes() -> None:
    """Borders at 2^15 and 2^20 elements, in one row and in rows that no block divides; one thread and several."""
    words = (np.arange(3 * 699_051, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56)
    flat = torch.from_numpy(words.astype(np.uint8))
    seed, header = digests.seed_and_header("w", "U8", (3, 699_051))
    expected = digests.text(header + _plain_sum(seed, words))
    rows = flat.view(3, 699_051)
    transposed = rows.t().contiguous().t()
    found = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found |= {digest.tensor_digest("w", rows), digest.tensor_digest("w", transposed)}
    finally:
        torch.set_num_threads(before)
    assert found == {expected}


def _plain_sum(seed: int, words: oracle.Bits) -> int:
    """The specification's sum in numpy, all at once."""
    word = (np.uint64(seed) + np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) ^ words
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((word ^ (word >> np.uint64(31))).sum(dtype=np.uint64))


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64", "C64"])
def test_signed_words_give_the_same_terms(code: str) -> None:
    """What runs on other devices, run here."""
    view = bits.bit_view(oracle.from_bits(strategies.SPECIALS[code], code, (len(strategies.SPECIALS[code]),)))
    keys = torch.arange(len(view)) * 0x1E3779B97F4A7C15 - 2**62
    assert digest._mixed_of_signed(keys.clone(), view).tolist() == digest._mixed(keys.clone(), view).tolist()


@pytest.mark.parametrize("block", [1, 3, 1 << 15])
def test_terms_add_up_to_the_share(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element's own term, whatever the size of the pieces in which they are mixed; none of nothing."""
    monkeypatch.setattr(digest, "_CPU_BLOCK", block)
    values = torch.tensor([0x3F80, -0x8000, 0x7FC1, 0, 5], dtype=torch.int16).view(torch.bfloat16)
    indices = torch.tensor([0, 3, 4, 10, 14], dtype=torch.int32)
    terms = digest.terms_at("w", torch.bfloat16, (3, 5), indices, values)
    assert terms.shape == (5,)
    assert digest.text(int(terms.sum())) == digest.positions_digest("w", torch.bfloat16, (3, 5), indices, values)
    one = digest.positions_digest("w", torch.bfloat16, (3, 5), indices[2:3], values[2:3])
    assert digest.text(int(terms[2])) == one
    assert digest.terms_at("w", torch.bfloat16, (3, 5), indices[:0], values[:0]).tolist() == []


def test_mix64_is_a_bijection() -> None:
    """Every step has an inverse; applied in reverse order they give every word back."""
    rng = np.random.default_rng(5)
    for word in [0, 1, 2**63, 2**64 - 1, *map(int, rng.integers(0, 2**63, 200))]:
        back = digests.mix64(word)
        for shift, factor in reversed(digest.MIX):
            product = back * pow(factor, -1, 2**64) % 2**64
            back = product
            for _ in range(64 // shift):
                back = product ^ (back >> shift)
        assert back == word


def test_positions_beyond_32_bits() -> None:
    shape = (2**33, 2**20)
    positions = [0, 2**31 - 1, 2**31, 2**32, 2**53 - 1]
    values = patterns("F16", 0x8000, 0x3C00, 0x7E01, 1, 0xFFFF)
    seed, _ = digests.seed_and_header("w", "F16", shape)
    expected = sum(
        digests.mix64(digests.key(seed, at) ^ int(v)) for at, v in zip(positions, oracle.bits(values), strict=True)
    )
    assert digest.positions_digest("w", torch.float16, shape, torch.tensor(positions), values) == digests.text(expected)


# Additive


@pytest.mark.usefixtures("blocks")
def test_disjoint_shares_add_up_in_any_order() -> None:
    @given(strategies.states(ALL, min_tensors=1), st.integers(1, 5), st.randoms(use_true_random=False))
    def check(state: State, ranks: int, random: Random) -> None:
        shares = []
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            positions = random.sample(range(tensor.numel()), tensor.numel())
            shares.append(digest.header_digest(name, tensor.dtype, shape))
            for rank in range(ranks):
                at = torch.tensor(positions[rank::ranks], dtype=random.choice([torch.int32, torch.int64]))
                values = bits.gather(tensor, at)
                shares.append(digest.positions_digest(name, tensor.dtype, shape, at, values))
        random.shuffle(shares)
        assert digest.add(*shares) == digest.state_digest(state)
        assert digest.subtract(digest.state_digest(state), *shares) == digest.ZERO

    check()


@pytest.mark.usefixtures("blocks")
def test_runs_of_neighbours_add_up() -> None:
    tensor = bf16(*range(0x3F00, 0x3F00 + 35)).view(5, 7)
    shares = [digest.header_digest("w", tensor.dtype, (5, 7))]
    for start, stop in itertools.pairwise([0, 3, 3, 14, 34, 35]):
        shares.append(digest.run_digest("w", tensor.dtype, (5, 7), start, tensor.view(-1)[start:stop]))
    assert digest.add(*shares) == digest.tensor_digest("w", tensor)
    assert digest.run_digest("w", tensor.dtype, (5, 7), 7, tensor[1:3].t().contiguous().t()) == digest.run_digest(
        "w", tensor.dtype, (5, 7), 7, tensor.view(-1)[7:21]
    )


def test_layers_add_up() -> None:
    state = {"a": bf16(1, 2, 3), "b": torch.ones(2, 3), "c": torch.zeros(0, 4)}
    layers = digest.layer_digests(state)
    assert list(layers) == ["a", "b", "c"]
    assert digest.add(*layers.values()) == digest.state_digest(state)
    assert digest.state_digest({}) == digest.ZERO == "rd1:0000000000000000"


# Bound to names, dtypes, shapes and places


def test_states_that_differ_in_anything_have_different_digests() -> None:
    zeros = torch.zeros(2, 3, dtype=torch.float16)
    states: list[State] = [
        {},
        {"w": zeros},
        {"v": zeros},
        {"w": zeros.view(3, 2)},
        {"w": zeros.view(6)},
        {"w": zeros.view(1, 2, 3)},
        {"w": zeros.view(torch.bfloat16)},
        {"w": zeros.view(torch.int16)},
        {"w": zeros.view(torch.uint8)},
        {"w": torch.zeros(2, 3)},
        {"w": -zeros},
        {"w": zeros, "x": zeros},
        {"w": zeros, "empty": torch.zeros(0)},
        {"w": zeros, "empty": torch.zeros(0, 3)},
        {"w": zeros, "scalar": torch.zeros(())},
        {"w": zeros, "scalar": torch.zeros(1)},
        {"w": bf16(1, 2, 3), "v": bf16(4, 5, 6)},
        {"v": bf16(1, 2, 3), "w": bf16(4, 5, 6)},
        {"w": bf16(1, 3, 2), "v": bf16(4, 5, 6)},
        {"w": bf16(1, 2, 6), "v": bf16(4, 5, 3)},
        {"w.v": bf16(1, 2, 3)},
    ]
    found = [digest.state_digest(state) for state in states]
    assert len(set(found)) == len(states), found


@pytest.mark.parametrize("code", ["U8", "BF16", "F32", "F64"])
def test_every_bit_of_every_element_counts(code: str) -> None:
    """One flipped bit always moves the digest: mix64 is a bijection. No two flips move it alike, either."""
    base = np.resize(strategies.SPECIALS[code], 15)
    found = {digest.tensor_digest("w", oracle.from_bits(base, code, (3, 5)))}
    for at, bit in itertools.product(range(15), range(8 * oracle.width(code))):
        flipped = base.copy()
        flipped[at] ^= oracle.unsigned(code).type(1 << bit)
        found.add(digest.tensor_digest("w", oracle.from_bits(flipped, code, (3, 5))))
    assert len(found) == 1 + 15 * 8 * oracle.width(code)


@pytest.mark.parametrize("code", ["F8_E5M2", "F16", "BF16", "F32", "F64", "C64"])
def test_sign_flips_in_pairs_do_not_cancel(code: str) -> None:
    """A linear sum of bits cannot see two flips of the highest bit."""
    base = np.resize(strategies.SPECIALS[code], 15)
    sign = oracle.unsigned(code).type(1 << (8 * oracle.width(code) - 1))
    found = {digest.tensor_digest("w", oracle.from_bits(base, code, (3, 5)))}
    for pair in itertools.combinations(range(15), 2):
        flipped = base.copy()
        flipped[list(pair)] ^= sign
        found.add(digest.tensor_digest("w", oracle.from_bits(flipped, code, (3, 5))))
    assert len(found) == 1 + 15 * 14 // 2


def test_tensors_of_zeros_count() -> None:
    for zeros in (torch.zeros(2, 3), torch.zeros(()), torch.zeros(0, 3), torch.zeros(5, dtype=torch.bool)):
        with_it = digest.state_digest({"w": bf16(1, 2), "z": zeros})
        assert with_it != digest.state_digest({"w": bf16(1, 2)})


def test_a_module_counts_a_tied_tensor_once_under_its_first_name() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    second.weight = first.weight
    module = nn.ModuleDict({"a": first, "b": second})
    module.register_buffer("steps", torch.tensor(7))
    expected = {"a.weight": first.weight, "steps": torch.tensor(7)}
    assert digest.state_digest(module) == digests.state_digest(expected)
    assert list(digest.layer_digests(module)) == ["steps", "a.weight"]


# Rolling


@pytest.mark.usefixtures("blocks")
def test_rolling_equals_computing_anew() -> None:
    @given(strategies.pairs(ALL))
    def check(pair: tuple[State, State]) -> None:
        base, target = pair
        rolled, layers = digest.state_digest(base), digest.layer_digests(base)
        for patch in diff(base, target).patches:
            old = bits.gather(base[patch.name], patch.indices)
            rolled = digest.roll_digest(rolled, patch, old)
            layers[patch.name] = digest.roll_digest(layers[patch.name], patch, old)
        assert rolled == digest.state_digest(target)
        assert layers == digest.layer_digests(target)

    check()


def test_rolling_with_other_old_values_ends_elsewhere() -> None:
    base, target = {"w": bf16(1, 2, 3)}, {"w": bf16(1, 9, 3)}
    (patch,) = diff(base, target).patches
    assert digest.roll_digest(digest.state_digest(base), patch, bf16(7)) != digest.state_digest(target)


# Texts and refusals

ZEROS = 16 * "0"
NO_DIGESTS = ["", "rd1:", ZEROS, f"rd1:{ZEROS[1:]}", f"rd1:0{ZEROS}", f"rd2:{ZEROS}", f"RD1:{ZEROS}", f"rd1:{ZEROS}\n"]
NO_DIGESTS += [f" rd1:{ZEROS}", "rd1:00000000000000FF", "rd1:000000000000000g"]


@pytest.mark.parametrize("text", NO_DIGESTS)
def test_texts_that_are_no_digests(text: str) -> None:
    _refused(Reason.BAD_OPTION, lambda: digest.parse(text))
    _refused(Reason.BAD_OPTION, lambda: digest.add(digest.ZERO, text))
    _refused(Reason.BAD_OPTION, lambda: digest.subtract(digest.ZERO, text))


def test_numbers_and_texts() -> None:
    assert digest.parse("rd1:00000000000000ff") == 255
    assert digest.add() == digest.ZERO
    assert digest.add("rd1:ffffffffffffffff", "rd1:0000000000000002") == "rd1:0000000000000001"
    assert digest.subtract("rd1:0000000000000001", "rd1:0000000000000002") == "rd1:ffffffffffffffff"


def test_what_has_no_digest() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    _refused(Reason.DTYPE_MISMATCH, lambda: digest.positions_digest("w", torch.float16, (3,), one, torch.ones(1)))
    _refused(Reason.LENGTH_MISMATCH, lambda: digest.positions_digest("w", torch.float32, (3,), one, torch.ones(2)))
    _refused(
        Reason.LENGTH_MISMATCH, lambda: digest.positions_digest("w", torch.float32, (3,), one[None], torch.ones(1, 1))
    )
    _refused(Reason.DTYPE_MISMATCH, lambda: digest.run_digest("w", torch.float16, (3,), 0, torch.ones(1)))
    _refused(Reason.UNSUPPORTED_DTYPE, lambda: digest.state_digest({"w": torch.ones(2, dtype=torch.complex128)}))
    _refused(Reason.UNSUPPORTED_DTYPE, lambda: digest.state_digest({"w": torch.ones(2, device="meta")}))
    _refused(Reason.UNSUPPORTED_DTYPE, lambda: digest.header_digest("w", torch.complex128, (2,)))
    _refused(Reason.BAD_NAME, lambda: digest.state_digest({"": torch.ones(2)}))
    _refused(Reason.BAD_SHAPE, lambda: digest.header_digest("w", torch.float32, (2**32, 2**31)))
    patch = TensorPatch("w", (3,), one, torch.ones(1))
    _refused(Reason.DTYPE_MISMATCH, lambda: digest.roll_digest(digest.ZERO, patch, bf16(1)))
    _refused(Reason.LENGTH_MISMATCH, lambda: digest.roll_digest(digest.ZERO, patch, torch.ones(2)))


def _refused(reason: Reason, attempt: Callable[[], object]) -> None:
    with pytest.raises(DeltaError) as caught:
        attempt()
    assert caught.value.reason is reason
