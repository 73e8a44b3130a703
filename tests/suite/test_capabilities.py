"""Capabilities and levels: named, documented, each needed by some test, and what a run makes of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from conformance.driving import levels
from conformance.driving.checks import CHECKS, CODEC_CHECKS, LIVE_CHECKS
from conformance.driving.levels import DECLINED, FAILED, LEVELS, NOT_RUN, PASSED, judge
from conformance.engines import capabilities
from conformance.engines import codecs as engines
from conformance.engines.capabilities import CODEC, KINDS, LIVE, PROGRAM, UnknownCapability
from conformance.inputs.strategies import _CODES_OF
from tests.suite.runs import CONFORMANCE


def needed() -> set[str]:
    """Every capability that a test names: by marker, in `skip_for`, `offers` or `in engine.capabilities`."""
    files = [
        *CONFORMANCE.glob("test_*.py"),
        *(CONFORMANCE / "live").glob("*.py"),
        CONFORMANCE / "inputs" / "strategies.py",
    ]
    words = {*_CODES_OF} | {
        node.value for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
    }
    return {word for word in words if isinstance(word, str) and word in capabilities.BY_ID}


def test_every_capability_is_documented_and_needed() -> None:
    ids = [capability.id for capability in capabilities.ALL]
    assert len(ids) == len(set(ids)) > 20
    for capability in capabilities.ALL:
        assert len(capability.promise) > 10, capability.id
        assert capability.kinds <= set(KINDS)
        assert capability.kinds, capability.id
    assert set(ids) - needed() <= {"lineage"}


def test_what_goes_without_saying_and_what_is_taken_back() -> None:
    """Old declarations mean what they meant; sets and their members are one thing."""
    least = capabilities.checked((), CODEC, "It")
    assert least == set(capabilities.BASIC)
    assert capabilities.checked({"-scalars", "-float16"}, CODEC, "It") == least - {"scalars", "float16"}
    assert capabilities.checked({"float8"}, CODEC, "It") == least | {"float8", *capabilities.SETS["float8"]}
    assert capabilities.checked({*capabilities.SETS["non_floating"]}, CODEC, "It") >= {"non_floating"}
    assert capabilities.checked({"non_floating", "-bool"}, CODEC, "It") == least | {"integers", "complex"}
    assert capabilities.checked({"rollback"}, LIVE, "It") == {"rollback"}
    with pytest.raises(UnknownCapability, match="'flies'"):
        capabilities.checked({"-flies"}, CODEC, "It")


def test_former_names_still_work() -> None:
    """Adopters declare these: none may go."""
    former = {"non_floating", "sub_byte", "large", "strided", "in_place", "canonical", "reasons", "inverts", "composes"}
    assert former | {"digests", "lineage", "routes"} <= engines.CAPABILITIES.keys()


def test_what_a_program_cannot_offer() -> None:
    """A program gets files: nothing in memory, and no layouts."""
    only_in_memory = capabilities.of_kind(CODEC).keys() - capabilities.of_kind(PROGRAM).keys()
    assert only_in_memory == {"strided", "in_place", "autograd", "keeps_existing", "routes"}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_checked(kind: str) -> None:
    known = capabilities.of_kind(kind)
    assert capabilities.checked(known, kind, "It") == known.keys()
    with pytest.raises(UnknownCapability, match=r"It declares unknown capabilities \['flies'\]; known are \["):
        capabilities.checked({"flies"}, kind, "It")
    other = next(name for name in capabilities.BY_ID if name not in known)
    with pytest.raises(UnknownCapability, match=f"which a {kind} engine cannot offer"):
        capabilities.checked({other}, kind, "It")


def test_methods_are_those_of_the_protocol() -> None:
    for capability in capabilities.of_kind(CODEC).values():
        assert capability.method is None or callable(getattr(engines.FullCodec, capability.method))


def test_dtypes_of_capabilities() -> None:
    """Every dtype belongs to one capability, or to what every engine takes."""
    assert _CODES_OF.keys() <= capabilities.of_kind(CODEC).keys()


# --- levels -----------------------------------------------------------------------------------------------------------


def test_every_check_belongs_to_a_level() -> None:
    """But for those that tests name themselves, and the one that is two others together."""
    named = {name for check in CHECKS.values() for name in check.levels}
    assert named | {"applier", "strict", "reader"} == levels.BY_ID.keys()
    assert [level.id for level in levels.LEVELS if not level.own] == ["reader"]
    for checks, live in ((CODEC_CHECKS, False), (LIVE_CHECKS, True)):
        assert all(check.levels for check in checks.values())
        assert {levels.BY_ID[name].live for check in checks.values() for name in check.levels} == {live}
    for level in LEVELS:
        assert all(levels.BY_ID[name].live == level.live for name in level.on)
        assert level.needs <= capabilities.of_kind(LIVE if level.live else CODEC).keys()


def test_the_table_has_the_checks_of_the_chapters_and_no_others() -> None:
    """A check without a test would be a promise that nothing is held to; one without an entry has no level."""
    marked = {True: set[str](), False: set[str]()}
    for chapter in sorted(CONFORMANCE.glob("test_*.py")):
        found = re.findall(r"""\bmark\.check\("(\w+)"\)""", chapter.read_text())
        assert found, chapter
        marked[chapter.name.startswith("test_live")].update(found)
    assert marked == {True: LIVE_CHECKS.keys(), False: CODEC_CHECKS.keys()}


ALL_PASS = {level.id: ["passed", "skipped"] for level in LEVELS}


def words(outcomes: dict[str, list[str]], offered: set[str], *, live: bool = False) -> dict[str, str]:
    return {found.level.id: found.word for found in judge(ALL_PASS | outcomes, live=live, capabilities=offered)}


def test_all_levels_pass() -> None:
    codec, live = (set(capabilities.of_kind(kind)) for kind in (CODEC, LIVE))
    assert set(words({}, codec).values()) == {PASSED}
    assert set(words({}, live, live=True).values()) == {PASSED}


def test_a_failure_fails_its_level_and_those_above() -> None:
    found = words({"applier": ["passed", "failed"]}, set(capabilities.of_kind(CODEC)))
    assert found == {
        "applier": FAILED, "safe": FAILED, "strict": FAILED, "reader": FAILED, "codec": FAILED, "versioned": FAILED,
        "writer": PASSED, "canonical": PASSED, "router": PASSED,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        (["passed", "xfailed"], FAILED),
        (["passed", "not run"], NOT_RUN),
        (["skipped"], NOT_RUN),
        ([], NOT_RUN),
        (["failed", "not run"], FAILED),
    ],
)
def test_what_is_not_a_pass(outcomes: list[str], word: str) -> None:
    """An expected failure, a test that was left out, nothing but skips."""
    assert words({"writer": outcomes}, set())["writer"] == word


def test_what_is_not_declared_is_declined() -> None:
    found = words({"canonical": ["skipped"], "router": ["passed"]}, {"inverts"})
    assert (found["canonical"], found["router"], found["versioned"]) == (DECLINED,) * 3
    why = {verdict.level.id: verdict.why for verdict in judge(ALL_PASS, live=False, capabilities={"inverts"})}
    assert why["versioned"] == "the engine does not declare composes, digests, lineage"
    assert words({}, set(), live=True) == {"live": PASSED, "transactional": DECLINED, "served": DECLINED}


def test_selection_takes_what_a_level_stands_on() -> None:
    assert levels.closure(["codec"]) == {"codec", "reader", "safe", "strict", "applier", "writer"}
    assert levels.closure([]) == set()
    assert Path(levels.__file__).parents[1] == CONFORMANCE
