"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tests.client.fake_server import FakeServer

MODULES = {
    "refdelta.codec.encoding": ["diff"],
    "refdelta.codec.applying": ["apply_delta"],
    "refdelta.codec.composition": ["compose"],
    "refdelta.layout.map": ["Region", "LayoutMap.route"],
    "refdelta.vllm.calls.client": ["Client.sync"],
}
"""Module -> what has an example there."""


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in MODULES.items() for name in names])
def test_an_example_does_what_it_shows(module: str, name: str) -> None:
    found = doctest.DocTestFinder(recurse=True).find(importlib.import_module(module), module)
    (example,) = (one for one in found if one.name == f"{module}.{name}" and one.examples)
    report = list[str]()
    example.globs["client"] = FakeServer().client()
    assert doctest.DocTestRunner().run(example, out=report.append).failed == 0, "".join(report)
