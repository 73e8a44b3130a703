"""What the suite says that it changed in a delta's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conformance import oracle
from conformance.inputs.corruptions import CORRUPTIONS, change_of
from conformance.inputs.malformed import PATCHES, STATE
from conformance.oracle import DELTA_FILE, METADATA_FILE, pack_raw
from tests.suite.runs import CONFORMANCE, QUIET, run

WHOLE = oracle.draft(PATCHES, oracle.total_elements(STATE)).files()


def in_metadata(old: bytes, new: bytes) -> dict[str, bytes]:
    assert WHOLE[METADATA_FILE].count(old) == 1
    return {**WHOLE, METADATA_FILE: WHOLE[METADATA_FILE].replace(old, new)}


def in_header(old: bytes, new: bytes) -> dict[str, bytes]:
    """The header keeps its length's word true."""
    raw = WHOLE[DELTA_FILE]
    end = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:end].decode().rstrip()
    assert text.count(old.decode()) == 1
    return {**WHOLE, DELTA_FILE: pack_raw(text.replace(old.decode(), new.decode()), [raw[end:]])}


def in_payload(change: Callable[[bytes], bytes]) -> dict[str, bytes]:
    return {**WHOLE, DELTA_FILE: change(WHOLE[DELTA_FILE])}


SAID = [
    (WHOLE, ""),
    (in_metadata(b'"total_elements": 75', b'"total_elements": true'), "metadata.total_elements: 75 -> true"),
    (in_metadata(b'"total_elements": 75', b'"total_elements": 75.0'), "metadata.total_elements: 75 -> 75.0"),
    (in_metadata(b'"total_elements"', b'"total elements"'), 'metadata.total_elements: now named "total elements"'),
    (in_metadata(b', "total_elements": 75', b""), "metadata.total_elements: 75 -> gone"),
    (in_metadata(b'"total_elements"', b'"more": null, "total_elements"'), "metadata.more: absent -> null"),
    (in_metadata(b"[7, 2]", b"[7, 9223372036854775808]"), "metadata.layer_shapes[1][1]: 2 -> 9223372036854775808"),
    (in_metadata(b"[7, 2]", b"[7]"), "metadata.layer_shapes[1]: [7, 2] -> [7]"),
    (in_metadata(b'"total_elements"', b'"total_elements": 75, "total_elements"'), "metadata.total_elements: twice"),
    (in_metadata(b": 75", b": 075"), "at byte"),
    (in_metadata(b": 75", b": " + b"9" * 400), f"metadata.total_elements: 75 -> {'9' * 60}... (400 characters)"),
    (in_metadata(b": 75", b":  75"), "metadata at byte"),
    (in_header(b'"1.values":{"dtype":"F16"', b'"1.values":{"dtype":""'), 'header."1.values".dtype: "F16" -> ""'),
    (in_payload(lambda raw: raw[:40]), "bytes -> the first 40"),
    (in_payload(lambda raw: b"\1" + bytes(7) + raw[8:]), " -> 1"),
    (in_payload(lambda raw: raw[:-1] + bytes([raw[-1] ^ 1])), "data at byte"),
    (in_payload(lambda raw: raw[:9] + b"?" + raw[10:]), "header at byte 1: "),
]


@pytest.mark.parametrize(("files", "text"), SAID, ids=[text or "nothing" for _, text in SAID])
def test_the_change_is_said(files: dict[str, bytes], text: str) -> None:
    said = change_of(WHOLE, files)
    assert text in said
    assert bool(said) == bool(text)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_change_is_said_in_a_line(kind: str) -> None:
    for seed in range(40):
        files = dict(WHOLE)
        CORRUPTIONS[kind](np.random.default_rng(seed), files)
        said = change_of(WHOLE, files)
        assert bool(said) == (files != WHOLE)
        assert len(said) < 300
        assert said.isprintable()


TAKES_ALL = """
from conformance.mutants.right import Plain

class Codec(Plain):
    def apply(self, delta, weights):
        try:
            super().apply(delta, weights)
        except Exception:
            pass
"""


def test_a_failure_names_what_was_changed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TAKES_ALL)
    test = str(CONFORMANCE / "test_codec_corrupted.py")
    found = run(*QUIET, test, "--engine", "mine:Codec", cwd=tmp_path)
    assert found.code == 1, found.text
    said = r"Mismatch: payload cut (payload: "
    assert said in found.text
    assert "): refusal: expected a refusal (malformed), found taken" in found.text
