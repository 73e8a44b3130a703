"""The audit on stand-ins: what it finds in a model of two ranks, what the ranks say together, and the command."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from refdelta import DeltaEncoder, Lineage, cli, write_delta
from refdelta.checkpoints.reading import Checkpoint
from refdelta.spec import Delta, DeltaError, Reason, TensorPatch
from refdelta.vllm.auditing.extension import audit, compare, explained
from refdelta.vllm.auditing.report import AuditReport, Outcome, RankAudit, TensorAudit

BF16 = torch.bfloat16
State = dict[str, Tensor]


class Toy(nn.Module):
    """One of two ranks: rows of q and columns of k fused, a whole norm, a padded embedding, its head tied to it.

    And t, held twice: transposed and as it is.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.fused = nn.Parameter(torch.full((9, 4), 7, dtype=BF16), requires_grad=False)
        self.norm = nn.Parameter(torch.full((4,), 7, dtype=BF16), requires_grad=False)
        self.embed = nn.Parameter(torch.full((7, 4), 7, dtype=BF16), requires_grad=False)
        self.turned = nn.Parameter(torch.full((3, 2), 7, dtype=BF16), requires_grad=False)
        self.again = nn.Parameter(torch.full((2, 3), 7, dtype=BF16), requires_grad=False)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        given = dict(weights)
        self.fused.data[:5].copy_(given["q"].narrow(0, 5 * self.rank, 5))
        self.fused.data[5:].copy_(given["k"].narrow(1, 4 * self.rank, 4))
        self.norm.data.copy_(given["norm"])
        self.embed.data[:5].copy_(given["embed"])
        self.embed.data[5:].fill_(0)
        self.turned.data.copy_(given["t"].t())
        self.again.data.copy_(given["t"])


SHAPES = {"q": (10, 4), "k": (4, 8), "norm": (4,), "embed": (5, 4), "t": (2, 3), "a.rotary_emb.inv_freq": (3,)}


def random_state(seed: int) -> State:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(BF16) for name, shape in SHAPES.items()}


def ranks_with(state: State) -> list[Toy]:
    toys = [Toy(0), Toy(1)]
    for toy in toys:
        toy.load_weights(state.items())
    return toys


@pytest.fixture
def base(tmp_path: Path) -> tuple[State, Path]:
    state = random_state(0)
    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    return state, tmp_path / "base"


def audited(toys: Iterable[Toy], checkpoint: Path, *deltas: Path) -> AuditReport:
    """As it crosses a process: through JSON."""
    ranks = [RankAudit(toy.rank, *compare(toy, checkpoint, deltas)).to_plain() for toy in toys]
    return AuditReport.from_plain(json.loads(json.dumps(ranks)))


def test_an_engine_that_holds_the_checkpoint(base: tuple[State, Path]) -> None:
    """All equal; what no rank holds for a reason is not comparable; nothing is written."""
    state, checkpoint = base
    toys = ranks_with(state)
    before = [tensor.clone() for toy in toys for tensor in toy.parameters()]
    report = audited(toys, checkpoint)
    assert list(report.named(Outcome.EQUAL)) == ["embed", "k", "norm", "q", "t"]
    (why,) = report.named(Outcome.NOT_COMPARABLE).values()
    assert why == "rank 0: dropped: rotary table: recomputed from the config"
    assert not list(report.parameters)
    assert report.ranks[1].tensors["q"].elements == 20
    after = [tensor for toy in toys for tensor in toy.parameters()]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("rank", "param", "position", "tensor", "index"),
    [
        (1, "norm", 2, "norm", (2,)),
        (1, "fused", 6, "q", (6, 2)),
        (0, "fused", 35, "k", (3, 3)),
        (1, "fused", 21, "k", (0, 5)),
        (0, "embed", 19, "embed", (4, 3)),
        (1, "turned", 1, "t", (1, 0)),
        (1, "again", 5, "t", (1, 2)),
    ],
)
def test_one_bit_on_one_rank_is_found_in_checkpoint_coordinates(
    base: tuple[State, Path], rank: int, param: str, position: int, tensor: str, index: tuple[int, ...]
) -> None:
    """With the bits of both, and nothing else differs."""
    state, checkpoint = base
    toys = ranks_with(state)
    toys[rank].get_parameter(param).view(torch.int16).view(-1)[position] ^= 1
    report = audited(toys, checkpoint)
    assert list(report.named(Outcome.DIFFERS)) == [tensor]
    found = report.ranks[rank].tensors[tensor]
    assert found.differing == 1
    assert found.first is not None
    assert (found.first.position, found.first.param) == (index, param)
    word = int(state[tensor].view(torch.int16)[index]) & 0xFFFF
    assert (found.first.expected, found.first.found) == (f"0x{word:04x}", f"0x{word ^ 1:04x}")
    assert report.ranks[1 - rank].tensors[tensor].outcome is Outcome.EQUAL


