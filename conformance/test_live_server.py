"""The same over HTTP: a delta and the new tokens; a bad delta, its reason and the old tokens; then a good one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from . import oracle
from .driving.options import Options
from .inputs import checkpoints
from .inputs.checkpoints import State
from .live import changes
from .live.backends import backend_of
from .live.refusals import words
from .live.row import Backend
from .live.runner import environment
from .live.server import Server
from .live.truth import Truths, prompts

MODEL = "qwen3-untied"
pytestmark = [pytest.mark.timeout(600), pytest.mark.row(f"{MODEL} http tp=1")]


@pytest.fixture
def truths(tmp_path: Path) -> Iterator[Truths]:
    made = Truths(tmp_path)
    yield made
    made.close()


def _update(server: Server, backend: Backend, delta: Path, version: str) -> httpx.Response:
    """Pause, start, update, finish, resume; the first answer that is not 200, else the last."""
    assert server.post("/pause", mode="keep").json() == {"status": "paused"}
    assert server.get("/is_paused") == {"is_paused": True}
    steps: list[tuple[str, dict[str, object]]] = [
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": backend.info(delta)}),
        ("/finish_weight_update", {"weight_version": version}),
    ]
    answer = None
    for path, body in steps:
        answer = server.post(path, body)
        if answer.status_code != httpx.codes.OK:
            break
    assert server.post("/resume").json() == {"status": "resumed"}
    assert answer is not None
    return answer


@pytest.mark.check("server")
@pytest.mark.needs("http")
def test_server(options: Options, offered: frozenset[str], truths: Truths, tmp_path: Path) -> None:
    """Pause, start, update, finish, resume through the routes of a development-mode server."""
    if options.checkpoint:
        pytest.skip("the server check drives the suite's own checkpoint")
    home = Path(tempfile.mkdtemp(dir=tmp_path))  # a check that was late runs again, with the same tmp_path
    checkpoint = checkpoints.make(MODEL, home / "base")
    backend = backend_of(options, offered)
    base = checkpoints.load(checkpoint.directory)
    new = changes.every_tensor(base, "server")
    newer = changes.of_families(new, new)
    asked = prompts(checkpoint.vocab_size)
    directories = [
        checkpoints.with_state(checkpoint.directory, s, home / f"state{i}") for i, s in enumerate((new, newer))
    ]
    fresh = truths.of([checkpoints.Checkpoint(MODEL, d) for d in (checkpoint.directory, *directories)], 1)
    tokens = [[output["tokens"] for output in truth.outputs] for truth in fresh]
    assert len({str(each) for each in tokens}) == 3, "the three states answer alike, so the tokens show nothing"

    def delta(before: State, after: State, name: str) -> Path:
        backend.encode(before, after, home / name)
        return home / name

    stranger = oracle.delta_patch(
        "model.layers.0.self_attn.z_proj.weight", base["lm_head.weight"], [0], base["lm_head.weight"][0, :1]
    )
    bad = oracle.write_delta(home / "bad", [stranger], oracle.total_elements(base))
    with Server(
        checkpoint.directory, backend.name, environment(plugins=backend.plugins), home / "server.log"
    ) as server:
        server.wait_until_ready()
        assert (
            server.post("/init_weight_transfer_engine", {"init_info": dict(backend.init_info)}).status_code
            == httpx.codes.OK
        )
        assert server.tokens(asked) == tokens[0]

        answer = _update(server, backend, delta(base, new, "first"), "v1")
        assert answer.status_code == httpx.codes.OK, answer.text
        assert server.get("/weight_info") == {"weight_version": "v1"}
        assert server.tokens(asked) == tokens[1], "the server does not answer as a fresh engine on the new checkpoint"

        answer = _update(server, backend, bad, "v2")
        assert answer.status_code != httpx.codes.OK, "a delta with an unknown tensor was accepted"
        assert words(answer.text), f"a refusal without text: {answer.text}"
        if backend.offers("reasons"):
            assert "[unknown_tensor]" in answer.text, f"the answer does not carry the reason: {answer.text}"
        assert server.get("/weight_info") == {"weight_version": "v1"}
        assert server.tokens(asked) == tokens[1], "after a refused delta the old weights should answer"

        answer = _update(server, backend, delta(new, newer, "second"), "v3")
        assert answer.status_code == httpx.codes.OK, answer.text
        assert server.get("/weight_info") == {"weight_version": "v3"}
        assert server.tokens(asked) == tokens[2]
