"""`exec:` programs: what they must keep to, each broken once, and what the suite calls each fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conformance import oracle
from conformance.driving.codec import refused
from conformance.engines.capabilities import BASIC, SETS
from conformance.engines.codecs import BadEngine, CannotStart, Loading, load
from conformance.engines.program import Program, Refused, storable
from conformance.findings import EngineFailed, InfrastructureFailed

STATE = {"w": oracle.from_bits(range(6), "BF16", (2, 3))}
OTHER = {"w": oracle.from_bits([0, 1, 9, 3, 4, 5], "BF16", (2, 3))}


def program(tmp_path: Path, body: str, *, timeout: float = 20.0) -> Program:
    """A shell script that gets the command as $1 and its arguments after it."""
    script = tmp_path / "a program.sh"  # the blank tests the splitting of the command
    script.write_text(f"#!/bin/sh\n{body}\n")
    return Program.of(f"sh '{script}'", timeout, frozenset({"digests", "lineage", "composes", "inverts"}))


def test_arguments_and_result(tmp_path: Path) -> None:
    """`apply` gets a delta, a state and a place; the state that it writes is what the weights become."""
    log = tmp_path / "log"
    engine = program(tmp_path, f'echo "$1 $#" > {log}; test -d "$2" && test -f "$3" && test ! -e "$4" && cp "$3" "$4"')
    delta = oracle.write_delta(tmp_path / "delta", oracle.expected_patches(STATE, OTHER), 6)
    weights = oracle.clone(STATE)
    engine.apply(delta, weights)
    assert log.read_text() == "apply 4\n"
    assert oracle.difference(STATE, weights) == ""
    assert engine.name == "sh a program.sh"


def test_every_command(tmp_path: Path) -> None:
    """The order of arguments, and what is printed is what is returned."""
    out = tmp_path / "out"
    engine = program(
        tmp_path, 'case "$1" in compose) cp -r "$3" "$2";; digest) echo " rd1:7 ";; *) cp "$3" "$5"; echo d;; esac'
    )
    delta = oracle.write_delta(tmp_path / "delta", (), 6)
    engine.compose([delta, delta], out)
    assert oracle.read_delta(out).patches == ()
    assert engine.digest(STATE) == "rd1:7"
    assert engine.follow(delta, oracle.clone(STATE), "rd1:1") == "d"


def test_a_refusal_is_one(tmp_path: Path) -> None:
    engine = program(tmp_path, 'echo "error: [index_range] 7 of 6" >&2; exit 3')
    weights = oracle.clone(STATE)
    error = refused(lambda: engine.apply(tmp_path, weights))
    assert isinstance(error, Refused)
    assert error.reason == "index_range"
    assert "7 of 6" in str(error)
    assert oracle.difference(STATE, weights) == ""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("exit 1", "failed: exit 1, where 0 is done and 3 is refused"),
        ("echo why >&2; exit 2", "why"),
        ("kill -9 $$", "failed: exit -9 (SIGKILL), where"),
        ("kill -11 $$", "failed: exit -11 (SIGSEGV), where"),
        ("exit 0", "exited with 0 and wrote no after.safetensors"),
        ('cp "$3" "$4"; exit 3', "refused (refused without a word on standard error), and yet it wrote"),
        ('cp "$3" "$4"; echo x >> "$3"', "changed its input state1.safetensors"),
        ('cp "$3" "$4"; touch "$2/more"', "changed its input"),
        ('rm "$3"; exit 3', "changed its input state1.safetensors"),
        ("exit 3", "refused (exit 3) without a reason on standard error"),
        ("echo >&2; exit 3", "refused (exit 3) without a reason on standard error"),
        ('echo nonsense > "$4"', "the state that the program wrote cannot be read"),
    ],
)
def test_a_failure_is_no_refusal(tmp_path: Path, body: str, text: str) -> None:
    """It goes through where a refusal would be taken for one."""
    engine = program(tmp_path, body)
    (tmp_path / "delta").mkdir()
    with pytest.raises(EngineFailed) as caught:
        refused(lambda: engine.apply(tmp_path / "delta", oracle.clone(STATE)))
    assert text in str(caught.value)


@pytest.mark.parametrize("absent", [oracle.METADATA_FILE, oracle.DELTA_FILE])
def test_a_delta_without_its_files_is_named(tmp_path: Path, absent: str) -> None:
    """Of every command that writes one."""
    delta = oracle.write_delta(tmp_path / "delta", (), 6)
    write = f'cp -r {delta} "$out"; rm "$out"/{absent}'
    engine = program(
        tmp_path,
        f'case "$1" in encode) out=$4;; compose) out=$2;; *) out=$5; cp "$3" "$4";; esac; {write}',
    )
    calls: list[Callable[[], None]] = [
        lambda: engine.encode(STATE, OTHER, tmp_path / "encoded"),
        lambda: engine.compose([delta, delta], tmp_path / "composed"),
        lambda: engine.invert(delta, oracle.clone(STATE), tmp_path / "inverted"),
    ]
    for call in calls:
        with pytest.raises(EngineFailed, match=f"exited with 0 but wrote no {absent}"):
            call()


def test_a_hang_ends_and_is_named(tmp_path: Path) -> None:
    """With what it started."""
    engine = program(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait", timeout=1.0)
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=r"`sh '.*a program.sh' encode` hung: no end after 1 seconds"):
        engine.encode(STATE, OTHER, tmp_path / "delta")
    assert time.monotonic() - began < 30
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    deadline = time.monotonic() + 10
    while child.exists() and "Z" not in (child / "stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text()


def test_what_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="cannot be run"):
        load("exec:/no/such/program", Loading())
    with pytest.raises(CannotStart, match="exit 127"):
        load("exec:sh -c 'exec /no/such/thing'", Loading())
    with pytest.raises(BadEngine, match="Let it print names, or exit 3"):
        load("exec:sh -c 'exit 1'", Loading())
    gone = program(tmp_path, "echo no >&2; exit 3")
    missing = Program(("/no/such/program",), 5.0)
    assert refused(lambda: gone.digest(STATE)) is not None
    with pytest.raises(InfrastructureFailed):
        refused(lambda: missing.digest(STATE))


def test_capabilities_are_asked_for(tmp_path: Path) -> None:
    """Printed, none where it refuses, or declared on the command line, when it is not asked."""
    float8 = {"float8", *SETS["float8"]}
    assert load("exec:sh -c 'echo float8 float64'", Loading()).capabilities == {*BASIC, *float8, "float64"}
    assert load("exec:sh -c 'exit 3'", Loading()).capabilities == {*BASIC}
    declared = load("exec:sh -c 'exit 1'", Loading(declared=frozenset({"reasons", "-scalars"})))
    assert declared.capabilities == {*BASIC, "reasons"} - {"scalars"}


def test_what_no_file_holds() -> None:
    scalar = torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert storable(STATE)
    assert not storable({"__metadata__": STATE["w"]})
    assert not storable({"s": scalar})