def test_the_first_of_several_is_the_first_of_the_checkpoint(base: tuple[State, Path]) -> None:
    """k stands after q in the parameter, and of its own rows the first counts; t stands transposed."""
    state, checkpoint = base
    toys = ranks_with(state)
    words = toys[0].fused.view(torch.int16)
    words[[8, 6, 7], [0, 3, 1]] ^= 1
    toys[0].turned.view(torch.int16)[[0, 1], [1, 0]] ^= 1
    tensors = audited(toys, checkpoint).ranks[0].tensors
    for name, differing, position in (("k", 3, (1, 3)), ("t", 2, (0, 1))):
        found = tensors[name]
        assert found.first is not None
        assert (found.differing, found.first.position) == (differing, position)


def test_padding_that_is_not_zero(base: tuple[State, Path]) -> None:
    state, checkpoint = base
    toys = ranks_with(state)
    toys[1].embed.data[6, 1] = -0.0
    assert list(audited(toys, checkpoint).parameters) == [
        (1, "embed", Outcome.DIFFERS, "1 padding elements are not zero")
    ]


def test_tied_names_that_the_files_both_hold(base: tuple[State, Path]) -> None:
    """Each is held against the one parameter: equal both, or the one that is not what the engine holds differs."""
    state, checkpoint = base
    toys = ranks_with(state)
    both = state | {"lm_head.weight": state["embed"].clone()}
    save_file(both, checkpoint / "model.safetensors")
    assert audited(toys, checkpoint).outcomes["lm_head.weight"][0] is Outcome.EQUAL
    both["lm_head.weight"].view(torch.int16)[3, 1] ^= 1
    save_file(both, checkpoint / "model.safetensors")
    report = audited(toys, checkpoint)
    assert list(report.named(Outcome.DIFFERS)) == ["lm_head.weight"]
    assert report.outcomes["embed"][0] is Outcome.EQUAL


