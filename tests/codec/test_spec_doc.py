"""docs/SPEC.md and refdelta.spec say the same."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance import oracle
from conformance.oracle import digests
from refdelta import (
    DELTA_FILE,
    METADATA_FILE,
    Delta,
    DeltaError,
    Lineage,
    Reason,
    TensorPatch,
    digest,
    read_delta,
    spec,
)
from refdelta.encode import write_delta
from tests.codec.support import bf16, edit_metadata

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "SPEC.md").read_text(encoding="utf-8")

Row = tuple[str, ...]


def table(*head: str) -> list[Row]:
    """The rows of the only table with these column heads, without back quotes."""
    lines = TEXT.splitlines()
    at = [number for number, line in enumerate(lines) if cells(line) == head]
    assert len(at) == 1, f"{len(at)} tables with the columns {head}"
    rows = []
    for line in lines[at[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


def cells(line: str) -> Row:
    return tuple(cell.strip() for cell in line.strip("|").split(" | ")) if line.startswith("|") else ()


def bare(text: str) -> str:
    return text.replace("`", "")


# Tables


def test_invariants() -> None:
    assert table("id", "statement") == [(known.id, known.statement) for known in spec.INVARIANTS.values()]


def test_reasons() -> None:
    assert table("reason", "group", "when") == [(r.value, r.group.value, r.meaning) for r in Reason]


def test_groups_of_reasons() -> None:
    """Those in the text are those in the code, and each has a reason."""
    assert table("group", "what is wrong") == [(group.value, group.meaning) for group in spec.ReasonGroup]
    assert {reason.group for reason in Reason} == set(spec.ReasonGroup)


def test_dtypes() -> None:
    known = [
        (code, str(dtype.itemsize), "yes" if dtype.is_floating_point else "no") for code, dtype in spec.DTYPES.items()
    ]
    assert table("code", "bytes", "floating") == known


def test_extensions() -> None:
    assert {bare(name) for name, _ in table("extension", "meaning")} == spec.EXTENSIONS


def test_constants() -> None:
    modules = {"spec": spec, "digest": digest}
    public = {
        f"{name}.{constant}"
        for name, module in modules.items()
        for constant, value in vars(module).items()
        if constant.isupper() and not constant.startswith("_") and isinstance(value, int | str)
    }
    stated = {bare(name): bare(value) for name, value in table("name", "value")}
    assert stated.keys() == public - {"digest.ZERO"} | {"digest.MIX"}
    for name, text in stated.items():
        module, constant = name.split(".")
        value = getattr(modules[module], constant)
        assert eval(f"[{text}]") == (list(value) if isinstance(value, tuple) else [value]), name
    assert digest.ZERO == "rd1:0000000000000000"
    steps = [
        f"*x* ^= *x* >> {shift}" + (f"; *x* *= {factor:#x}" if factor != 1 else "") for shift, factor in digest.MIX
    ]
    assert f"mix64(*x*): {'; '.join(steps)}\n" in TEXT
    assert f"key(*i*) = seed + *i* * {digest.GAMMA:#x}" in TEXT
    assert f"at most {spec.MAX_HEADER_BYTES:,} bytes" in TEXT


def test_files() -> None:
    assert [bare(name) for name, _ in table("file", "content")] == [DELTA_FILE, METADATA_FILE]


# Keys and fields, and what a reader makes of them


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A delta that says all there is to say."""
    patch = TensorPatch("w", (2, 3), torch.tensor([1, 4], dtype=torch.int32), bf16(1, 2))
    lineage = Lineage("run", 2, 1, "rd1:1", "rd1:2", {"w": "rd1:3"}, part=(0, 2))
    extra = {"base_model": "m", "model_id": "i", "kind": "sampler", "created_at": "now", "timestamp": 1.5}
    return write_delta(Delta((patch,), 6, lineage, extra), tmp_path / "good")


def taken(folder: Path) -> bool:
    try:
        read_delta(folder)
    except DeltaError:
        return False
    return True


def keys_of(cell: str) -> list[str]:
    return [bare(key) for key in cell.split(", ")]


def test_metadata_keys(good: Path) -> None:
    rows = table("key", "value")
    stated = [key for cell, _ in rows for key in keys_of(cell)]
    written = json.loads((good / METADATA_FILE).read_text())
    assert set(stated) == written.keys() | {"requires"} == set(spec.FORMAT_KEYS) | written.keys()
    required = {key for cell, value in rows if value.endswith("; required") for key in keys_of(cell)}
    found = {key for key in stated if not taken_with(good, lambda metadata, key=key: metadata.pop(key, None))}
    assert found == required
    for key in set(stated) - required:
        assert taken_with(good, lambda metadata, key=key: metadata.update({key: None})), key


