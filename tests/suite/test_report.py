"""Reports of known runs: the JSON by its schema, the fields of a failure, the page, JUnit."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

from conformance.driving.checks import CODEC_CHECKS
from conformance.engines import capabilities
from conformance.findings import EngineFailed, Finding, InfrastructureFailed, Mismatch, findings_of, is_infrastructure
from conformance.suite import report
from conformance.suite.matrix import CODEC_PROVES
from tests.suite.runs import CONFORMANCE, QUIET, run_all

RUNS = {
    "passing": ("right:Plain", ("counted", "declines")),
    "failing": ("appliers:DropsNegativeZero", ("counted", "bit_exact", "inverts")),
    "missing": ("encoders:MissesLastElement", ("minimal",)),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of `RUNS`, as NAME.json, NAME.html and NAME.xml."""
    out = tmp_path_factory.mktemp("reports")
    arguments = []
    for name, (engine, chapters) in RUNS.items():
        tests = [str(CONFORMANCE / f"test_codec_{chapter}.py") for chapter in chapters]
        files = [f"--report={out / name}.json", f"--html={out / name}.html", f"--junitxml={out / name}.xml"]
        arguments.append([*QUIET, *tests, "--engine", f"conformance.mutants.{engine}", *files])
    run_all(arguments, out)
    return out


