"""The compiler of compiled engines: one source is compiled once, another one again, and a failure stays one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conformance.live import compiler

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@pytest.fixture
def counted(tmp_path: Path) -> dict[str, str]:
    """An environment whose real compiler writes a line for each of its runs to ``calls``."""
    real = tmp_path / "real-g++"
    real.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {shutil.which("g++")} "$@"\n')
    real.chmod(0o755)
    store = tmp_path / "store"
    store.mkdir()
    return {**os.environ, **compiler.install(str(store), {**os.environ, "CXX": str(real)})}


def build(env: dict[str, str], home: Path, number: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile a library whose ``answer()`` is ``number`` in a directory of its own."""
    home.mkdir()
    source, out = home / "kernel.cpp", home / "kernel.so"
    source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
    words = [env["CXX"], str(source), "-shared", "-fPIC", *flags, "-o", str(out)]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False)


def answer(home: Path) -> int:
    found: int = ctypes.CDLL(str(home / "kernel.so")).answer()
    return found


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_once_for_each_source_and_flag(tmp_path: Path, counted: dict[str, str]) -> None:
    for number, (place, value, flags) in enumerate([("a", 7, ()), ("b", 7, ()), ("c", 8, ()), ("d", 7, ("-O2",))]):
        assert build(counted, tmp_path / place, value, *flags).returncode == 0, number
        assert answer(tmp_path / place) == value
    assert calls(tmp_path) == 3, "the second of two equal sources should be copied, and no other"


def test_a_failure_is_passed_on_and_not_kept(tmp_path: Path, counted: dict[str, str]) -> None:
    for place in ("a", "b"):
        done = build(counted, tmp_path / place, 7, "-fno-such-flag")
        assert done.returncode != 0
        assert "no-such-flag" in done.stderr
    assert calls(tmp_path) == 2


def test_anything_else_goes_to_the_real_compiler(tmp_path: Path, counted: dict[str, str]) -> None:
    done = subprocess.run([counted["CXX"], "--version"], env=counted, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert calls(tmp_path) == 1


def test_without_a_compiler_nothing_changes(tmp_path: Path) -> None:
    assert compiler.install(str(tmp_path), {"CXX": "/no/such/compiler"}) == {}
