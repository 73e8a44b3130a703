"""Everything that an engine may offer beyond the least, by name: what it promises, and who can promise it.

An engine declares the names that hold for it. What needs a name that it does not declare is skipped, and every skip
prints the name. What it declines it must decline loudly: the check `declines` gives it some of that all the same, and
the engine refuses it with nothing changed, or does it right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CODEC, PROGRAM, LIVE = "codec", "program", "live"
"""Kinds of engines: a codec in Python, any program (`exec:COMMAND`), a weight-transfer backend of a live vLLM."""
KINDS = (CODEC, PROGRAM, LIVE)


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that an engine may offer."""

    id: str
    promise: str
    """What the engine then does; for a method or a command, how it is called."""
    kinds: frozenset[str]
    """The kinds of engines that can offer it."""
    method: str | None = None
    """The method of a codec in Python that must then be there."""


def _offer(name: str, promise: str, *kinds: str, method: str | None = None) -> Capability:
    return Capability(name, promise, frozenset(kinds), method)


BASIC = ("float16", "float32", "signed_zero", "scalars", "empty_tensors", "mixed_dtypes", "extensions")
"""What a codec or a program offers unless it takes it back: ``-scalars`` among its capabilities does."""
SETS: Mapping[str, tuple[str, ...]] = {
    "float8": ("float8_e4m3", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0"),
    "non_floating": ("integers", "bool", "complex"),
}
"""One name for several: who declares it declares each of them, and who declares each of them declares it."""

ALL = (
    # What may be in a state or in a delta. BF16 without NaN is the least that an engine takes; `BASIC` goes without
    # saying.
    _offer("float16", "F16 tensors", CODEC, PROGRAM),
    _offer("float32", "F32 tensors; of a live engine, all of its weights", *KINDS),
    _offer("signed_zero", "zeros with a sign: -0.0 has other bits than 0.0", CODEC, PROGRAM),
    _offer("scalars", "tensors of shape [], with one element", CODEC, PROGRAM),
    _offer("empty_tensors", "tensors without elements", CODEC, PROGRAM),
    _offer("mixed_dtypes", "states of tensors of different dtypes", CODEC, PROGRAM),
    _offer("float64", "F64 tensors", CODEC, PROGRAM),
    _offer("float8", "tensors of the five F8 dtypes: all of the next five names", CODEC, PROGRAM),
    _offer("float8_e4m3", "F8_E4M3 tensors", CODEC, PROGRAM),
    _offer("float8_e5m2", "F8_E5M2 tensors", CODEC, PROGRAM),
    _offer("float8_e4m3fnuz", "F8_E4M3FNUZ tensors", CODEC, PROGRAM),
    _offer("float8_e5m2fnuz", "F8_E5M2FNUZ tensors", CODEC, PROGRAM),
    _offer("float8_e8m0", "F8_E8M0 tensors", CODEC, PROGRAM),
    _offer("sub_byte", "F4 tensors, an element being a pair of values (one byte), as in torch", CODEC, PROGRAM),
    _offer("non_floating", "integer, bool and complex tensors: all of the next three names", CODEC, PROGRAM),
    _offer("integers", "integer tensors", CODEC, PROGRAM),
    _offer("bool", "bool tensors", CODEC, PROGRAM),
    _offer("complex", "C64 tensors", CODEC, PROGRAM),
    _offer("nan_values", "NaNs, of any sign and payload, as new values", CODEC, PROGRAM, LIVE),
    _offer("i64_positions", "deltas with I64 positions for tensors that I32 would do for", CODEC, PROGRAM),
    _offer("large", "tensors of more than 2^31 elements, with I64 positions", CODEC, PROGRAM),
    _offer(
        "extensions", "the key `requires` is read: a delta that requires what is not known is refused", CODEC, PROGRAM
    ),
    _offer(
        "new_tensors",
        "a target may have tensors that the base lacks: they are sent whole, and apply adds them",
        CODEC,
        PROGRAM,
    ),
    # How tensors may lie in memory.
    _offer("strided", "encode takes views that are not contiguous, in logical row-major order", CODEC),
    _offer(
        "in_place",
        "an update writes through the tensors that are there (of a codec strided views, too), replaces none of them,"
        " and in a live engine writes no more elements than it changes",
        CODEC,
        LIVE,
    ),
    _offer(
        "autograd",
        "tensors that require gradients, and those made in inference mode, are taken like any other, and stay so",
        CODEC,
    ),
    # What the engine says and writes.
    _offer("canonical", "delta.safetensors has exactly the bytes that the format prescribes", CODEC, PROGRAM),
    _offer("keeps_existing", "encode and compose refuse a path where something is, and leave it as it is", CODEC),
    _offer("reasons", "a refusal carries the format's reason code as `reason` of the exception", *KINDS),
    # Further operations.
    _offer(
        "inverts",
        "invert(delta, weights, out): apply, and write the inverse delta",
        CODEC,
        PROGRAM,
        method="invert",
    ),
    _offer(
        "composes",
        "compose(deltas, out): write one delta that equals several applied in order",
        CODEC,
        PROGRAM,
        method="compose",
    ),
    _offer("digests", "digest(weights): the state digest `rd1` of a state", CODEC, PROGRAM, method="digest"),
    _offer(
        "lineage",
        "follow(delta, weights, digest): apply to the state of this digest, or refuse; return the one after",
        *KINDS,
        method="follow",
    ),
    _offer(
        "routes",
        "route(layout, name, indices, values): a patch in the coordinates of one rank's parameters",
        CODEC,
        method="route",
    ),
    # Live engines: which models, how many ranks, and what becomes of an update that fails.
    _offer("rollback", "a refused update leaves the old weights on every rank, and the next update succeeds", LIVE),
    _offer("sharding", "more than one tensor-parallel rank", LIVE),
    _offer("tied", "models whose lm_head is tied to the embedding: one change, or the same to both names", LIVE),
    _offer("experts", "models with mixture-of-experts layers", LIVE),
    _offer("buffers", "checkpoint tensors that become buffers of the model (Gemma's layer scalars)", LIVE),
    _offer("compiled", "engines whose model vLLM compiles, not eager ones alone", LIVE),
    _offer("lora", "engines with LoRA on, an adapter beside the weights", LIVE),
    _offer("per_rank", "update_info as a list, one for each rank", LIVE),
    _offer("fail_at", "a write can be made to fail after the agreement: the plugin's FAIL_AT names the function", LIVE),
    _offer("http", "the backend is a vLLM plugin, so that an HTTP server has it", LIVE),
)
BY_ID: Mapping[str, Capability] = {capability.id: capability for capability in ALL}


def of_kind(kind: str) -> dict[str, Capability]:
    """Capability by id, of those that engines of this kind can offer."""
    return {capability.id: capability for capability in ALL if kind in capability.kinds}


class UnknownCapability(ValueError):
    """A declared name is not a capability, or engines of this kind cannot offer it; the message is one sentence."""


def checked(declared: Iterable[str], kind: str, label: str) -> frozenset[str]:
    """What an engine of ``kind`` offers that declares this: with `BASIC`, sets and their members, without ``-name``.

    UnknownCapability for a name that is none, or that engines of ``kind`` cannot offer.
    """
    names, known = set(declared), of_kind(kind)
    taken_back = {str(name)[1:] for name in names if str(name).startswith("-")}
    names = {name for name in names if not str(name).startswith("-")}
    unknown = sorted(str(name) for name in names | taken_back if name not in BY_ID)
    if unknown:
        raise UnknownCapability(f"{label} declares unknown capabilities {unknown}; known are {sorted(known)}.")
    misplaced = sorted((names | taken_back) - known.keys())
    if misplaced:
        raise UnknownCapability(f"{label} declares {misplaced}, which a {kind} engine cannot offer.")
    return effective(names, taken_back, known, () if kind == LIVE else BASIC)


def effective(
    names: Iterable[str], taken_back: Iterable[str], known: Iterable[str], basic: Iterable[str] = BASIC
) -> frozenset[str]:
    """The names, ``basic`` ones and what sets stand for, of those that are ``known``, but for what is taken back."""
    members = {member for name in names for member in SETS.get(name, ())}
    gone = {*taken_back, *(member for name in taken_back for member in SETS.get(name, ()))}
    found = ({*names, *members, *basic} & set(known)) - gone - SETS.keys()
    return frozenset(found | {name for name, of in SETS.items() if found.issuperset(of)})
