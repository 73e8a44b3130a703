"""What an engine may be handed that is right and unusual: tensors, directories and targets as they come.

Tensors that are expanded, that require gradients or were made in inference mode: taken right, or refused with nothing
changed; with the capability, taken. Directories with further files in them, and with links: taken. A target that exists
already: refused, and left as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from . import oracle
from .driving.codec import Scratch, applied, assert_reason, must_refuse, refusal, refused
from .engines.codecs import FullCodec
from .findings import require
from .oracle import (
    DELTA_FILE,
    METADATA_FILE,
    State,
    assert_bit_equal,
    clone,
    expected_patches,
    expected_state,
    total_elements,
)

declines = pytest.mark.check("declines")
ROWS, COLUMNS = 5, 7


def _row(number: int) -> Tensor:
    return oracle.from_bits(np.arange(COLUMNS) + 0x3F80 + 16 * number, "BF16", (1, COLUMNS))


def _expanded(tensor: Tensor) -> Tensor:
    """The first row, seen as often as there are rows: all elements of a column are one."""
    return tensor[:1].expand(tensor.shape)


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


KINDS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "expanded": ("strided", _expanded),
    "requires_grad": ("autograd", lambda tensor: tensor.clone().requires_grad_()),
    "parameter": ("autograd", lambda tensor: torch.nn.Parameter(tensor.clone())),
    "inference": ("autograd", _inference),
}
"""Kind of tensor -> the capability with which an engine takes it, and one with the same elements."""


def _states(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A plain tensor, one of the kind, and a plain one; all rows alike, so that they can be expanded."""
    make = KINDS[kind][1]
    base, target = (_row(number).repeat(ROWS, 1) for number in (0, 0))
    target = oracle.from_bits(oracle.bits(target) ^ np.uint16(3), "BF16", (ROWS, COLUMNS))
    return (
        {"a.weight": base.clone(), "m.special": make(base), "z.weight": base.clone()},
        {"a.weight": target.clone(), "m.special": make(target), "z.weight": target.clone()},
    )


@declines
@pytest.mark.level("writer")
@pytest.mark.parametrize("side", ["base", "target", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_encode(engine: FullCodec, scratch: Scratch, kind: str, side: str) -> None:
    base, target = _states(kind)
    given = clone(base) if side == "target" else base, clone(target) if side == "base" else target
    before = clone(base), clone(target)
    with scratch() as tmp:
        error = refused(lambda: engine.encode(*given, tmp / "delta"))
        after = before[0] if error else expected_state(before[0], oracle.read_delta(tmp / "delta").patches)
    declared = KINDS[kind][0] in engine.capabilities
    require(not (declared and error), "refusal", expected=f"taken: {KINDS[kind][0]} is declared", found=str(error))
    assert_bit_equal(before[0] if error else before[1], after, f"{kind}: {'refused' if error else 'encoded'}")
    for name, (was, now) in {"base": (before[0], given[0]), "target": (before[1], given[1])}.items():
        assert_bit_equal(was, now, f"encode changed its {name}")


@declines
@pytest.mark.level("applier")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "expanded"])
def test_apply(engine: FullCodec, scratch: Scratch, kind: str) -> None:
    base, target = _states(kind)
    weights, before, expected = dict(base), clone(base), clone(target)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", expected_patches(base, target), total_elements(base))
        error = refused(lambda: engine.apply(delta, weights))
    declared = "autograd" in engine.capabilities
    require(not (declared and error), "refusal", expected="taken: autograd is declared", found=str(error))
    assert_bit_equal(before if error else expected, weights, f"{kind}: {'refused' if error else 'applied'}")
    if declared:
        held, given = weights["m.special"], base["m.special"]
        found = (held.requires_grad, held.is_inference(), held.grad_fn)
        wanted = (given.requires_grad, given.is_inference(), None)
        require(found == wanted, "requires_grad, is_inference, grad_fn", expected=wanted, found=found)


