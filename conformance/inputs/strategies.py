"""Hypothesis strategies for states, changes, destinations and corruptions; public, for anybody's tests.

    states(codes)         a checkpoint: name -> tensor; every dtype in `codes`, scalars, empty tensors, non-square 1-D
                          to 3-D shapes, awkward names, more than ten tensors in some draws, special bit patterns
    pairs(codes)          (base, target): equal names, shapes and dtypes, from nothing changed to everything, or at a
                          chosen density
    round_trips(codes)    (a, b, a): there and back
    chains(codes, n)      n states, each a change of the one before
    loose_deltas(codes)   what a lenient writer may send: (base, patches, "I32" or "I64"), layers in any order, some
                          positions keeping their bits
    placements(state)     the state in memory of other strides and offsets
    aliased(codes)        a change of a state in which further names stand for the same memory
    corrupted(codes)      the files of a delta with something wrong in them, of every kind

`codes` are safetensors dtype codes, or a `Domain`: codes, and whether NaNs and needless I64 positions are drawn;
`LEAST` is what every engine must take, `codes_for(capabilities)` what one may.
Each draw tells Hypothesis its labels (`conformance.inputs.labels`), for `--hypothesis-show-statistics`; `LABELLED`
lists every strategy with all of its labels, and the suite's own tests see that none is never drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from hypothesis import event
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from ..engines import capabilities
from ..oracle import (
    CODES,
    DTYPES,
    FLOATING,
    SUB_BYTE,
    Bits,
    Patch,
    State,
    bits,
    draft,
    expected_patches,
    from_bits,
    total_elements,
    unsigned,
    width,
)
from . import labels
from .corruptions import CORRUPTIONS
from .labels import IEEE
from .memory import KINDS, Aliased, Placed

Draw = Callable[[st.SearchStrategy[Any]], Any]
P = ParamSpec("P")
T = TypeVar("T")


def _telling(
    labels_of: Callable[[Any], set[str]],
) -> Callable[[Callable[P, st.SearchStrategy[T]]], Callable[P, st.SearchStrategy[T]]]:
    """Let a strategy tell Hypothesis the labels of each draw."""

    def told(drawn: T) -> T:
        for label in sorted(labels_of(drawn)):
            event(label)
        return drawn

    def decorate(make: Callable[P, st.SearchStrategy[T]]) -> Callable[P, st.SearchStrategy[T]]:
        @wraps(make)
        def telling(*args: P.args, **kwargs: P.kwargs) -> st.SearchStrategy[T]:
            return make(*args, **kwargs).map(told)

        return telling

    return decorate


_OTHER_FLOATS = {
    "F8_E4M3": (0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE, 0x7F, 0xFF),
    "F8_E4M3FNUZ": (0x00, 0x80, 0x01, 0x81, 0x07, 0x7F, 0xFF),
    "F8_E5M2FNUZ": (0x00, 0x80, 0x01, 0x81, 0x03, 0x7F, 0xFF),
    "F8_E8M0": (0x00, 0x01, 0x7F, 0xFE, 0xFF),
    "F4": (0x00, 0x88, 0x08, 0x80, 0x71, 0xFF),
}


def _ieee_specials(exponent: int, mantissa: int) -> list[int]:
    sign, infinity = 1 << (exponent + mantissa), ((1 << exponent) - 1) << mantissa
    quiet, ones = 1 << (mantissa - 1), (1 << mantissa) - 1
    positive = [
        0,  # zero
        1,  # smallest subnormal
        ones,  # largest subnormal
        1 << mantissa,  # smallest normal
        infinity - 1,  # largest finite
        infinity,
        infinity | quiet,
        infinity | 1,  # signalling
        infinity | ones,
    ]
    return positive + [sign | pattern for pattern in positive]


def _specials(code: str) -> Bits:
    if code in IEEE:
        patterns: Iterable[int] = _ieee_specials(*IEEE[code])
    elif code == "C64":
        halves = _ieee_specials(*IEEE["F32"])
        patterns = [real | halves[-1 - at] << 32 for at, real in enumerate(halves)]
    elif code == "BOOL":
        patterns = (0, 1)
    else:
        top = 1 << (8 * width(code) - 1)
        patterns = _OTHER_FLOATS.get(code, (0, 1, top - 1, top, 2 * top - 1))
    return np.array(list(patterns), dtype=unsigned(code))


SPECIALS: Mapping[str, Bits] = {code: _specials(code) for code in DTYPES}
"""Bit patterns per dtype that arithmetic treats specially: zeros, subnormals, infinities, NaNs, extremes."""

LEAST = ("BF16", "F16", "F32")
"""The dtypes that an engine takes unless it takes them back."""
_CODES_OF = {
    "float16": ("F16",),
    "float32": ("F32",),
    "float64": ("F64",),
    **{code.lower().replace("f8_", "float8_"): (code,) for code in DTYPES if code.startswith("F8")},
    "sub_byte": (SUB_BYTE,),
    "integers": tuple(code for code in DTYPES if code[0] in "IU"),
    "bool": ("BOOL",),
    "complex": ("C64",),
}


class Domain(tuple[str, ...]):
    """Dtype codes, and what else may be drawn."""

    nan: bool
    """NaNs among the values."""
    i64: bool
    """I64 positions where I32 would do."""
    signed_zero: bool
    scalars: bool
    empty: bool
    """Tensors without elements."""
    mixed: bool
    """Several dtypes in one state."""

    def __new__(
        cls,
        codes: Iterable[str],
        *,
        nan: bool = True,
        i64: bool = True,
        signed_zero: bool = True,
        scalars: bool = True,
        empty: bool = True,
        mixed: bool = True,
    ) -> Domain:
        made = super().__new__(cls, codes)
        made.nan, made.i64, made.signed_zero = nan, i64, signed_zero
        made.scalars, made.empty, made.mixed = scalars, empty, mixed
        return made

    def __repr__(self) -> str:
        return f"Domain({len(self)} dtypes, {vars(self)})"


ALL = Domain(DTYPES)


def _nan(codes: Sequence[str]) -> bool:
    return not isinstance(codes, Domain) or codes.nan


def codes_for(declared: Iterable[str]) -> Domain:
    """What an engine that declares these capabilities must take; ``-name`` takes a basic one back."""
    return domain_of(capabilities.checked(declared, capabilities.CODEC, "It"))


def domain_of(offered: Collection[str]) -> Domain:
    """What an engine must take that offers these capabilities, and no others."""
    more = {code for capability, codes in _CODES_OF.items() if capability in offered for code in codes}
    return Domain(
        (code for code in DTYPES if code == "BF16" or code in more),
        nan="nan_values" in offered,
        i64="i64_positions" in offered,
        signed_zero="signed_zero" in offered,
        scalars="scalars" in offered,
        empty="empty_tensors" in offered,
        mixed="mixed_dtypes" in offered,
    )


def capabilities_of(state: State) -> set[str]:
    """What an engine must offer to take this state."""
    codes = {CODES[tensor.dtype] for tensor in state.values()}
    needed = {capability for capability, of in _CODES_OF.items() if codes & set(of)}
    nan = any(is_nan(CODES[tensor.dtype], bits(tensor)).any() for tensor in state.values())
    return needed | ({"nan_values"} if nan else set())


# -- names and shapes ------------------------------------------------------------------------------------------------

_ODD_NAMES = (
    "0.indices",
    "1.values",
    "w.indices",
    "w.values",
    "__metadata__",
    "layer_names",
    "W",
    "w",
    "é",
    "e\u0301",
    "gewicht.β.層",
    "\uff5e",
    "\U0001f642.weight",
    'quote".back\\slash',
    "tab\tnew\nline",
    " ",
    "10",
    "9",
    "a" * 200,
    "層" * 200,
)


def names() -> st.SearchStrategy[str]:
    """One tensor name: usual, or awkward."""
    usual = st.builds("model.layers.{}.{}.weight".format, st.integers(0, 120), st.sampled_from(["q_proj", "o", "norm"]))
    free = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
    return st.one_of(usual, st.sampled_from(_ODD_NAMES), free)


@st.composite
def shapes(draw: Draw, codes: Sequence[str] = ALL) -> tuple[int, ...]:
    """One shape: a scalar, empty, or 1-D to 3-D with different sizes on every axis; at most about 500 elements."""
    domain = codes if isinstance(codes, Domain) else ALL
    rare = [*(["scalar"] if domain.scalars else []), *(["empty"] if domain.empty else [])]
    kind = draw(st.sampled_from([*rare, 1, 1, 2, 2, 2, 3]))
    if kind == "scalar":
        return ()
    if kind == "empty":
        return tuple(draw(st.sampled_from([(0,), (3, 0), (0, 5), (2, 0, 3)])))
    if kind == 1:
        return (draw(st.one_of(st.integers(1, 12), st.sampled_from([64, 255, 256, 257]))),)
    return tuple(draw(st.lists(st.integers(1, 9), min_size=kind, max_size=kind, unique=True)))


# -- contents --------------------------------------------------------------------------------------------------------


def _valid(code: str, patterns: Bits) -> Bits:
    return (patterns & 1).astype(unsigned(code)) if code == "BOOL" else patterns


def is_nan(code: str, patterns: Bits) -> NDArray[np.bool_]:
    """Which bit patterns stand for NaN."""
    if (code not in FLOATING and code != "C64") or code == SUB_BYTE:
        return np.zeros(len(patterns), dtype=np.bool_)
    values = from_bits(patterns, code, (len(patterns),))
    found: NDArray[np.bool_] = values.to(torch.complex128 if code == "C64" else torch.float64).isnan().numpy()
    return found


def is_negative_zero(code: str, patterns: Bits) -> NDArray[np.bool_]:
    """Which bit patterns are a zero with its sign set; of complex numbers either half, of F4 pairs either value."""
    if code == "C64":
        raw = np.ascontiguousarray(patterns).view(np.uint32).reshape(-1, 2)
        return np.asarray((raw == 0x8000_0000).any(axis=1))
    if code == SUB_BYTE:
        return np.asarray(((patterns & 0x0F) == 0x08) | ((patterns & 0xF0) == 0x80))
    if code not in FLOATING or code.endswith(("FNUZ", "E8M0")):
        return np.zeros(len(patterns), dtype=np.bool_)
    return np.asarray(patterns == 1 << (8 * width(code) - 1))


def _plain(codes: Sequence[str], code: str, patterns: Bits, old: Bits | None = None) -> Bits:
    """The patterns without what is not in the domain; where there are ``old`` ones, still others than these."""
    found = patterns if _nan(codes) else _without_nan(code, patterns, old)
    if isinstance(codes, Domain) and not codes.signed_zero:
        number = np.where(old == 1, 2, 1) if old is not None else 1
        found = np.where(is_negative_zero(code, found), number, found).astype(unsigned(code))
    return found


def _without_nan(code: str, patterns: Bits, old: Bits | None = None) -> Bits:
    """The patterns with 1 in place of every NaN, or 2 where `old` is 1."""
    number = np.where(old == 1, 2, 1) if old is not None else 1
    return np.where(is_nan(code, patterns), number, patterns).astype(unsigned(code))


def _random(code: str, count: int, rng: Generator) -> Bits:
    raw = np.frombuffer(rng.bytes(count * width(code)), dtype=unsigned(code))
    return _valid(code, raw)


def _contents(code: str, count: int, kind: str, rng: Generator) -> Bits:
    """`count` bit patterns: zeros, special ones, random ones, or random with special ones among them."""
    if kind == "zeros":
        return np.zeros(count, dtype=unsigned(code))
    if kind == "special":
        return np.asarray(rng.choice(SPECIALS[code], count))
    random = _random(code, count, rng)
    if kind == "mixed":
        random = np.where(rng.random(count) < 0.3, rng.choice(SPECIALS[code], count), random)
    return random


CHANGES = ("any", "sign", "low_bit", "low_byte_kept", "special")
"""How changed bits differ: anyhow, in the sign, the lowest bit, only above the lowest byte, into special patterns."""


def _changed(code: str, old: Bits, kind: str, rng: Generator) -> Bits:
    """As many patterns, every one different from the old one."""
    dtype, bit_count = unsigned(code), 8 * width(code)
    masks = {"sign": 1 << (bit_count - 1), "low_bit": 1, "low_byte_kept": 1 << (bit_count - 2)}
    if code == "BOOL":
        return np.asarray(old ^ dtype.type(1))
    if kind in masks:
        return np.asarray(old ^ dtype.type(masks[kind]))
    new = rng.choice(SPECIALS[code], len(old)) if kind == "special" else _random(code, len(old), rng)
    return np.where(new == old, old ^ dtype.type(1), new)


_SIZES = (1, 2, 3, 0, 4, 6, 11, 12, 14)
"""Tensors in a state. Beyond ten, an order by text and one by number differ."""


@_telling(labels.state_labels)
@st.composite
def states(draw: Draw, codes: Sequence[str] = ALL, *, min_tensors: int = 0) -> dict[str, Tensor]:
    """A checkpoint state of up to 14 tensors, contiguous, in insertion order as drawn."""
    count = draw(st.sampled_from([size for size in _SIZES if size >= min_tensors]))
    chosen = draw(st.lists(names(), min_size=count, max_size=count, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = draw(st.permutations(list(codes)))
    if isinstance(codes, Domain) and not codes.mixed:
        order = order[:1]
    state: dict[str, Tensor] = {}
    for name in chosen:
        code, shape = order[len(state) % len(order)], draw(shapes(codes))
        kind = draw(st.sampled_from(["random", "mixed", "special", "zeros"]))
        patterns = _contents(code, int(np.prod(shape)), kind, rng)
        state[name] = from_bits(_plain(codes, code, patterns), code, shape)
    return state


_DENSITIES = ((0.0, 0.1, 0.5, 1.0), (0.001, 0.03), (1.0,), (0.0, 0.001), (0.5, 1.0), (0.0,), (1 / 3, 0.33, 0.34))


@st.composite
def changes_of(
    draw: Draw, base: State, density: float | None = None, *, codes: Sequence[str] = ALL
) -> dict[str, Tensor]:
    """A state like `base` with some bits changed: per tensor none, one, a few, a third, half or all elements.

    density: change this share of every tensor instead, in [0, 1], rounded up to whole elements; codes: whether to NaN.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    densities = draw(st.sampled_from(_DENSITIES)) if density is None else (density,)
    target = {}
    for name, tensor in base.items():
        code, new = CODES[tensor.dtype], bits(tensor)
        share, kind = rng.choice(densities), str(rng.choice(CHANGES))
        count = min(len(new), int(np.ceil(round(share * len(new), 6))))
        at = rng.choice(len(new), count, replace=False) if count else np.zeros(0, dtype=np.int64)
        changed = _changed(code, new[at], kind, rng)
        new[at] = _plain(codes, code, changed, new[at])
        target[name] = from_bits(new, code, tensor.shape)
    return target


