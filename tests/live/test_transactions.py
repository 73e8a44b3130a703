"""Failures between the ranks of a live engine: old weights or new ones, on all ranks alike, and the next call works."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance import oracle
from conformance.inputs import checkpoints
from conformance.inputs.checkpoints import State
from conformance.live.runner import Host, HostDied, HostError, environment
from tests.live.variables import FAULT

PROMPTS = [[5, 9, 14, 2, 77, 31]]


@dataclass
class Rig:
    """A live Qwen3, two deltas (there and back), and the file that switches faults on."""

    host: Host
    fault: Path
    scratch: Path
    there: Path
    back: Path
    numbers: Iterator[int]

    def dump(self) -> list[bytes]:
        """Every rank's weights, as bytes."""
        out = self.scratch / f"dump{next(self.numbers)}"
        out.mkdir()
        return [Path(file).read_bytes() for file in self.host.call("dump", directory=str(out))]

    def fail(self, point: str, ranks: Sequence[int], call: int = 1, **how: bool) -> None:
        """Make the ``call``-th passage of ``point`` fail on ``ranks`` from now on (`tests.live.faults`)."""
        fault = {"point": point, "ranks": list(ranks), "call": call, "n": next(self.numbers), **how}
        self.fault.write_text(json.dumps(fault))

    def mend(self) -> None:
        """No fault any more."""
        self.fault.write_text("")

    def sync(self, info: object) -> str | None:
        """One whole update; the error's text, or None."""
        found: str | None = self.host.call("sync", info=info)
        return found

    def status(self) -> dict[str, Any]:
        """What every rank says alike."""
        answers = self.host.call("rpc", method="refdelta_status")
        own = ("rank", "last_update")
        first, *others = [{key: value for key, value in answer.items() if key not in own} for answer in answers]
        assert all(other == first for other in others), answers
        found: dict[str, Any] = first
        return found

    def in_step(self, ranks: int) -> None:
        """Replies belong to their calls: a fresh nonce comes back from every rank, twice."""
        for _ in range(2):
            nonce = f"nonce{next(self.numbers)}"
            assert self.host.call("echo", nonce=nonce) == [[rank, nonce] for rank in range(ranks)]


def info(path: Path) -> dict[str, str]:
    return {"target_weights_path": str(path)}


