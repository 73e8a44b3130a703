"""Files made to cost time or memory: refused quickly, within what the files warrant, and by `DeltaError` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from refdelta import DELTA_FILE, METADATA_FILE, Delta, DeltaError, Reason, TensorPatch, read_delta, write_delta
from refdelta.checkpoints.reading import Checkpoint
from tests.codec.checkpoints import INDEX, write
from tests.codec.support import bf16, container, edit_header, edit_metadata

QUICK_CPU_S = 10.0
"""CPU seconds, which other processes do not lengthen: more than any of these files takes to be refused. Multiplied out,
they take minutes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    patch = TensorPatch("m.a", (2, 3), torch.tensor([1, 5]), bf16(1, 2))
    return write_delta(Delta((patch,), 6), tmp_path / "d")


def refused(read: Callable[[], object]) -> Reason:
    start = time.process_time()
    with pytest.raises(DeltaError) as caught:
        read()
    assert time.process_time() - start < QUICK_CPU_S
    assert len(str(caught.value)) < 10_000, "the message repeats what is wrong at length"
    return caught.value.reason


# Time

MANY_SIZES = [2**62] * 100_000


def test_shapes_of_many_large_sizes_are_not_multiplied_out(folder: Path) -> None:
    edit_header(folder, lambda header: header["0.values"].update(shape=MANY_SIZES))
    assert refused(lambda: read_delta(folder)) is Reason.BAD_HEADER
    edit_metadata(folder, lambda metadata: metadata.update(layer_shapes=[MANY_SIZES]))
    assert refused(lambda: read_delta(folder)) is Reason.BAD_SHAPE


def test_shapes_of_many_large_sizes_in_a_checkpoint(tmp_path: Path) -> None:
    header = {"w": {"dtype": "U8", "shape": [*MANY_SIZES, 0], "data_offsets": [0, 0]}}
    (tmp_path / "x.safetensors").write_bytes(container(header))
    assert refused(lambda: Checkpoint(tmp_path / "x.safetensors")) is Reason.BAD_SHAPE


def test_numbers_of_many_digits(folder: Path) -> None:
    for key in ("total_elements", "density_pct", "timestamp"):
        text = (folder / METADATA_FILE).read_text()
        value = json.loads(text)[key]
        (folder / METADATA_FILE).write_text(text.replace(f'"{key}": {value}', f'"{key}": 1{"0" * 1_000_000}'))
        assert refused(lambda: read_delta(folder)) is Reason.BAD_METADATA, key
        (folder / METADATA_FILE).write_text(text)


DEEP = 1_000_000