@_telling(lambda pair: labels.change_labels(*pair))
@st.composite
def pairs(
    draw: Draw, codes: Sequence[str] = ALL, *, min_tensors: int = 0, density: float | None = None
) -> tuple[State, State]:
    """(base, target)."""
    # More than ten layers make their numbers two digits long; left to chance, so many tensors seldom change at once.
    many = draw(st.integers(0, 5)) == 0
    base = draw(states(codes, min_tensors=_SIZES[-1] if many else min_tensors))
    return base, draw(changes_of(base, 1.0 if many and density is None else density, codes=codes))


def round_trips(codes: Sequence[str] = ALL) -> st.SearchStrategy[tuple[State, State, State]]:
    """(a, b, a): every change is taken back."""
    return pairs(codes, min_tensors=1).map(lambda pair: (pair[0], pair[1], pair[0]))


@_telling(labels.chain_labels)
@st.composite
def chains(draw: Draw, codes: Sequence[str] = ALL, length: int = 4) -> list[State]:
    """`length` states, each a change of the one before."""
    chain: list[State] = [draw(states(codes, min_tensors=1))]
    while len(chain) < length:
        chain.append(draw(changes_of(chain[-1], codes=codes)))
    return chain


@_telling(lambda loose: labels.loose_labels(*loose))
@st.composite
def loose_deltas(draw: Draw, codes: Sequence[str] = ALL) -> tuple[State, tuple[Patch, ...], str]:
    """(base, patches, index code): a delta that a reader must take although no canonical writer emits it."""
    base, target = draw(pairs(codes, min_tensors=1))
    patches = [_with_kept(patch, base[patch.name], draw) for patch in expected_patches(base, target)]
    widths = ["I32", "I64"] if not isinstance(codes, Domain) or codes.i64 else ["I32"]
    return base, tuple(draw(st.permutations(patches))), draw(st.sampled_from(widths))


