"""The audit on live engines: of refdelta's backend, of vLLM's own loader, packed, on one rank and on two."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import Checkpoint
from conformance.live import changes
from conformance.live.runner import Host, environment
from conformance.live.server import Server
from refdelta import cli
from refdelta.vllm.auditing.report import METHOD, AuditReport, Outcome

EXPERTS = "model.layers.0.mlp.experts.routed_experts.w13_weight"
NORM = "model.layers.1.input_layernorm.weight"


@dataclass
class Rig:
    """A tiny Qwen3-MoE, a delta that changes every tensor, and a live engine."""

    checkpoint: Checkpoint
    delta: Path
    host: Host

    def audit(self, *deltas: Path) -> AuditReport:
        """Against the checkpoint plus deltas."""
        arguments = [str(self.checkpoint.directory), [str(delta) for delta in deltas]]
        return AuditReport.from_plain(self.host.call("rpc", method=METHOD, arguments=arguments))

    def finds(self, *deltas: Path) -> list[str]:
        """What differs; everything else must be equal."""
        report = self.audit(*deltas)
        assert not report.named(Outcome.NOT_COMPARABLE)
        return list(report.named(Outcome.DIFFERS))

    def spoil(self, method: str, *arguments: object) -> None:
        """A method of `tests.live.audited.Audited`."""
        self.host.call("rpc", method=method, arguments=list(arguments))

    @property
    def experts(self) -> list[str]:
        """Every expert's tensors."""
        return [name for name in checkpoints.load(self.checkpoint.directory) if ".experts." in name]


@contextmanager
def engine(tmp: Path, tp: int, backend: str | None) -> Iterator[Rig]:
    checkpoint = checkpoints.make("qwen3-moe", tmp / "base")
    state = checkpoints.load(checkpoint.directory)
    target = changes.every_tensor(state, "audit")
    oracle.write_delta(tmp / "delta", oracle.expected_patches(state, target), oracle.total_elements(state))
    env = environment(plugins="refdelta" if backend else "", unpack=backend is None)
    with Host(env, tmp / "log") as host:
        host.start(checkpoint, tp, backend, worker_extension_cls="tests.live.audited.Audited")
        yield Rig(checkpoint, tmp / "delta", host)


def test_experts_that_vllms_own_loader_misplaces_are_found(tmp_path: Path) -> None:
    """Without refdelta's backend: a fresh engine is equal; after vLLM's own update all but the experts is."""
    with engine(tmp_path, 1, None) as rig:
        assert rig.finds() == []
        rig.spoil("native_update", str(rig.delta))
        report = rig.audit(rig.delta)
        assert list(report.named(Outcome.DIFFERS)) == rig.experts
        assert not report.named(Outcome.NOT_COMPARABLE)
        assert len(report.named(Outcome.EQUAL)) == len(report.outcomes) - len(rig.experts)
        assert EXPERTS.replace("w13", "w2") in [name for _, name, _, _ in report.parameters]  # also into padding


def test_two_ranks(tmp_path: Path) -> None:
    """Equal when fresh and after refdelta's update; one bit of one replica, a swap and vLLM's update are found."""
    with engine(tmp_path, 2, "delta_snapshot") as rig:
        assert rig.finds() == []
        assert rig.host.call("sync", info={"target_weights_path": str(rig.delta)}) is None
        assert rig.finds(rig.delta) == []
        assert not list(rig.audit(rig.delta).parameters)

        rig.spoil("flip", 1, NORM, 17)
        report = rig.audit(rig.delta)
        assert list(report.named(Outcome.DIFFERS)) == [NORM]
        ranks = [rank.tensors[NORM] for rank in report.ranks]
        assert [(audit.outcome, audit.differing) for audit in ranks] == [(Outcome.EQUAL, 0), (Outcome.DIFFERS, 1)]
        assert ranks[1].first is not None
        assert ranks[1].first.position == (17,)
        assert int(ranks[1].first.expected, 16) ^ int(ranks[1].first.found, 16) == 1
        rig.spoil("flip", 1, NORM, 17)

        rig.spoil("swap_experts", EXPERTS, 1, 4)
        swapped = [f"model.layers.0.mlp.experts.{e}.{half}_proj.weight" for e in (1, 4) for half in ("gate", "up")]
        assert rig.finds(rig.delta) == swapped
        rig.spoil("swap_experts", EXPERTS, 1, 4)
        assert rig.finds(rig.delta) == []

        _weights_are_audited_after_waking(rig)

        rig.spoil("native_update", str(rig.delta))  # the values that are there already, so only misplaced ones differ
        assert rig.finds(rig.delta) == rig.experts


def _weights_are_audited_after_waking(rig: Rig) -> None:
    """Sleep does nothing on a CPU, so deltas go on; a bit that changed meanwhile is found before the next update."""
    update = {"target_weights_path": str(rig.delta)}
    rig.host.call("sleep", level=1)
    assert rig.host.call("sync", info=update) is None
    assert rig.finds(rig.delta) == []
    rig.host.call("sleep", level=1)
    rig.spoil("flip", 1, NORM, 17)
    refusal = rig.host.call("sync", info=update)
    assert refusal is not None
    assert "refdelta[fenced]: " in refusal
    assert NORM in refusal
    rig.spoil("flip", 1, NORM, 17)


def test_packed_weights_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server as vLLM packs it, without a backend: norms are equal, every linear weight says `packed`."""
    checkpoint = checkpoints.make("qwen3-untied", tmp_path / "base").directory
    extension = ("--worker-extension-cls", "refdelta.vllm.audit.AuditExtension")
    with Server(checkpoint, None, environment(plugins=""), tmp_path / "log", extension) as server:
        server.wait_until_ready()
        command = ["audit", server.url, "--checkpoint", str(checkpoint), "--json"]
        assert cli.run([*command, "--allow-incomparable"]) == 0
        report = json.loads(capsys.readouterr().out)
        norms = [name for name in report["tensors"] if "norm" in name]
        outcomes = {name: said["outcome"] for name, said in report["tensors"].items()}
        assert outcomes == {name: "equal" if name in norms else "not_comparable" for name in outcomes}
        details = [said["detail"] for name, said in report["tensors"].items() if name not in norms]
        assert all(": packed: " in detail for detail in details)
        assert cli.run(command) == 1
        capsys.readouterr()
        assert cli.run([*command, "--delta", "/nonexistent"]) == 2
        assert capsys.readouterr().err.startswith("error: [not_a_delta] rank 0: ")