def test_lineage_fields(good: Path) -> None:
    rows = table("field", "value")
    assert [bare(name) for name, _ in rows] == [field.name for field in fields(Lineage) if field.name != "extra"]
    required = {bare(name) for name, value in rows if value.endswith("; required")}
    names = [bare(name) for name, _ in rows]
    found = {n for n in names if not taken_with(good, lambda metadata, n=n: metadata["lineage"].pop(n))}
    assert found == required
    for name in set(names) - required:
        assert taken_with(good, lambda metadata, n=name: metadata["lineage"].update({n: None})), name


def taken_with(folder: Path, edit: Callable[..., object]) -> bool:
    """Whether the delta is read once its metadata is edited; it is put back."""
    before = (folder / METADATA_FILE).read_bytes()
    edit_metadata(folder, edit)
    try:
        return taken(folder)
    finally:
        (folder / METADATA_FILE).write_bytes(before)


def test_nesting_that_readers_take(good: Path) -> None:
    deep: object = 1
    for _ in range(31):
        deep = [deep]
    assert taken_with(good, lambda metadata: metadata.update(x=deep))
    assert taken_with(good, lambda metadata: metadata.update(x=10**3999))


@pytest.mark.parametrize("written", ["2.0", "2e0", "true"])
@pytest.mark.parametrize("before", ['"changed_elements": 2', '"format_version": 2', '"version": 2', "[\n      2,\n"])
def test_integers_have_no_fraction_and_no_exponent(good: Path, before: str, written: str) -> None:
    """S4.2-4 and S4.2-5, for counts, versions and shapes alike."""
    path = good / METADATA_FILE
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, before.replace("2", written)))
    assert not taken(good)


# Arithmetic


SIZES = table("value bytes", "I32: bytes a change", "smaller below", "I64: bytes a change", "smaller below")
COLUMNS = [(4, row[0], *row[1:3]) for row in SIZES] + [(8, row[0], *row[3:]) for row in SIZES]
DTYPE_OF_SIZE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@pytest.mark.parametrize(("width", "value", "each", "share"), COLUMNS)
def test_sizes(width: int, value: str, each: str, share: str) -> None:
    """Around the share below which the sparse form is smaller: one below, at, above."""
    size = int(value)
    assert int(each) == width + size
    assert Fraction(share) == Fraction(size, int(each))
    at = Fraction(share) * 90
    assert at.denominator == 1
    smaller = [patch_of(int(at) + by, 90, width, DTYPE_OF_SIZE[size]).payload_bytes < 90 * size for by in (-1, 0, 1)]
    assert smaller == [True, False, False]


def patch_of(changed: int, numel: int, width: int, dtype: torch.dtype) -> TensorPatch:
    at = torch.arange(changed, dtype=torch.int32 if width == 4 else torch.int64)
    return TensorPatch("w", (1, numel), at, torch.zeros(changed, dtype=dtype))


def longest_entry(key: str, code: str) -> str:
    number, big = 999_999, 10**18
    return f'"{number}.{key}":{{"dtype":"{code}","shape":[{big}],"data_offsets":[{big},{big}]}},'


def test_header_overhead() -> None:
    """The lengths in 7.2, and the bound that follows from them."""
    fixed = '{"__metadata__":{"layer_names":"[]"}}'
    codes = sorted(spec.DTYPES, key=len)
    indices, values = len(longest_entry("indices", "I64")), len(longest_entry("values", codes[-1]))
    assert f"at most 8 + {len(fixed)} + 7 = {8 + len(fixed) + 7} bytes" in TEXT
    assert f"at most {indices} and {values} bytes" in TEXT
    assert 8 + len(fixed) + 7 <= 64
    assert indices + values + len(",") <= 256
    assert spec.MAX_HEADER_BYTES // 100 <= 10**6
    assert (
        sum(len(f'"0.{key}":{{"dtype":"I8","shape":[0],"data_offsets":[0,0]}},') for key in ("indices", "values")) > 100
    )
    assert "at most 64 bytes, and for every layer 256 bytes and twice its name as JSON" in TEXT


@pytest.mark.parametrize("name", ["w", '"' * 50, "\\" * 50, "\x00" * 50, "層" * 50, "\U0001f642"])
def test_header_overhead_of_names(name: str, tmp_path: Path) -> None:
    delta = Delta((TensorPatch(name, (2, 3), torch.tensor([1]), bf16(1)),), 6)
    raw = (write_delta(delta, tmp_path / "d") / DELTA_FILE).read_bytes()
    as_json = len(json.dumps(name, ensure_ascii=False).encode())
    assert spec.header_bound(delta) == 64 + 256 + 2 * as_json
    assert len(raw) - 6 <= spec.header_bound(delta)