def _with_kept(patch: Patch, tensor: Tensor, draw: Draw) -> Patch:
    """The patch, at times with every other position too, keeping what is there."""
    if not draw(st.booleans()):
        return patch
    new = bits(tensor)
    new[patch.indices] = patch.bits
    return Patch(patch.name, patch.shape, patch.code, np.arange(len(new), dtype=np.int64), new)


# -- memory and files ------------------------------------------------------------------------------------------------


@_telling(labels.place_labels)
@st.composite
def placements(draw: Draw, state: State) -> Placed:
    """`state` in views, each tensor in memory of one of `conformance.inputs.memory.KINDS`."""
    return Placed.of(state, {name: draw(st.sampled_from(KINDS)) for name in state})


@_telling(labels.alias_labels)
@st.composite
def aliased(draw: Draw, codes: Sequence[str] = ALL) -> Aliased:
    """A change of a state with up to three aliases, of tensors with elements: all of one, or from a row on."""
    base, target = draw(pairs(codes, min_tensors=1))
    owners = [name for name, tensor in base.items() if tensor.numel()]
    aliases: dict[str, tuple[str, int]] = {}
    for number in range(draw(st.integers(0, 3)) if owners else 0):
        owner = draw(st.sampled_from(owners))
        rows = base[owner].shape[0] if base[owner].dim() else 1
        aliases[f"{owner} alias {number}"] = owner, draw(st.sampled_from([0, rows - 1]))
    return Aliased(base, target, aliases)