@pytest.mark.parametrize(
    "bomb", ["[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP]
)
@pytest.mark.parametrize("place", ["metadata", "key of the metadata", "header", "layer names", "index"])
def test_json_that_is_nested_deeply(tmp_path: Path, folder: Path, bomb: str, place: str) -> None:
    payload = (folder / DELTA_FILE).read_bytes()
    length = int.from_bytes(payload[:8], "little")
    if place == "metadata":
        (folder / METADATA_FILE).write_text(bomb)
    elif place == "key of the metadata":
        text = (folder / METADATA_FILE).read_text().rstrip()
        (folder / METADATA_FILE).write_text(f'{text[:-1]}, "deep": {bomb}}}')
    elif place == "header":
        (folder / DELTA_FILE).write_bytes(container(f'{{"a":{bomb}}}'.encode(), payload[8 + length :]))
    elif place == "layer names":
        edit_header(folder, lambda header: header["__metadata__"].update(layer_names=bomb))
    else:
        checkpoint = write(tmp_path / "x", {"w": torch.zeros(2, 3)})
        (checkpoint / INDEX).write_text(bomb)
        assert refused(lambda: Checkpoint(checkpoint)) is Reason.BAD_METADATA
        return
    expected = Reason.BAD_METADATA if "metadata" in place else Reason.BAD_HEADER
    assert refused(lambda: read_delta(folder)) is expected


def test_many_names(folder: Path) -> None:
    names = [f"layer.{i}" for i in range(200_000)]
    edit_metadata(folder, lambda metadata: metadata.update(layer_names=names, layer_shapes=[[1]] * len(names)))
    assert refused(lambda: read_delta(folder)) is Reason.KEYS_MISMATCH
    edit_metadata(
        folder, lambda metadata: metadata["layer_names"].append("layer.7") or metadata["layer_shapes"].append([1])
    )
    assert refused(lambda: read_delta(folder)) is Reason.DUPLICATE_NAME


def test_long_names_are_not_repeated_at_length(folder: Path) -> None:
    edit_metadata(folder, lambda metadata: metadata.update(format="x" * 10_000_000))
    assert refused(lambda: read_delta(folder)) is Reason.UNSUPPORTED_FORMAT
    edit_metadata(folder, lambda metadata: metadata.update(format={"x" * 100: ["y" * 1000] * 1000}))
    assert refused(lambda: read_delta(folder)) is Reason.UNSUPPORTED_FORMAT


# Memory, in a process that may not have more than a little beyond what it starts with

LIMITED = """
import pathlib, resource, sys
from refdelta.apply import read_delta
from refdelta.checkpoints.reading import Checkpoint
from refdelta.spec import DeltaError
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (64 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
place = pathlib.Path(sys.argv[1])
try:
    if (place / "metadata.json").exists():
        read_delta(place)
    else:
        with Checkpoint(place) as checkpoint:
            for name in checkpoint:
                checkpoint[name]
    print("read")
except DeltaError as error:
    print(error.reason)
"""


def outcome(place: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", LIMITED, str(place)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_limit_is_enough_for_what_is_well_formed(folder: Path) -> None:
    assert outcome(folder) == "read"


def sparse(path: Path, size: int, start: bytes = b"") -> None:
    """A file of that size that takes no space on disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


@pytest.mark.parametrize(
    ("length", "size"),
    [(2**63, 40), (2**40, 40), (100_000_001, 200_000_000), (99_000_000, 98_000_000), (2**64 - 1, 2**33)],
)
def test_a_header_length_is_no_reason_to_allocate(folder: Path, length: int, size: int) -> None:
    sparse(folder / DELTA_FILE, size, length.to_bytes(8, "little") + b"{}")
    assert outcome(folder) == "bad_header"


def test_a_shape_is_no_reason_to_allocate(folder: Path) -> None:
    edit_metadata(
        folder, lambda metadata: metadata.update(layer_shapes=[[2**31, 2**31]], total_elements=2**62, density_pct=0.0)
    )
    assert outcome(folder) == "read", "positions fit, and nothing of that size is made"
    edit_header(folder, lambda header: header["0.values"].update(shape=[2**40], data_offsets=[8, 8 + 2**41]))
    assert outcome(folder) == "bad_header"


@pytest.mark.parametrize("name", [METADATA_FILE, INDEX])
def test_a_large_json_file_is_not_read(tmp_path: Path, folder: Path, name: str) -> None:
    place = folder if name == METADATA_FILE else write(tmp_path / "x", {"w": torch.zeros(2, 3)})
    sparse(place / name, 2**40, b"{")
    assert outcome(place) == "bad_metadata"


def test_tensors_that_memory_does_not_hold(tmp_path: Path, folder: Path) -> None:
    """Files of holes: their size is real, and more than there is memory."""
    count = 2**38
    header = {
        "0.indices": {"dtype": "I32", "shape": [count], "data_offsets": [0, 4 * count]},
        "0.values": {"dtype": "U8", "shape": [count], "data_offsets": [4 * count, 5 * count]},
    }
    start = container(header)
    sparse(folder / DELTA_FILE, len(start) + 5 * count, start)
    over = {"changed_elements": count, "total_elements": count, "density_pct": 100.0, "layer_shapes": [[count]]}
    edit_metadata(folder, lambda metadata: metadata.update(over, requires=["non_floating_values"]))
    assert outcome(folder) == "unreadable"
    checkpoint = tmp_path / "x"
    checkpoint.mkdir()
    start = container({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}})
    sparse(checkpoint / "model.safetensors", len(start) + count, start)
    assert outcome(checkpoint) == "unreadable"