def changed(state: State) -> State:
    """Every tensor changed in its first, middle and last element."""
    new = checkpoints.clone(state)
    for tensor in new.values():
        bits = tensor.view(torch.int16).view(-1)
        bits[[0, bits.numel() // 2, bits.numel() - 1]] ^= 1
    return new


def rig(tmp: Path, tp: int) -> Iterator[Rig]:
    checkpoint = checkpoints.make("qwen3-untied", tmp / "base")
    state = checkpoints.load(checkpoint.directory)
    new = changed(state)
    for name, (a, b) in {"there": (state, new), "back": (new, state)}.items():
        oracle.write_delta(tmp / name, oracle.expected_patches(a, b), oracle.total_elements(a))
    fault = tmp / "fault.json"
    fault.write_text("")
    env = environment(plugins="refdelta", modules=("tests.live.faults",)) | {FAULT: str(fault)}
    with Host(env, tmp / "engine.log") as host:
        host.start(checkpoint, tp, "delta_snapshot")
        yield Rig(host, fault, tmp, tmp / "there", tmp / "back", count())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A TP=2 engine for the whole module: every test leaves it with its first weights, or dead at the end."""
    yield from rig(tmp_path_factory.mktemp("tp2"), 2)


POINTS = ("start", "read", "stage", "prepare", "settle", "before_write", "write", "after_write", "audit")


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=["rank0", "rank1", "both"])
@pytest.mark.parametrize("point", POINTS)
def test_a_failure_anywhere_leaves_the_old_weights_on_every_rank(
    two_ranks: Rig, point: str, ranks: tuple[int, ...]
) -> None:
    """Bit for bit, with the old answers, version and digest; replies in step; and a good update goes there and back."""
    before, known = two_ranks.dump(), two_ranks.status()
    outputs = two_ranks.host.call("generate", prompts=PROMPTS)
    two_ranks.fail(point, ranks, call=5 if point == "write" else 1)
    error = two_ranks.sync(info(two_ranks.there))
    two_ranks.mend()
    assert error is not None
    assert f"refdelta[rank_failed]: rank {ranks[0]}: RuntimeError: injected at {point}" in error
    two_ranks.in_step(2)
    assert two_ranks.dump() == before
    after = two_ranks.status()
    assert after["last_error"]["reason"] == "rank_failed"
    assert {**after, "last_error": None} == {**known, "last_error": None}
    assert two_ranks.host.call("generate", prompts=PROMPTS) == outputs
    assert two_ranks.sync(info(two_ranks.there)) is None
    assert two_ranks.dump() != before
    assert two_ranks.sync(info(two_ranks.back)) is None
    assert two_ranks.dump() == before
    assert two_ranks.status()["digest"] == known["digest"]


def test_ranks_that_read_different_payloads_write_nothing(two_ranks: Rig) -> None:
    """Two valid deltas, one a rank."""
    before = two_ranks.dump()
    error = two_ranks.sync([info(two_ranks.there), info(two_ranks.back)])
    assert error is not None
    assert "refdelta[rank_disagreement]" in error
    two_ranks.in_step(2)
    assert two_ranks.dump() == before


def test_an_unfinished_session_is_dropped_by_the_next_start(two_ranks: Rig) -> None:
    """Staged and never finished: nothing of it is ever written."""
    before = two_ranks.dump()
    two_ranks.host.call("start_update")
    two_ranks.host.call("update", info=info(two_ranks.there))
    assert two_ranks.dump() == before
    two_ranks.host.call("start_update")
    two_ranks.host.call("finish")
    two_ranks.in_step(2)
    assert two_ranks.dump() == before


def test_connecting_takes_no_options(two_ranks: Rig) -> None:
    """``init_weight_transfer_engine`` accepts ``{}`` and refuses anything else, in step either way."""
    two_ranks.host.call("init_transfer")
    two_ranks.in_step(2)
    with pytest.raises(HostError, match=r"refdelta\[bad_option\]"):
        two_ranks.host.call("init_transfer", init_info={"master_address": "127.0.0.1"})
    two_ranks.in_step(2)


@pytest.mark.parametrize("call", ["update", "finish"])
def test_calls_out_of_order_are_refused_on_every_rank_at_once(two_ranks: Rig, call: str) -> None:
    """No session is open: a reason, and no reply left behind in the channel."""
    arguments: dict[str, Any] = {"info": info(two_ranks.there)} if call == "update" else {}
    with pytest.raises(HostError, match=r"refdelta\[no_session\]"):
        two_ranks.host.call(call, **arguments)
    two_ranks.in_step(2)


@pytest.mark.parametrize(
    ("update_info", "reason"),
    [
        ([{"target_weights_path": "THERE"}], "bad_option"),
        ({"path": "/x"}, "bad_option"),
        ({"target_weights_path": 7}, "bad_option"),
        ({"target_weights_path": "/nonexistent"}, "not_a_delta"),
        ("/nonexistent", "bad_option"),
    ],
)
def test_bad_update_info_is_refused_and_ends_the_session(two_ranks: Rig, update_info: object, reason: str) -> None:
    """A list that is too short, unknown keys, wrong types, nothing there; then the session is closed everywhere."""
    two_ranks.host.call("start_update")
    with pytest.raises(HostError, match=rf"refdelta\[{reason}\]"):
        two_ranks.host.call("update", info=json.loads(json.dumps(update_info).replace("THERE", str(two_ranks.there))))
    two_ranks.in_step(2)
    with pytest.raises(HostError, match=r"refdelta\[no_session\]"):
        two_ranks.host.call("finish")
    two_ranks.in_step(2)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("kind", ["missing", "cut", "flipped", "stale"])
def test_one_rank_that_reads_something_else_stops_all(two_ranks: Rig, kind: str, bad: int) -> None:
    """A file that is not there, cut short, flipped in a value, or of an earlier version, on one rank alone."""
    before = two_ranks.dump()
    spoilt = two_ranks.scratch / f"spoilt{next(two_ranks.numbers)}"
    shutil.copytree(two_ranks.back if kind == "stale" else two_ranks.there, spoilt)
    payload = spoilt / "delta.safetensors"
    raw = payload.read_bytes()
    if kind == "missing":
        payload.unlink()
    elif kind == "cut":
        payload.write_bytes(raw[:-1])
    elif kind == "flipped":
        payload.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    infos = [info(spoilt if rank == bad else two_ranks.there) for rank in range(2)]
    error = two_ranks.sync(infos)
    reasons = {
        "missing": "not_a_delta",
        "cut": "bad_header",
        "flipped": "rank_disagreement",
        "stale": "rank_disagreement",
    }
    assert error is not None
    assert f"refdelta[{reasons[kind]}]" in error
    two_ranks.in_step(2)
    assert two_ranks.dump() == before
    assert two_ranks.sync(info(two_ranks.there)) is None
    assert two_ranks.sync(info(two_ranks.back)) is None
    assert two_ranks.dump() == before


def test_an_engine_that_cannot_undo_ends(two_ranks: Rig) -> None:
    """A mixture must not serve: the workers end, and the engine with them. Last, since nothing is left after it."""
    two_ranks.fail("write", [1], call=5, undo=True)
    two_ranks.host.call("start_update")
    two_ranks.host.call("update", info=info(two_ranks.there))
    with pytest.raises((HostError, HostDied)):
        two_ranks.host.call("finish", timeout=60)
    two_ranks.mend()
    with pytest.raises((HostError, HostDied)):
        two_ranks.host.call("generate", prompts=PROMPTS, timeout=60)


def test_a_worker_that_is_killed_ends_the_engine_and_an_anchor_resyncs_a_new_one(tmp_path: Path) -> None:
    """Killed in the middle of its writes; the new engine then equals one that had the delta."""
    (tmp_path / "first").mkdir()
    for first in rig(tmp_path / "first", 2):
        assert first.sync(info(first.there)) is None
        wanted = first.dump()
        assert first.sync(info(first.back)) is None
        first.fail("write", [1], call=3, exit=True)
        assert first.sync(info(first.there)) is not None
        with pytest.raises((HostError, HostDied)):
            first.host.call("generate", prompts=PROMPTS, timeout=60)
    (tmp_path / "second").mkdir()
    for second in rig(tmp_path / "second", 2):
        base = second.scratch / "base"
        anchor = checkpoints.with_state(base, changed(checkpoints.load(base)), second.scratch / "anchor")
        assert second.sync(info(anchor)) is None
        assert second.dump() == wanted