@_telling(lambda drawn: set(drawn[1]))
@st.composite
def corrupted(draw: Draw, codes: Sequence[str] = ALL) -> tuple[State, Mapping[str, Mapping[str, bytes]]]:
    """(base, the files of a delta from it by what was done to them): `corruptions.CORRUPTIONS`, each."""
    base, target = draw(pairs(codes, min_tensors=1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole = draft(expected_patches(base, target), total_elements(base)).files()
    broken = {kind: dict(whole) for kind in CORRUPTIONS}
    for kind, corrupt in CORRUPTIONS.items():
        corrupt(rng, broken[kind])
    return base, broken


LABELLED: Mapping[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any], set[str]], frozenset[str]]] = {
    "states": (states, labels.state_labels, labels.STATE_LABELS),
    "pairs": (pairs, lambda pair: labels.change_labels(*pair), labels.CHANGE_LABELS),
    "chains": (chains, labels.chain_labels, labels.CHAIN_LABELS),
    "round_trips": (round_trips, labels.chain_labels, frozenset({"a position that changes back"})),
    "loose_deltas": (loose_deltas, lambda loose: labels.loose_labels(*loose), labels.LOOSE_LABELS),
    "placements": (lambda: states().flatmap(placements), labels.place_labels, labels.PLACE_LABELS),
    "aliased": (aliased, labels.alias_labels, labels.ALIAS_LABELS),
    "corrupted": (corrupted, lambda drawn: set(drawn[1]), frozenset(CORRUPTIONS)),
}
"""Strategy -> how it is made, the labels of a draw, and every label that has to come up."""
