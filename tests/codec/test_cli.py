"""The command as users start it: output, one line for every refusal, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refdelta import DELTA_FILE, METADATA_FILE, Delta, Lineage, TensorPatch, __version__, cli, read_delta, write_delta
from tests.codec.support import bf16, edit_metadata

COMMAND = Path(sys.executable).parent / "refdelta"


def refdelta(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    patches = (
        TensorPatch("model.layers.0." + "x" * 120, (40, 50), torch.arange(4, dtype=torch.int32), bf16(1, 2, 3, 4)),
        TensorPatch("odd [red]name\n", (3, 2**31), torch.tensor([2**32]), torch.tensor([7], dtype=torch.uint8)),
    )
    delta = Delta(patches, 6_442_460_944, Lineage("run-1", 8, 7), {"model_id": "m"})
    return write_delta(delta, tmp_path / "d")


def test_inspect_prints_what_a_delta_holds(folder: Path) -> None:
    done = refdelta("inspect", folder)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "model.layers.0." + "x" * 120 + " [40, 50] BF16 4 0.200 I32 24" in rows
    assert "odd [red]name\\n [3, 2147483648] U8 1 0.000 I64 9" in rows
    assert "2 tensors, 5 of 6,442,460,944 elements changed, density 0.000 %, 33 payload bytes" in rows
    assert any("run_id=run-1" in row and "version=8" in row and "base_version=7" in row for row in rows)
    assert any("model_id=m" in row for row in rows)


def test_inspect_prints_json(folder: Path) -> None:
    done = refdelta("inspect", "--json", folder)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert report["tensors"][1] == {
        "name": "odd [red]name\n",
        "shape": [3, 2**31],
        "dtype": "U8",
        "changed_elements": 1,
        "density_pct": 0.0,
        "index_dtype": "I64",
        "payload_bytes": 9,
    }
    assert report["totals"] == {
        "tensors": 2,
        "changed_elements": 5,
        "total_elements": 6_442_460_944,
        "density_pct": 0.0,
        "payload_bytes": 33,
    }
    assert report["lineage"]["payload_sha256"] == read_delta(folder).lineage.payload_sha256  # type: ignore[union-attr]
    assert report["extra"]["model_id"] == "m"


def test_inspect_of_an_empty_delta(tmp_path: Path) -> None:
    done = refdelta("inspect", write_delta(Delta((), 10), tmp_path / "d"))
    assert done.returncode == 0
    assert "0 tensors, 0 of 10 elements changed" in done.stdout


def assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: [{reason}] ")
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("\n")
    return done.stderr


def test_broken_deltas_are_one_line_and_exit_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refdelta(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """In this process: starting one takes seconds."""
        code = cli.run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, captured.out, captured.err)

    assert_refused(refdelta("inspect", tmp_path / "none"), "not_a_delta")
    assert_refused(refdelta("inspect", tmp_path), "not_a_delta")
    assert_refused(refdelta("inspect", COMMAND), "not_a_delta")
    edit_metadata(folder, lambda metadata: metadata["layer_shapes"].__setitem__(1, [1, 1]))
    line = assert_refused(refdelta("inspect", folder), "index_range")
    assert "odd [red]name\\n" in line
    (folder / DELTA_FILE).write_bytes(os.urandom(4096))
    assert_refused(refdelta("inspect", "--json", folder), "bad_header")
    (folder / METADATA_FILE).write_bytes(bytes(range(256)))
    assert_refused(refdelta("inspect", folder), "bad_metadata")


def test_a_broken_delta_from_outside(folder: Path) -> None:
    (folder / DELTA_FILE).write_bytes(os.urandom(4096))
    assert_refused(refdelta("inspect", folder), "bad_header")


@pytest.mark.parametrize("arguments", [(), ("inspect",), ("inspect", "a", "b"), ("inspect", "a", "--no"), ("no",)])
def test_bad_usage_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    assert_refused(refdelta(*arguments), "bad_option")


def test_version() -> None:
    done = refdelta("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"refdelta {__version__}\n", "")


ENTRY = "import sys; sys.argv[0] = 'refdelta'; from refdelta.cli import main; main()"


@pytest.mark.parametrize("module", ["typer", "rich", "torch"])
def test_ctrl_c_while_it_imports_is_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "inspect", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_at_work_is_one_line_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """SIGINT while a delta is written; the signal comes from inside, so that it comes then."""
    program = """
import os, signal
from refdelta.files import writing
def interrupted(*_):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("no signal")
writing.write_hashed = interrupted
"""
    done = subprocess.run(
        [sys.executable, "-c", program + ENTRY, "compose", str(folder), "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == [folder]


def test_help_needs_no_torch() -> None:
    code = "import sys, refdelta.cli as cli; cli.run(['inspect', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "DELTA" in done.stdout


def test_importing_refdelta_imports_no_vllm() -> None:
    code = "import sys, refdelta; [getattr(refdelta, n) for n in refdelta.__all__]; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_public_names_are_no_modules_whatever_is_imported() -> None:
    """A submodule of the same name would take the place of a function once it is imported."""
    code = "import refdelta, refdelta.apply, refdelta.checkpoints.verifying, types; "
    code += "print([n for n in refdelta.__all__ if isinstance(getattr(refdelta, n), types.ModuleType)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_public_names_are_those_of_their_modules() -> None:
    import refdelta as package
    from refdelta import apply, digest, encode, spec

    for name in package.__all__:
        found = getattr(package, name)
        assert any(getattr(module, name, None) is found for module in (apply, digest, encode, spec))
        assert name in dir(package)
    with pytest.raises(AttributeError):
        _ = package.no_such_name


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_an_output_that_takes_nothing_is_one_line(folder: Path) -> None:
    """A full disk behind a redirection."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([COMMAND, "inspect", "--json", folder], stdout=full, stderr=subprocess.PIPE, timeout=120)
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "error: [write_failed] output: No space left on device"
    assert "Traceback" not in done.stderr.decode()