@declines
@pytest.mark.level("applier")
def test_apply_to_elements_that_are_one(engine: FullCodec, scratch: Scratch) -> None:
    """A change of one element of an expanded tensor has no place in it: refused, or the tensor is another then."""
    plain = _row(0).repeat(ROWS, 1)
    weights = {"a.weight": plain.clone(), "m.special": _expanded(plain)}
    base = clone(weights)
    new = oracle.from_bits(np.array([1, 2], np.uint16), "BF16", (2,))
    patches = [oracle.delta_patch(name, base[name], [3, COLUMNS + 4], new) for name in base]
    target = expected_state(base, patches)
    with scratch() as tmp:
        delta = oracle.write_delta(tmp / "delta", patches, total_elements(base))
        error = refused(lambda: engine.apply(delta, weights))
    assert_bit_equal(base if error else target, weights, "refused" if error else "applied")
    if error:
        assert_reason(engine, error, "alias_conflict")


@declines
@pytest.mark.level("writer")
@pytest.mark.needs("large")
@pytest.mark.needs("strided")
def test_encode_views_beyond_32_bits(engine: FullCodec, scratch: Scratch) -> None:
    """2^31 + 2^16 elements in 64 KiB: one column changes, and so does every row of it."""
    rows, columns, column = 2**15 + 1, 2**16, 40_001
    before = torch.zeros(1, columns, dtype=torch.uint8)
    after = before.clone()
    after[0, column] = 5
    base, target = ({"w": row.view(torch.float8_e5m2).expand(rows, columns)} for row in (before, after))
    with scratch() as tmp:
        engine.encode(base, target, tmp / "delta")
        (patch,) = oracle.read_delta(tmp / "delta").patches
        _assert_views_are_not_written(engine, base, tmp / "delta", before)
    expected = np.arange(rows, dtype=np.int64) * columns + column
    wrong = np.flatnonzero(expected != patch.indices) if len(expected) == len(patch.indices) else [len(patch.indices)]
    require(not len(wrong), f"change {wrong[:1]}", tensor="w", expected=f"{rows} changes, each {columns} after another")
    require(bool((patch.bits == 5).all()), "bits", tensor="w", expected="5 everywhere", found=np.unique(patch.bits))


def _assert_views_are_not_written(engine: FullCodec, base: State, delta: Path, row: Tensor) -> None:
    """Every element of a column is one, so that in place there is no way to write them one by one."""
    if "in_place" in engine.capabilities:
        error = must_refuse(lambda: engine.apply(delta, dict(base)))
        assert_reason(engine, error, "alias_conflict")
        require(not row.any(), "bits after a refusal", tensor="w", expected="zeros", found="changed")


# -- directories -------------------------------------------------------------------------------------------------------


def _pair() -> tuple[State, State]:
    base = {"b.weight": _row(0), "w": _row(1).repeat(3, 1)}
    target = {name: oracle.from_bits(oracle.bits(t) ^ np.uint16(5), "BF16", t.shape) for name, t in base.items()}
    return base, target


def _delta(directory: Path) -> Path:
    base, target = _pair()
    return oracle.write_delta(directory, expected_patches(base, target), total_elements(base))


def _beside(delta: Path) -> Path:
    """Files and directories that have nothing to do with the delta, some of them under names that look like it."""
    for name in ("notes.txt", ".hidden", "metadata.json~", "delta.safetensors.tmp", "metadata.json.orig", "LICENSE"):
        (delta / name).write_text("{}")
    oracle.save_state(delta / "model.safetensors", {"w": _row(3)})
    _delta(delta / "older")
    (delta / "0.indices").mkdir()
    return delta


def _by_links(delta: Path) -> Path:
    """Both files elsewhere, under other names, as a cache of files by hash keeps them."""
    for name in (DELTA_FILE, METADATA_FILE):
        blob = delta.parent / "blobs" / f"{len(name):x}f3a"
        blob.parent.mkdir(exist_ok=True)
        (delta / name).rename(blob)
        (delta / name).symlink_to(os.path.relpath(blob, delta))
    return delta