# Examples


def test_example_of_canonical_bytes(tmp_path: Path) -> None:
    """As the text has it, and as it is written."""
    found = re.search(
        r"the layer `(.+)` of shape \[2, 3\] in BF16, whose elements 1 and 4 become (\S+) and (\S+), has the header\s+"
        r"```json\n(.*)\n```\s+padded with (\d+) spaces to (\d+) bytes, and the data `([0-9a-f]+)`",
        TEXT,
    )
    assert found
    name, one, two, header, spaces, length, data = found.groups()
    patch = TensorPatch(name, (2, 3), torch.tensor([1, 4]), bf16(int(one, 16), int(two, 16) - 2**16))
    raw = (write_delta(Delta((patch,), 6), tmp_path / "d") / DELTA_FILE).read_bytes()
    assert raw[:8] == int(length).to_bytes(8, "little")
    assert raw[8:] == header.encode() + int(spaces) * b" " + bytes.fromhex(data)
    assert len(header.encode()) + int(spaces) == int(length)
    raw_patch = oracle.Patch(name, (2, 3), "BF16", np.array([1, 4]), np.array([int(one, 16), int(two, 16)]))
    assert oracle.canonical_payload([raw_patch]) == raw


def test_example_of_a_digest() -> None:
    found = re.search(r"The tensor `(.+)` of dtype (\w+) and shape \[2, 3\] with the bits (.*?)\.\s", TEXT, re.DOTALL)
    assert found
    name, code, listed = found.groups()
    patterns = [int(word, 16) for word in re.split(r",\s+", listed)]
    seed, header = digests.seed_and_header(name, code, (2, 3))
    last = digests.key(seed, 5) ^ patterns[5]
    tensor = oracle.from_bits(patterns, code, (2, 3))
    assert table("step", "value") == [
        ("identity", f"`{digests.identity(name, code, (2, 3)).hex()}`"),
        ("seed", f"`{seed:#018x}`"),
        ("header", f"`{header:#018x}`"),
        ("key(5)", f"`{digests.key(seed, 5):#018x}`"),
        ("mix64(key(5) XOR 0xffff)", f"`{digests.mix64(last):#018x}`"),
        ("digest", f"`{digest.state_digest({name: tensor})}`"),
    ]


# The text itself


SECTIONS = re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)
SUBSECTIONS = re.findall(r"^### (\d+\.\d+)\. ", TEXT, re.MULTILINE)


def test_sections_are_numbered_in_order() -> None:
    assert list(map(int, SECTIONS)) == [*range(1, len(SECTIONS) + 1)]
    last = (0, 0)
    for section, item in (number.split(".") for number in SUBSECTIONS):
        here = (int(section), int(item))
        assert here == (last[0], last[1] + 1) or (here[0] > last[0] and here[1] == 1), here
        last = here


def test_sections_that_are_referred_to() -> None:
    for number in re.findall(r"[Ss]ections? (\d+(?:\.\d+)?)", TEXT):
        assert number in SECTIONS or number in SUBSECTIONS, number


@pytest.mark.parametrize(
    "path", ["docs/ENGINE.md", "refdelta/digest.py", "refdelta/files/atomic.py", "refdelta/spec.py"]
)
def test_sections_that_others_refer_to(path: str) -> None:
    """A reference names SPEC.md and a section, in this order."""
    text = (ROOT / path).read_text(encoding="utf-8")
    named = re.findall(r"SPEC\.md\W+(?:\(SPEC\.md\)\W+)?section (\d+(?:\.\d+)?)", text)
    assert named, f"no section of SPEC.md is named in {path}: take it off this list"
    assert set(named) <= {*SECTIONS, *SUBSECTIONS}


# Requirements and their ids

KEYWORD = re.compile(r"\b(?:MUST NOT|MUST|SHOULD|MAY)\b")
MEANT = "The words MUST, MUST NOT, SHOULD and MAY have the meaning that RFC 2119 gives them."
ITEM = re.compile(r'^- <a id="([^"]*)" href="#([^"]*)">([^<]*)</a> (.*(?:\n  .*)*)', re.MULTILINE)
IDS = ROOT / "tests" / "codec" / "spec_ids.txt"


def sentences(item: str) -> list[str]:
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(item.split()))


def requirements() -> dict[str, str]:
    """Id -> normative sentence, in the order of the text."""
    found: dict[str, str] = {}
    for anchor, target, shown, item in ITEM.findall(TEXT):
        assert anchor == target == shown, f"{anchor} is shown as {shown} and links to {target}"
        assert anchor not in found, f"{anchor} is the id of two sentences"
        found[anchor] = sentences(item)[0]
    return found