def document(made: Path, name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((made / f"{name}.json").read_text())
    return parsed


@pytest.mark.parametrize("name", list(RUNS))
def test_documents_follow_the_schema(made: Path, name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(report.schema())
    jsonschema.validate(document(made, name), report.schema())


@pytest.mark.parametrize(
    ("bits", "dtype", "text"),
    [
        ("0x80000000", "torch.float32", "-0.0"),
        ("0x8000", "torch.bfloat16", "-0.0"),
        ("0x3fc0", "torch.bfloat16", "1.5"),
        ("0x7e00", "torch.float16", "nan"),
        ("0xfff0000000000000", "torch.float64", "-inf"),
        ("0x80", "torch.float8_e4m3fn", ""),
        ("0x8000", "torch.float32", ""),
        ("absent", "torch.float32", ""),
        (None, "torch.float32", ""),
        ("0x8000", None, ""),
    ],
)
def test_bits_are_shown_as_numbers_too(bits: str | None, dtype: str | None, text: str) -> None:
    assert report.number(bits, dtype) == text


@pytest.mark.parametrize("key", ["proves", "levels", "tests", "versions", "engine"])
def test_the_schema_refuses_less_and_more(made: Path, key: str) -> None:
    whole = document(made, "failing")
    less, more = copy.deepcopy(whole), copy.deepcopy(whole)
    del less[key]
    more["tests"][0]["mood"] = "good"
    for wrong in (less, more):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, report.schema())


def test_a_passing_run(made: Path) -> None:
    found = document(made, "passing")
    assert (found["verdict"], found["exit_code"]) == ("passed", 0)
    assert found["engine"]["name"] == "plain"
    assert {check["id"] for check in found["checks"]} == CODEC_CHECKS.keys()
    assert found["proves"] == CODEC_PROVES
    assert {capability["id"] for capability in found["capabilities"]} == capabilities.of_kind("codec").keys()
    assert {entry["id"] for entry in found["capabilities"] if not entry["declared"]} == {
        *("large", "reasons", "new_tensors")
    }
    assert all(test["seconds"] > 0 for test in found["tests"])
    drawn = next(test for test in found["tests"] if test["id"] == "test_codec_counted.py::test_counts")
    assert any("passing" in line for line in drawn["hypothesis"])
    assert any(line.endswith("dtype BF16") for line in drawn["hypothesis"])
    for library in ("torch", "numpy", "python", "platform"):
        assert found["versions"][library]


def test_failures_come_first_and_have_fields(made: Path) -> None:
    found = document(made, "failing")
    assert (found["verdict"], found["exit_code"]) == ("failed", 1)
    outcomes = [test["outcome"] for test in found["tests"]]
    failed = [test for test in found["tests"] if test["outcome"] == "failed"]
    assert outcomes[: len(failed)] == ["failed"] * len(failed)
    assert len(failed) > 3
    for test in failed:
        (finding,) = test["findings"]
        assert finding["tensor"], test["id"]
        assert re.fullmatch("0x80(00)*", finding["expected"]), "the sign alone"
        assert set(finding["found"]) <= set("0x")
        assert len(finding["expected"]) == len(finding["found"])
        assert finding["position"] is not None
        assert test["reason"]
    property_ = next(test for test in failed if test["id"].endswith("::test_round_trip"))
    page = (made / "failing.html").read_text()
    assert re.search(r'<code class="want">0x80(00)+</code> <span class="dim">-0\.0</span>', page)
    assert property_["blob"].startswith("@reproduce_failure(")
    assert "Failing test case: test_round_trip(" in property_["example"]
    assert "Mismatch: " in property_["text"]
    assert "@reproduce" not in property_["example"] + property_["text"], "no decorator reaches the installed suite"
    expected = (
        "python -m pytest --pyargs conformance.test_codec_bit_exact::test_round_trip --engine conformance.mutants."
    )
    assert property_["reproduce"].startswith(expected)


def test_a_position_that_is_missed_is_named(made: Path) -> None:
    """The last element of a tensor, with the bits that it should get."""
    findings = [finding for test in document(made, "missing")["tests"] for finding in test["findings"]]
    placed = [finding for finding in findings if finding["what"] == "positions"]
    assert placed, findings
    for finding in placed:
        assert finding["flat"] == finding["elements"] - 1
        assert finding["expected"] != finding["found"]


class Page(HTMLParser):
    """What a page fetches, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {str(found["id"])} if "id" in found else set()
        self.links += [str(found["href"])] if tag == "a" else []
        if tag in ("script", "link", "img", "iframe", "object") or "src" in found:
            self.fetched.append(tag)

    def handle_data(self, data: str) -> None:
        self.said += data


@pytest.mark.parametrize("name", list(RUNS))
def test_page_is_one_file(made: Path, name: str) -> None:
    text = (made / f"{name}.html").read_text()
    found = Page(text)
    assert not found.fetched
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_page_says_what_the_document_does(made: Path) -> None:
    found, whole = Page((made / "failing.html").read_text()), document(made, "failing")
    for test in whole["tests"]:
        assert test["id"] in found.said
    for finding in (finding for test in whole["tests"] for finding in test["findings"]):
        assert finding["expected"] in found.said
    for level in whole["levels"]:
        assert level["promise"] in found.said
    assert whole["proves"] in found.said
    assert found.said.index("Causes") < found.said.index("Failures") < found.said.index("Matrix")
    assert "reproduce_failure" not in found.said, "its decorator is for functions that a reader can edit"
    assert len(found.links) == whole["counts"]["failed"] + len(whole["causes"])
    assert {unquote(link.removeprefix("#")) for link in found.links} <= found.ids
    assert "Failures" not in Page((made / "passing.html").read_text()).said


def test_page_escapes_what_engines_say(made: Path) -> None:
    whole = document(made, "failing")
    whole["engine"]["name"] = "<script>alert(1)</script>"
    whole["tests"][0]["findings"][0]["tensor"] = "a<b>\x00é"
    text = report.page(whole)
    assert "<script>alert" not in text
    assert "a&lt;b&gt;\\x00\\xe9" in text


def test_junit(made: Path) -> None:
    """Every test, with its check as a property."""
    suite = ElementTree.parse(made / "failing.xml").getroot().find("testsuite")
    assert suite is not None
    whole = document(made, "failing")
    assert int(suite.attrib["failures"]) == whole["counts"]["failed"]
    cases = suite.findall("testcase")
    assert len(cases) == len(whole["tests"])
    checks = {
        prop.attrib["value"] for case in cases for prop in case.iter("property") if prop.attrib["name"] == "check"
    }
    assert checks == {"bit_exact", "counted", "inverts"}


# --- findings ---------------------------------------------------------------------------------------------------------


def test_findings_are_found_wherever_they_are() -> None:
    finding = Finding("bits", "w", (1, 0), 3, "0x8000", "0x0000", "torch.bfloat16", 2, 6, context="after")
    text = "after: w at flat 3 [1, 0]: expected 0x8000, found 0x0000 (2 of 6 elements differ, torch.bfloat16)"
    assert str(Mismatch(finding)) == text
    assert findings_of(Mismatch(finding)) == (finding,)
    assert findings_of(ExceptionGroup("two", [ValueError(), Mismatch(finding)])) == (finding,)
    assert findings_of(ValueError()) == ()
    outer = RuntimeError()
    outer.__cause__ = Mismatch(finding)
    assert findings_of(outer) == (finding,)
    assert finding.fields()["position"] == [1, 0]


def test_what_says_nothing_of_the_engine() -> None:
    assert is_infrastructure(InfrastructureFailed("x"))
    assert is_infrastructure(ExceptionGroup("one", [InfrastructureFailed("x")]))
    for error in (EngineFailed("x"), AssertionError("x"), None):
        assert not is_infrastructure(error)
