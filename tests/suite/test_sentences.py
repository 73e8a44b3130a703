"""Every sentence of SPEC.md is held by a test that was seen to fail for an engine which breaks it; reports say of each.

All links are made by ``python -m conformance.mutants.sentences --write``; here the first one of each codec runs again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conformance.driving import sentences as installed
from conformance.golden import corpus
from conformance.mutants import sentences
from conformance.mutants.registry import SENTENCE, mutants
from tests.suite.runs import CONFORMANCE, QUIET, REPOSITORY, command, run_all

STORED = sentences.stored()
TABLE = sentences.links(STORED)
MINE = mutants(SENTENCE)


def test_every_sentence_has_a_link_or_stands_in_the_short_list() -> None:
    assert sentences.unproven(TABLE) == []
    assert len(sentences.UNLINKED) <= 5
    assert len(TABLE) == len(sentences.sentences()) > 130


def test_a_sentence_without_a_link_is_told() -> None:
    """One whose mutant survives, one that is new, and one of the short list that has a link by now."""
    survived = {**STORED, "TakesLongHeaders": []}
    assert sentences.unproven(sentences.links(survived)) == ["S3.5-1"]
    assert sentences.unproven({**TABLE, "new": {}}) == ["new"]
    assert sentences.unproven({**TABLE, "S4.1-7": {"TakesLongHeaders": ["a test"]}}) == ["S4.1-7"]


def test_what_is_said_to_be_broken_exists() -> None:
    assert {name for ids in sentences.breaking().values() for name in ids} <= TABLE.keys()
    assert sentences.MATRIX.keys() <= {mutant.name for mutant in mutants()}
    assert sentences.UNLINKED.keys() <= TABLE.keys()


def test_every_mutant_has_been_run() -> None:
    """Run the command again where one is new, or is no more."""
    whole = json.loads(sentences.STORED.read_text())
    assert whole.keys() == {mutant.name for mutant in MINE}
    assert [name for name, tests in STORED.items() if not tests] == []
    assert [mutant.name for mutant in MINE if not mutant.breaks] == []


def test_links_are_tests_and_vectors_that_exist() -> None:
    vectors = {vector.name for vector in corpus.load()}
    for test in {test for tests in STORED.values() for test in tests}:
        function, _, parameters = test.partition("[")
        chapter, _, name = function.partition("::")
        prefix = "test_" if chapter.startswith("live") else "test_codec_"
        file = REPOSITORY / chapter if chapter.startswith("tests/") else CONFORMANCE / f"{prefix}{chapter}.py"
        assert f"def {name}(" in file.read_text(), test
        assert not parameters.startswith(("valid/", "invalid/")) or parameters.removesuffix("]") in vectors, test


def test_what_is_made_of_the_links() -> None:
    assert installed.STORED.read_text() == sentences.installed(TABLE), sentences.COMMAND
    assert sentences.DOCUMENT.read_text() == sentences.document(TABLE), sentences.COMMAND


@pytest.mark.timeout(600)
def test_first_links_find_their_mutants() -> None:
    done = command([sys.executable, "-m", "conformance.mutants.sentences", "--check"], cwd=REPOSITORY)
    assert "wrong: none" in done.text.splitlines(), done.text[-3000:]  # vLLM says something behind it
    assert done.code == 0


# What a run says


def by_id(read: list[dict[str, object]]) -> dict[str, dict[str, Any]]:
    return {str(one["id"]): one for one in read}


def test_a_sentence_is_read_from_its_tests() -> None:
    def of(*outcomes: tuple[str, str]) -> dict[str, Any]:
        return by_id(installed.read(outcomes))["S3.5-2"]

    test = "test_codec_vectors.py::test_refused[invalid/header/starts_with_a_space]"
    assert of((test, "passed"))["verdict"] == "passed"
    failed = of((test, "failed"), ("test_codec_vectors.py::test_refused[invalid/header/header_a_list]", "passed"))
    assert (failed["verdict"], failed["tests_failed"]) == ("failed", [test])
    assert of((test, "xfailed"))["verdict"] == "failed"
    for word in ("skipped", "not run"):
        assert of((test, word))["verdict"] == "not judged"
    assert of()["why"] == "none of its tests judged this engine in this run"


def test_a_live_test_counts_on_each_row() -> None:
    rows = [(f"test_live.py::test_separate_tied[{row}]", word) for row, word in (("a", "passed"), ("b", "failed"))]
    found = by_id(installed.read(rows))["S5.3-1"]
    assert (found["verdict"], found["tests_passed"], found["tests_failed"]) == ("failed", 1, [rows[1][0]])


def test_what_the_suite_never_judges_says_why() -> None:
    found = by_id(installed.read([]))
    assert found["S4.1-7"]["why"] == sentences.UNLINKED["S4.1-7"]
    assert "refdelta's own tests" in found["S2.2-1"]["why"]
    assert {one["verdict"] for one in found.values()} == {"not judged"}


def test_reports_are_read_by_sentence(tmp_path: Path) -> None:
    """The sentence that a reader breaks fails, and few beside it; JSON, page and terminal say the same."""
    out = tmp_path / "found"
    engine = "conformance.mutants.by_sentence:TakesPositionsInAnyOrder"
    arguments = [*QUIET, str(CONFORMANCE / "test_codec_vectors.py"), "--engine", engine]
    (outcome,) = run_all([[*arguments, f"--report={out}.json", f"--html={out}.html"]], tmp_path)
    document = json.loads(Path(f"{out}.json").read_text())
    found = by_id(document["sentences"])
    assert list(found) == list(sentences.sentences())
    failed = {name for name, one in found.items() if one["verdict"] == "failed"}
    assert "S3.2-2" in failed
    assert len(failed) <= 4, failed
    words = [one["verdict"] for one in found.values()]
    counts = [f"{words.count(word)} {word}" for word in ("passed", "failed", "not judged")]
    assert f"sentences of SPEC.md: {', '.join(counts)}" in outcome.text
    page = Path(f"{out}.html").read_text()
    assert page.count(f"of {len(found)} sentences of SPEC.md") == 3
    assert "The positions in `i.indices` MUST be strictly increasing" in page
