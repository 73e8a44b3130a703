"""diff, apply, verify and compose as users start them: results, exit codes, refusals in one line, progress."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from refdelta import DELTA_FILE, METADATA_FILE, cli, read_delta
from refdelta.digest import state_digest
from tests.codec.checkpoints import INDEX, changed, every_dtype, safetensors, split, write

Result = tuple[int, str, str]
"""Exit code, standard output, standard error."""
Run = Callable[..., Result]


@pytest.fixture
def refdelta(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process: starting one takes seconds."""

    def run(*arguments: str | Path) -> Result:
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two checkpoints, cut differently."""
    base = every_dtype()
    target = changed(base, ["m.BF16", "scalar", "odd", "m.F4"])
    return write(tmp_path / "base", *split(base, "odd", "m.F32")), write(tmp_path / "target", target, index=False)


def refused(result: Result, reason: str) -> str:
    code, out, error = result
    assert (code, out) == (2, "")
    assert error.startswith(f"error: [{reason}] ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error


def test_from_two_checkpoints_to_a_third(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    code, out, error = refdelta("diff", base, target, "-o", tmp_path / "delta")
    assert (code, error) == (0, "")
    assert "4 tensors, " in out
    code, out, error = refdelta("apply", tmp_path / "delta", base, "-o", tmp_path / "out")
    assert (code, error) == (0, "")
    assert "tensors in 2 files" in out
    code, out, error = refdelta("verify", tmp_path / "delta", "--base", base, "--target", tmp_path / "out")
    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["bit_exact", "holds"] in lines
    assert ["routes", "not", "checked", "needs", "a", "layout", "map"] in lines
    code, _, _ = refdelta("verify", tmp_path / "delta", "--base", base, "--target", target)
    assert code == 0


def test_everything_says_it_in_json(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    (base / "pytorch_model.bin").write_text("old")
    lineage = ("--run-id", "run", "--version", "8", "--base-version", "7")
    made = said(refdelta("diff", base, target, "-o", tmp_path / "delta", *lineage, "--json"))
    assert made == {
        "delta": str(tmp_path / "delta"),
        **said(refdelta("inspect", tmp_path / "delta", "--json"))["totals"],
    }
    found = read_delta(tmp_path / "delta").lineage
    assert found is not None
    assert (found.run_id, found.version, found.base_version) == ("run", 8, 7)
    assert (found.base_digest, found.digest) == (state_digest(every_dtype()), state_digest(state(target)))
    applied = said(refdelta("apply", tmp_path / "delta", base, "-o", tmp_path / "out", "--json"))
    assert applied == {
        "checkpoint": str(tmp_path / "out"),
        "shards": 2,
        "tensors": 24,
        "changed_elements": made["changed_elements"],
        "left_out": ["pytorch_model.bin"],
    }
    verified = said(refdelta("verify", tmp_path / "delta", "--base", base, "--json"))
    assert verified["holds"] is True
    assert {"id": "inverts", "status": "holds", "detail": ""} in verified["findings"]


def state(place: Path) -> dict[str, torch.Tensor]:
    from refdelta.checkpoints.reading import Checkpoint

    with Checkpoint(place) as checkpoint:
        return dict(checkpoint)


def said(result: Result, code: int = 0) -> dict[str, Any]:
    found, out, error = result
    assert (found, error) == (code, "")
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def test_files_left_out_are_named(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    (base / "pytorch_model.bin").write_text("old")
    refdelta("diff", base, target, "-o", tmp_path / "delta")
    _, out, _ = refdelta("apply", tmp_path / "delta", base, "-o", tmp_path / "out")
    assert "not copied: pytorch_model.bin" in out


def test_single_files(tmp_path: Path, refdelta: Run) -> None:
    base = every_dtype()
    target = changed(base)
    for name, tensors in (("b", base), ("t", target)):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(tensors))
    assert refdelta("diff", tmp_path / "b.safetensors", tmp_path / "t.safetensors", "-o", tmp_path / "delta")[0] == 0
    assert refdelta("apply", tmp_path / "delta", tmp_path / "b.safetensors", "-o", tmp_path / "o.safetensors")[0] == 0
    assert (tmp_path / "o.safetensors").read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def test_a_check_that_fails_is_exit_1(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    refdelta("diff", base, target, "-o", tmp_path / "delta")
    code, out, error = refdelta("verify", tmp_path / "delta", "--base", target, "--target", base)
    assert (code, error) == (1, "")
    assert "fails" in out
    verified = said(refdelta("verify", tmp_path / "delta", "--target", base, "--json"), code=1)
    assert verified["holds"] is False
    assert "fails" in {finding["status"] for finding in verified["findings"]}


def test_what_is_noted_fails_when_strict(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    delta = tmp_path / "delta"
    refdelta("diff", base, target, "-o", delta)
    raw = (delta / DELTA_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    (delta / DELTA_FILE).write_bytes(
        (length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :]
    )
    assert refdelta("verify", delta, "--base", base)[0] == 0
    assert refdelta("verify", delta, "--base", base, "--strict")[0] == 1


def test_deltas_compose(tmp_path: Path, refdelta: Run) -> None:
    states = [every_dtype()]
    for seed in (5, 6, 7):
        states.append(changed(states[-1], ["m.I16", "scalar", "odd"], seed=seed))
    states.append(states[0])
    places = [write(tmp_path / str(number), each) for number, each in enumerate(states)]
    for number in range(4):
        refdelta("diff", places[number], places[number + 1], "-o", tmp_path / f"d{number}")
    made = said(refdelta("compose", *(tmp_path / f"d{n}" for n in range(3)), "-o", tmp_path / "part", "--json"))
    assert made["tensors"] == 3
    assert refdelta("verify", tmp_path / "part", "--base", places[0], "--target", places[3])[0] == 0
    assert refdelta("compose", tmp_path / "part", tmp_path / "d3", "-o", tmp_path / "all")[0] == 0
    assert read_delta(tmp_path / "all").extra["composed_of"] == 4
    verified = said(refdelta("verify", tmp_path / "all", "--base", places[0], "--target", places[4], "--json"))
    statuses = {finding["id"]: finding["status"] for finding in verified["findings"]}
    assert (statuses["bit_exact"], statuses["minimal"]) == ("holds", "noted"), "there and back keeps its positions"
    refused(refdelta("compose", tmp_path / "d0", tmp_path / "none", "-o", tmp_path / "x"), "not_a_delta")


def test_outputs_that_exist_are_replaced_only_when_asked(
    tmp_path: Path, places: tuple[Path, Path], refdelta: Run
) -> None:
    base, target = places
    delta, out = tmp_path / "delta", tmp_path / "out"
    commands = (("diff", base, target, "-o", delta), ("apply", delta, base, "-o", out), ("compose", delta, "-o", delta))
    for command in commands:
        refdelta(*command)
        refused(refdelta(*command), "target_exists")
        assert refdelta(*command, "--force")[0] == 0
    (delta / "letter").write_text("dear")
    (out / "model-1.safetensors").unlink()
    for command in commands:
        refused(refdelta(*command, "--force"), "target_exists")
    assert (delta / "letter").read_text() == "dear"


def test_outputs_that_cannot_be_are_refused_before_any_work(
    tmp_path: Path, places: tuple[Path, Path], refdelta: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = places
    delta, out = tmp_path / "delta", tmp_path / "out"
    refdelta("diff", base, target, "-o", delta)
    refdelta("apply", delta, base, "-o", out)

    def work(*_: object, **__: object) -> None:
        raise AssertionError("worked before it looked at the output")

    for name in ("refdelta.checkpoints.diffing.diff_checkpoints", "refdelta.files.reading.read_delta"):
        monkeypatch.setattr(name, work)
    for command in (("diff", base, target), ("apply", delta, base), ("compose", delta, delta)):
        refused(refdelta(*command, "-o", out), "target_exists")
        line = refused(refdelta(*command, "-o", tmp_path / "no" / "x"), "write_failed")
        assert f"there is no directory {tmp_path / 'no'}" in line
        if os.geteuid() == 0:  # root, whom the mode of a directory does not stop
            continue
        (tmp_path / "closed").mkdir(mode=0o500, exist_ok=True)
        assert "nothing can be written into" in refused(
            refdelta(*command, "-o", tmp_path / "closed" / "x"), "write_failed"
        )


def test_applied_in_place_nothing_is_lost(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    """The checkpoint itself as the output: exchanged whole, kept where it fails, refused where files would be lost."""
    base, target = places
    (base / "config.json").write_text("{}")
    refdelta("diff", base, target, "-o", tmp_path / "delta", "--run-id", "r", "--version", "1")
    for name in ("pytorch_model.bin", ".git/HEAD"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text("mine")
    before = files(base)
    line = refused(refdelta("apply", tmp_path / "delta", base, "-o", base, "--force"), "bad_option")
    assert "is the checkpoint itself, and would lose .git, pytorch_model.bin" in line
    refused(refdelta("apply", tmp_path / "delta", base, "-o", base), "target_exists")
    assert files(base) == before
    for name in (".git/HEAD", "pytorch_model.bin"):
        (base / name).unlink()
    (base / ".git").rmdir()
    (tmp_path / "link").symlink_to(base)
    assert refdelta("apply", tmp_path / "delta", tmp_path / "link", "-o", base, "--force")[0] == 0
    after = files(base)
    assert after.keys() == before.keys() - {"pytorch_model.bin", ".git/HEAD"}
    assert after["config.json"] == b"{}"
    assert state_digest(state(base)) == state_digest(state(target))
    refused(refdelta("apply", tmp_path / "delta", base, "-o", base, "--force"), "base_mismatch")
    assert files(base) == after
    assert {path.name for path in tmp_path.iterdir()} == {"base", "target", "delta", "link"}


def test_a_file_applied_in_place(tmp_path: Path, refdelta: Run) -> None:
    base, target = every_dtype(), changed(every_dtype())
    place = tmp_path / "b.safetensors"
    place.write_bytes(safetensors(base))
    (tmp_path / "t.safetensors").write_bytes(safetensors(target))
    refdelta("diff", place, tmp_path / "t.safetensors", "-o", tmp_path / "delta", "--run-id", "r", "--version", "1")
    assert refdelta("apply", tmp_path / "delta", place, "-o", place, "--force")[0] == 0
    assert place.read_bytes() == (tmp_path / "t.safetensors").read_bytes()
    refused(refdelta("apply", tmp_path / "delta", place, "-o", place, "--force"), "base_mismatch")
    assert place.read_bytes() == (tmp_path / "t.safetensors").read_bytes()


def files(place: Path) -> dict[str, bytes]:
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_refusals(tmp_path: Path, places: tuple[Path, Path], refdelta: Run) -> None:
    base, target = places
    delta = tmp_path / "delta"
    refdelta("diff", base, target, "-o", delta)
    other = write(tmp_path / "other", {"m.BF16": torch.zeros(2, 3), "scalar": torch.zeros(1), "w\n": torch.zeros(1)})
    line = refused(refdelta("diff", base, other, "-o", tmp_path / "x"), "unknown_tensor")
    assert "w\\n only in target" in line
    assert "m.BF16 has shape [5, 7] in base, [2, 3] in target" in line
    line = refused(refdelta("apply", delta, other, "-o", tmp_path / "x"), "shape_mismatch")
    assert "scalar has shape [1] in the checkpoint, [] in the delta" in line
    refused(refdelta("diff", base, tmp_path / "none", "-o", tmp_path / "x"), "not_a_checkpoint")
    refused(refdelta("diff", delta, base, "-o", tmp_path / "x"), "not_a_checkpoint")
    refused(refdelta("apply", base, delta, "-o", tmp_path / "x"), "not_a_checkpoint")
    refused(refdelta("apply", base, base, "-o", tmp_path / "x"), "not_a_delta")
    refused(refdelta("verify", base), "not_a_delta")
    refused(refdelta("verify", delta, "--base", tmp_path / "none"), "not_a_checkpoint")
    refused(refdelta("diff", base, target, "-o", tmp_path / "no" / "x"), "write_failed")
    refused(refdelta("diff", base, target, "-o", tmp_path / "x", "--version", "1"), "bad_option")
    refused(refdelta("diff", base, target, "-o", tmp_path / "x", "--run-id", "r", "--version", "-1"), "bad_metadata")
    (base / INDEX).write_text('{"weight_map": {"w": "../target/model-1.safetensors"}}')
    refused(refdelta("diff", base, target, "-o", tmp_path / "x"), "bad_metadata")
    assert not (tmp_path / "x").exists()


def test_a_file_in_the_place_of_a_directory_is_called_one(
    tmp_path: Path, places: tuple[Path, Path], refdelta: Run
) -> None:
    base, target = places
    delta, letter = tmp_path / "delta", tmp_path / "letter"
    refdelta("diff", base, target, "-o", delta)
    letter.write_text("dear, dear reader")
    for command in (("inspect", letter), ("apply", letter, base, "-o", tmp_path / "x"), ("verify", letter)):
        assert f"{letter} is a file; a directory is expected" in refused(refdelta(*command), "not_a_delta")
    line = refused(refdelta("apply", delta, letter, "-o", tmp_path / "x"), "bad_header")
    assert "this is a file, and a delta or a checkpoint of several files is a directory" in line
    for name in (DELTA_FILE, METADATA_FILE):
        line = refused(refdelta("apply", delta, delta / name, "-o", tmp_path / "x"), "not_a_checkpoint")
        assert f"{delta / name} is a file of a delta, which is the directory {delta}" in line
    assert f"no directory {tmp_path / 'none'}\n" in refused(refdelta("inspect", tmp_path / "none"), "not_a_delta")


@pytest.mark.parametrize(
    "arguments", [("diff", "a", "b"), ("diff", "a", "-o", "x"), ("apply", "a"), ("compose", "-o", "x")]
)
def test_bad_usage(arguments: tuple[str, ...], refdelta: Run) -> None:
    refused(refdelta(*arguments), "bad_option")


def test_a_fault_from_outside_leaves_no_traceback(tmp_path: Path) -> None:
    """The installed command, in a process of its own."""
    command = [str(Path(sys.executable).parent / "refdelta"), "verify", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    refused((done.returncode, done.stdout, done.stderr), "not_a_delta")


def test_a_bar_shows_on_a_terminal_and_nowhere_else(tmp_path: Path, places: tuple[Path, Path]) -> None:
    base, target = places
    program = "import sys; from refdelta.cli import run; sys.exit(run(sys.argv[1:]))"
    main, terminal = pty.openpty()
    arguments = ["diff", str(base), str(target), "-o", str(tmp_path / "delta")]
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=terminal, env=environment
    ) as child:
        os.close(terminal)
        assert child.stdout is not None
        out = child.stdout.read()
    shown = b""
    while True:
        try:
            more = os.read(main, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not more:
            break
        shown += more
    os.close(main)
    assert child.returncode == 0
    assert "━".encode() in shown
    assert "━".encode() not in out