class Strange(Toy):
    """Holds the norm in float32, and a parameter that nothing is loaded into."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.extra = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


def test_what_cannot_be_compared_says_why(base: tuple[State, Path]) -> None:
    state, checkpoint = base
    toys: list[Toy] = [Strange(0), Strange(1)]
    for toy in toys:
        toy.load_weights(state.items())
    report = audited(toys, checkpoint)
    why = report.named(Outcome.NOT_COMPARABLE)["norm"]
    assert why == "rank 0: norm: derived: it holds torch.float32, computed from torch.bfloat16"
    assert [item[1:3] for item in report.parameters] == [("extra", Outcome.NOT_COMPARABLE)] * 2


def test_a_tensor_that_the_loader_passes_over(base: tuple[State, Path]) -> None:
    """No rule accounts for it."""
    state, _ = base
    toys = ranks_with(state)
    save_file(state | {"q.bias": torch.ones(3)}, base[1] / "model.safetensors")
    report = audited(toys, base[1])
    assert report.named(Outcome.NOT_COMPARABLE)["q.bias"].endswith("it reaches no parameter, and no rule says why")


# --- deltas -----------------------------------------------------------------------------------------------------------


def chain(base: State, tmp_path: Path, run_id: str | None = "run") -> tuple[State, list[Path]]:
    """Two updates in order, the second over the first, and the state that they lead to."""
    encoder = DeltaEncoder(base, run_id=run_id)
    state = {name: tensor.clone() for name, tensor in base.items()}
    paths = []
    for step in range(2):
        for name in ("q", "norm"):
            state[name].view(torch.int16).view(-1)[step : step + 2] ^= 5 + step
        delta = encoder.encode(state)
        encoder.commit(delta)
        paths.append(write_delta(delta, tmp_path / f"delta{step}"))
    return state, paths


@pytest.mark.parametrize("run_id", ["run", None])
def test_deltas_are_applied_in_order(base: tuple[State, Path], tmp_path: Path, run_id: str | None) -> None:
    """Equal with all of them, different without the last."""
    state, paths = chain(base[0], tmp_path, run_id)
    toys = ranks_with(state)
    assert not audited(toys, base[1], *paths).named(Outcome.DIFFERS)
    assert list(audited(toys, base[1], paths[0]).named(Outcome.DIFFERS)) == ["norm", "q"]


def test_deltas_that_do_not_follow_each_other_are_refused(base: tuple[State, Path], tmp_path: Path) -> None:
    """Reversed, without the first, and on another checkpoint: base_mismatch each time."""
    state, paths = chain(base[0], tmp_path)
    toys = ranks_with(state)
    for wrong in (paths[::-1], paths[1:]):
        with pytest.raises(DeltaError) as caught:
            audited(toys, base[1], *wrong)
        assert caught.value.reason is Reason.BASE_MISMATCH
    save_file(random_state(1), base[1] / "model.safetensors")
    with pytest.raises(DeltaError) as caught:
        audited(toys, base[1], *paths)
    assert caught.value.reason is Reason.BASE_MISMATCH


def test_a_digest_that_the_deltas_do_not_lead_to_is_refused(base: tuple[State, Path], tmp_path: Path) -> None:
    patch = TensorPatch("norm", (4,), torch.tensor([1], dtype=torch.int32), torch.tensor([2.0], dtype=BF16))
    total = sum(tensor.numel() for tensor in base[0].values())
    lineage = Lineage("run", 1, digest="rd1:0123456789abcdef")
    path = write_delta(Delta((patch,), total, lineage), tmp_path / "delta")
    with pytest.raises(DeltaError) as caught:
        audited(ranks_with(base[0]), base[1], path)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_the_parts_of_one_update_count_as_one(base: tuple[State, Path], tmp_path: Path) -> None:
    """In any order; one alone is incomplete."""
    paths, total = [], sum(tensor.numel() for tensor in base[0].values())
    state = dict(base[0])
    for part, name in enumerate(("norm", "q")):
        value = torch.tensor([3.0], dtype=BF16)
        patch = TensorPatch(name, SHAPES[name], torch.tensor([1], dtype=torch.int32), value)
        state[name] = state[name].clone()
        state[name].view(-1)[1] = 3.0
        path = tmp_path / f"part{part}"
        paths.append(write_delta(Delta((patch,), total, Lineage("run", 1, base_version=0, part=(part, 2))), path))
    toys = ranks_with(state)
    assert not audited(toys, base[1], *paths[::-1]).named(Outcome.DIFFERS)
    with pytest.raises(DeltaError) as caught:
        audited(toys, base[1], paths[0])
    assert caught.value.reason is Reason.INCOMPLETE


def test_deltas_in_other_coordinates_are_refused(base: tuple[State, Path], tmp_path: Path) -> None:
    """A name that the checkpoint lacks; a tied head alone, but not beside the same change of its partner."""
    toys, total = ranks_with(base[0]), sum(tensor.numel() for tensor in base[0].values())
    state = dict(base[0], embed=base[0]["embed"].clone())
    state["embed"][0, 1] = 4.0

    def sent(*names: str) -> Path:
        values = torch.tensor([4.0], dtype=BF16)
        patches = tuple(TensorPatch(n, (5, 4), torch.tensor([1], dtype=torch.int32), values) for n in names)
        return write_delta(Delta(patches, total, None), tmp_path / "-".join(names))

    for name, reason in (("lm_head.weight", Reason.ALIAS_CONFLICT), ("z", Reason.UNKNOWN_TENSOR)):
        with pytest.raises(DeltaError) as caught:
            audited(toys, base[1], sent(name))
        assert caught.value.reason is reason
    assert list(audited(toys, base[1], sent("embed", "lm_head.weight")).named(Outcome.DIFFERS)) == ["embed"]
    assert not audited(ranks_with(state), base[1], tmp_path / "embed-lm_head.weight").named(Outcome.DIFFERS)


# --- the ranks together -----------------------------------------------------------------------------------------------


def test_elements_that_no_rank_holds_are_not_equal(base: tuple[State, Path]) -> None:
    """Each rank finds its half equal; without the second rank half of q is on no rank."""
    toys = ranks_with(base[0])
    assert audited(toys[:1], base[1]).outcomes["q"] == (
        Outcome.NOT_COMPARABLE,
        "20 of its 40 elements are on no rank",
    )


def test_a_rank_that_refuses_speaks_for_all(base: tuple[State, Path]) -> None:
    """With its reason and its number; answers that are none are named too."""
    good = RankAudit(0, {}).to_plain()
    error = DeltaError(Reason.NOT_A_DELTA, "no such directory", "q")
    with pytest.raises(DeltaError, match=r"rank 1: no such directory") as caught:
        AuditReport.from_plain([good, {"rank": 1, "error": str(error)}])
    assert (caught.value.reason, caught.value.tensor) == (Reason.NOT_A_DELTA, "q")
    for answers in ([], ["None"], [{"rank": 0}], [{**good, "tensors": {"q": {"outcome": "equal"}}}]):
        with pytest.raises(DeltaError) as caught:
            AuditReport.from_plain(answers)
        assert caught.value.reason is Reason.RANK_FAILED


def test_the_function_sends_absolute_paths(base: tuple[State, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run elsewhere."""

    class Llm:
        def collective_rpc(self, method: str, args: tuple[str, list[str]]) -> list[dict[str, Any]]:
            assert method == "refdelta_compare"
            assert args == (str(base[1]), [str(base[1].parent / "d")])
            return [RankAudit(0, *compare(Toy(0), base[1], ())).to_plain()]

    monkeypatch.chdir(base[1].parent)
    assert audit(Llm(), "base", ["d"]).outcome is Outcome.DIFFERS


