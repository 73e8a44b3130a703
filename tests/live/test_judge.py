"""The judge sees one bit, an absent or extra parameter, a lost alias and a lost rank, and says where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conformance.live import judge
from conformance.live.probe import Probe


class Runner:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def get_model(self) -> torch.nn.Module:
        return self.model


class Model(torch.nn.Module):
    """A weight with a second name, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        self.head = self.embed
        self.register_buffer("scalar", torch.tensor(1.5))


def dump(model: torch.nn.Module, directory: Path, ranks: int = 1) -> list[judge.RankDump]:
    directory.mkdir()
    for rank in range(ranks):
        probe = Probe()
        probe.rank, probe.model_runner = rank, Runner(model)
        probe.probe_dump(str(directory))
    return judge.read_dumps(directory)


def test_equal_models_give_no_finding(tmp_path: Path) -> None:
    assert not judge.compare("m", dump(Model(), tmp_path / "a", 2), dump(Model(), tmp_path / "b", 2))


def test_one_bit_is_found_and_named(tmp_path: Path) -> None:
    model = Model()
    with torch.no_grad():
        model.embed.view(torch.int16)[4, 1] ^= 1
    (finding,) = judge.compare("m", dump(Model(), tmp_path / "a"), dump(model, tmp_path / "b"))
    bits = int(Model().embed.detach().view(torch.int16)[4, 1]) & 0xFFFF
    text = f"m: rank 0 embed at [4, 1]: expected 0x{bits:04x}, found 0x{bits ^ 1:04x}"
    assert str(finding) == f"{text} (1 elements differ, torch.bfloat16)"


def untie(model: Model) -> None:
    model.head = torch.nn.Parameter(model.embed.detach().clone())


def add(model: Model) -> None:
    model.register_buffer("extra", torch.zeros(2))


def retype(model: Model) -> None:
    model.scalar = model.scalar.double()


@pytest.mark.parametrize(("change", "name"), [(untie, "head"), (add, "extra"), (retype, "scalar")])
def test_shape_of_the_model_is_compared_too(change: Callable[[Model], None], name: str, tmp_path: Path) -> None:
    model = Model()
    change(model)
    findings = judge.compare("m", dump(Model(), tmp_path / "a"), dump(model, tmp_path / "b"))
    assert [(f.tensor, f.position, f.rank, f.differing) for f in findings] == [(name, None, 0, None)]


def test_a_missing_rank_is_a_finding(tmp_path: Path) -> None:
    findings = judge.compare("m", dump(Model(), tmp_path / "a", 2), dump(Model(), tmp_path / "b"))
    assert [str(f) for f in findings] == ["m: ranks: expected [0, 1], found [0]"]


def test_an_empty_truth_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="holds no rank"):
        judge.compare("m", [], [])
    save_file({}, tmp_path / "rank0.safetensors")
    (tmp_path / "rank0.json").write_text(json.dumps({}))
    with pytest.raises(AssertionError, match="holds no parameter"):
        judge.compare("m", judge.read_dumps(tmp_path), judge.read_dumps(tmp_path))


def output(tokens: list[int], value: float) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": [[(tokens[0], value)]], "prompt_logprobs": [[(1, -2.0)]]}


def test_outputs_are_compared_exactly() -> None:
    one, other = output([3], -0.5), output([3], -0.5000000000000001)
    assert not judge.compare_outputs("m", [one], [output([3], -0.5)])
    assert judge.compare_outputs("m", [one], [other]) == [
        "m prompt 0 logprobs: expected [(3, -0.5)] at position 0, found [(3, -0.5000000000000001)]"
    ]
    assert judge.compare_outputs("m", [one], [output([4], -0.5)])[0].startswith("m prompt 0 tokens")
    assert judge.finite([one])
    assert not judge.finite([output([3], float("nan"))])