def _by_hard_links(delta: Path) -> Path:
    for name in (DELTA_FILE, METADATA_FILE):
        os.link(delta / name, delta.parent / f"second {name}")
    return delta


def _linked(delta: Path) -> Path:
    (delta.parent / "latest").symlink_to(delta.name, target_is_directory=True)
    return delta.parent / "latest"


def _read_only(delta: Path) -> Path:
    for path in (*delta.iterdir(), delta):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return delta


DIRECTORIES = {
    "other files": _beside,
    "links to the files": _by_links,
    "hard links": _by_hard_links,
    "a link to the directory": _linked,
    "read only": _read_only,
}


@pytest.mark.check("bit_exact")
@pytest.mark.level("applier")
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_directory(engine: FullCodec, scratch: Scratch, kind: str) -> None:
    """What is in a directory beside a delta's two files says nothing, and the files may be links."""
    base, target = _pair()
    with scratch() as tmp:
        delta = DIRECTORIES[kind](_delta(tmp / "delta"))
        before = _contents(tmp)
        assert_bit_equal(target, applied(engine, delta, base), kind)
        require(_contents(tmp) == before, "files after apply", expected=before, found=_contents(tmp))
        (tmp / "delta").chmod(0o755)


def _contents(directory: Path) -> dict[str, bytes | str]:
    """Every file below a directory, and where links lead."""
    found: dict[str, bytes | str] = {}
    for path in sorted(directory.rglob("*")):
        at = str(path.relative_to(directory))
        found[at] = f"-> {path.readlink()}" if path.is_symlink() else path.read_bytes() if path.is_file() else "/"
    return found


def _dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("gone")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.check("refuses")
@pytest.mark.level("safe")
@pytest.mark.parametrize("spoil", [_dangling, _directory, _circle], ids=["dangling", "directory", "circle"])
@pytest.mark.parametrize("name", [DELTA_FILE, METADATA_FILE])
def test_no_file(engine: FullCodec, scratch: Scratch, name: str, spoil: Callable[[Path], None]) -> None:
    """One of the two files is not there: a link to nothing, a directory, a link to itself."""
    base, _ = _pair()
    with scratch() as tmp:
        spoil(_delta(tmp / "delta") / name)
        assert_reason(engine, refusal(engine, tmp / "delta", base), "not_a_delta", "unreadable", "bad_container")


# -- targets -----------------------------------------------------------------------------------------------------------


def _older(path: Path) -> None:
    oracle.write_delta(path, [], 3)


def _others(path: Path) -> None:
    path.mkdir()
    _beside(path)


TARGETS: Mapping[str, Callable[[Path], object]] = {
    "a delta": _older,
    "a directory with other files": _others,
    "an empty directory": lambda path: path.mkdir(),
    "a file": lambda path: path.write_text("mine"),
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a link to a delta": lambda path: path.symlink_to(oracle.write_delta(path.parent / "held", [], 3).name),
}


@pytest.mark.check("declines")
@pytest.mark.level("writer")
@pytest.mark.needs("keeps_existing")
@pytest.mark.parametrize("kind", TARGETS)
def test_target_exists(engine: FullCodec, scratch: Scratch, kind: str) -> None:
    base, target = _pair()
    with scratch() as tmp:
        out = tmp / "here" / "delta"
        out.parent.mkdir()
        TARGETS[kind](out)
        before = _contents(tmp)
        _assert_kept(engine, lambda: engine.encode(clone(base), clone(target), out), tmp, before)
        if "composes" in engine.capabilities:
            parts = [_delta(tmp.parent / f"{tmp.name}-part")]
            _assert_kept(engine, lambda: engine.compose(parts, out), tmp, before)
            shutil.rmtree(parts[0])


def _assert_kept(
    engine: FullCodec, attempt: Callable[[], object], directory: Path, before: Mapping[str, bytes | str]
) -> None:
    assert_reason(engine, must_refuse(attempt), "target_exists")
    found = _contents(directory)
    require(found == before, "files after a refusal", expected=sorted(before), found=sorted(found))