# --- the command ------------------------------------------------------------------------------------------------------

Answer = tuple[int, object]


@pytest.fixture
def server() -> Iterator[Callable[[Answer], str]]:
    """Makes a server that gives one answer to every request, and returns its URL; requests are kept in `asked`."""
    running: list[HTTPServer] = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                text = answer[1] if isinstance(answer[1], str) else json.dumps(answer[1])
                self.send_response(answer[0])
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        made = HTTPServer(("127.0.0.1", 0), Handler)
        running.append(made)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made.server_port}/"

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


asked: list[tuple[str, Mapping[str, Any]]] = []


def answer_of(toys: Iterable[Toy], checkpoint: Path) -> Answer:
    return 200, {"results": [RankAudit(toy.rank, *compare(toy, checkpoint)).to_plain() for toy in toys]}


def test_the_command_tells_equal_from_different(
    base: tuple[State, Path],
    server: Callable[[Answer], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit codes, the table and JSON; paths are sent absolute, deltas in order."""
    state, checkpoint = base
    monkeypatch.chdir(checkpoint.parent)
    toys = ranks_with(state)
    url = server(answer_of(toys, checkpoint))
    asked.clear()
    assert cli.run(["audit", url, "--checkpoint", "base", "--delta", "b", "--delta", "a"]) == 1
    (path, body) = asked[0]
    assert path == "/collective_rpc"
    assert (body["method"], body["args"]) == (
        "refdelta_compare",
        [str(checkpoint), [str(checkpoint.parent / "b"), str(checkpoint.parent / "a")]],
    )
    out = capsys.readouterr().out
    assert "6 checkpoint tensors on 2 ranks: 5 equal, 0 differs, 1 not comparable" in out
    assert "rotary table: recomputed from the config" in out
    assert cli.run(["audit", url, "--checkpoint", "base", "--allow-incomparable"]) == 0
    toys[1].norm.view(torch.int16)[2] ^= 1
    url = server(answer_of(toys, checkpoint))
    capsys.readouterr()
    assert cli.run(["audit", url, "--checkpoint", "base", "--allow-incomparable", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == "differs"
    assert report["tensors"]["norm"]["detail"].startswith(
        "rank 1, norm: 1 of 4 elements differ, first at [2]: expected"
    )
    assert report["ranks"][1]["tensors"]["norm"]["first"][0] == [2]


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((404, {"detail": "Not Found"}), "[unsupported_engine] URL: no /collective_rpc: the server must run with"),
        (
            (500, {"error": {"message": "Method 'refdelta_compare' is not implemented." + " more" * 200, "code": 500}}),
            "[unsupported_engine] URL: the engine has no audit: start vLLM with --worker-extension-cls "
            "refdelta.vllm.audit.AuditExtension\n",
        ),
        (
            (500, {"error": {"message": "EngineDeadError"}}),
            "[unsupported_engine] URL: status 500: 'EngineDeadError'; was",
        ),
        ((500, "Internal Server Error"), "[unsupported_engine] URL: status 500: 'Internal Server Error'; was it"),
        ((200, "nonsense"), "[unsupported_engine] URL answered 'nonsense'"),
        ((200, {"results": ["None"]}), "[rank_failed] expected one audit a rank, found 'None'"),
        (
            (200, {"results": [{"rank": 1, "error": str(DeltaError(Reason.NOT_A_CHECKPOINT, "no file\nthere"))}]}),
            "[not_a_checkpoint] rank 1: no file\\nthere",
        ),
    ],
)
def test_the_command_refuses_in_one_line(
    answer: Answer, line: str, server: Callable[[Answer], str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = server(answer)
    assert cli.run(["audit", url, "--checkpoint", "x"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: " + line.replace("URL", url))
    assert error.count("\n") == 1


def test_another_model_is_called_one(base: tuple[State, Path], tmp_path: Path) -> None:
    """An engine whose loader refuses the checkpoint, because it is of another model."""
    state, checkpoint = base
    others = {
        "shape": ({**state, "norm": torch.zeros(8, dtype=BF16)}, Reason.SHAPE_MISMATCH, "BF16 [4]", "BF16 [8]"),
        "dtype": ({**state, "norm": torch.zeros(4)}, Reason.DTYPE_MISMATCH, "BF16 [4]", "F32 [4]"),
        "name": (state | {"extra": state["k"].clone()}, Reason.UNKNOWN_TENSOR, "none of this name", "BF16 [4, 8]"),
    }
    toy = ranks_with(state)[0]
    for kind, (tensors, reason, here, there) in others.items():
        other = tmp_path / kind
        other.mkdir()
        save_file(tensors, other / "model.safetensors")
        with pytest.raises(DeltaError) as caught:
            compare(toy, other) if kind == "shape" else refuse()
        assert caught.value.reason is Reason.UNSUPPORTED_ENGINE
        found = explained(caught.value, lambda: Checkpoint(checkpoint), other)
        name = "extra" if kind == "name" else "norm"
        says = f"the engine runs another model, {checkpoint}, than {other}: it has {here}, the checkpoint {there}"
        assert (found.reason, found.detail, found.tensor) == (reason, says, name)
        unknown = explained(caught.value, lambda: Checkpoint(tmp_path / "not cached"), other)
        assert unknown.reason is Reason.UNSUPPORTED_ENGINE
        assert unknown.detail == f"{caught.value.detail}; is it another model than {other}?"
        assert explained(caught.value, lambda other=other: Checkpoint(other), other) is caught.value  # type: ignore[misc]


def refuse() -> None:
    raise DeltaError(Reason.UNSUPPORTED_ENGINE, "layout: the loader refuses")


def test_other_errors_are_not_explained(tmp_path: Path) -> None:
    error = DeltaError(Reason.BASE_MISMATCH, "another base")
    assert explained(error, lambda: Checkpoint(tmp_path), tmp_path / "x") is error


def test_an_llm_without_the_extension() -> None:
    class Llm:
        def collective_rpc(self, method: str, args: object) -> None:
            raise NotImplementedError(f"Method {method!r} is not implemented.")

    with pytest.raises(DeltaError, match="the engine has no audit: make the LLM with worker_extension_cls") as caught:
        audit(Llm(), "base")
    assert caught.value.reason is Reason.UNSUPPORTED_ENGINE


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "no url", "http://[/"])
def test_a_server_that_does_not_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["audit", url, "--checkpoint", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: [unreadable] {url}: ")
    assert error.count("\n") == 1


def test_a_tensor_says_the_same_after_crossing_a_process(base: tuple[State, Path]) -> None:
    """Every field."""
    state, checkpoint = base
    toys = ranks_with(state)
    toys[0].norm.view(torch.int16)[0] ^= 1
    tensors, _, _ = compare(toys[0], checkpoint)
    with Checkpoint(checkpoint) as files:
        assert set(tensors) == set(files)
    for audit_ in tensors.values():
        assert TensorAudit.from_plain(json.loads(json.dumps(audit_.to_plain()))) == audit_