def test_every_normative_sentence_has_an_id_and_every_id_one_normative_sentence() -> None:
    """The sentence behind the id has one keyword, and nothing else has any."""
    assert len(requirements()) > 120
    for anchor, _, _, item in ITEM.findall(TEXT):
        first, *others = sentences(item)
        assert len(KEYWORD.findall(first)) == 1, f"{anchor}: not one requirement: {first}"
        assert not any(map(KEYWORD.search, others)), f"{anchor}: give the second requirement an id of its own"
    assert TEXT.count(MEANT) == 1
    rest = ITEM.sub("", TEXT.replace(MEANT, ""))
    assert [line for line in rest.splitlines() if KEYWORD.search(line)] == [], "a requirement without id"


def test_ids_are_those_of_their_section() -> None:
    """A section's ids are in no other section, and bear the number of the innermost heading."""
    where = "0"
    for line in TEXT.splitlines():
        if heading := re.match(r"###? (\d+(?:\.\d+)?)\. ", line):
            where = heading[1]
        for anchor in re.findall(r'<a id="([^"]*)"', line):
            assert re.fullmatch(rf"S{re.escape(where)}-[1-9]\d*", anchor), f"{anchor} stands in section {where}"
    assert re.findall(r'<a id="([^"]*)"', TEXT) == list(requirements()), "an anchor that is not that of a requirement"


def withdrawn() -> list[str]:
    return [row[0] for row in table("id", "what it required", "replaced by")]


def test_ids_never_change() -> None:
    """Each is listed with its sentence, and stays in the text or among the withdrawn ones.

    Where a sentence was made clearer, change its line in the list. Where it requires something else, withdraw its id
    and give the sentence a new one.
    """
    lines = IDS.read_text(encoding="utf-8").splitlines()
    listed = dict(line.split(" ", 1) for line in lines)
    assert len(listed) == len(lines), "an id is listed twice"
    found = requirements()
    assert listed.keys() - found.keys() == set(withdrawn()), "an id is gone that section 18 does not list, or is listed"
    assert not found.keys() & set(withdrawn()), "a withdrawn id is used again"
    for name, sentence in found.items():
        assert listed.get(name) == sentence, f"{IDS.name} has not this line: {name} {sentence}"


def test_numbers_are_given_without_gaps() -> None:
    """The next id of a section is one more than all that were ever given there."""
    given: dict[str, list[int]] = {}
    for name in [*requirements(), *withdrawn()]:
        section, number = name.rsplit("-", 1)
        given.setdefault(section, []).append(int(number))
    wrong = {section: sorted(found) for section, found in given.items() if sorted(found) != [*range(1, len(found) + 1)]}
    assert not wrong, wrong


def test_ids_that_are_cited_exist() -> None:
    """In documents, suite, code and tests. A withdrawn one may still be cited."""
    cited = {
        (path, name)
        for folder in ("docs", "conformance", "refdelta", "tests", "examples", "benchmarks", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md") and ".venv" not in path.parts
        for name in re.findall(r"\bS\d+(?:\.\d+)?-\d+\b", path.read_text(encoding="utf-8"))
    }
    assert (ROOT / "docs" / "SPEC.md", "S3.2-2") in cited
    known = {*requirements(), *withdrawn()}
    assert [(path, name) for path, name in sorted(cited) if name not in known] == []


def test_words_in_code_type_are_words_of_the_format() -> None:
    known = {*Reason, *spec.FORMAT_KEYS, *spec.EXTENSIONS, *(field.name for field in fields(Lineage)), "unversioned"}
    known |= {"base_model", "model_id", "kind", "created_at", "timestamp", "dtype", "shape", "data_offsets"}
    known |= {"named_parameters", "diff", "valid", "invalid", "rd1"}
    words = set(re.findall(r"`([a-z][a-z_0-9]+)`", TEXT))
    assert len(words) > 35
    assert words <= known, words - known


def test_that_nothing_is_lost_stands_once_in_each_text() -> None:
    """`test_diff` shows it: `test_no_change_is_too_small_to_be_sent`."""
    for path in ("docs/SPEC.md", "README.md"):
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        assert text.count("A delta is never lossy") == 1, path
        for sentence in (
            "There is no epsilon and no threshold, and no small value is dropped",
            "of a subnormal number, or of the sign of zero is sent like any other.",
        ):
            assert sentence in text, path


def test_files_that_are_named_exist() -> None:
    named = set(re.findall(r"`((?:refdelta|tests|conformance)/[\w./]+)`", TEXT))
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_lines_are_short() -> None:
    long = [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith(("|", "{"))]
    assert not long, long
