"""vLLM's API server in a child process, with the weight-transfer routes open."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from ..findings import Late
from .engine import TOKENS
from .host import die_with_parent, kill_group
from .runner import CALL_TIMEOUT, START_TIMEOUT
from .watch import WALL_FACTOR, TimedOut, Watch


class Server:
    """``vllm.entrypoints.openai.api_server`` on a free local port, in its own process group; a context manager.

    ``arguments`` come after the suite's own, and override them.
    """

    def __init__(
        self, checkpoint: Path, backend: str | None, env: Mapping[str, str], log: Path, arguments: Sequence[str] = ()
    ) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    *_arguments(checkpoint, backend, self.url),
                    *arguments,
                ],
                env={**env, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        # No proxy for a local server, and a connection for each request: uvicorn closes one after a 500 that it sent.
        self._client = httpx.Client(
            base_url=self.url,
            timeout=CALL_TIMEOUT * WALL_FACTOR,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def wait_until_ready(self) -> None:
        """Return when ``/health`` answers 200. Late or AssertionError, with the end of the log, when it never does."""
        watch = Watch(self._process.pid, START_TIMEOUT)
        while self._process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.25)
            try:
                watch.tick_if_due()
            except TimedOut as late:
                text = f"the server did not start: {late}\n{self._last_words()}"
                raise Late(text, starved=late.starved) from late
        raise AssertionError(f"the server did not start:\n{self._last_words()}")

    def post(self, path: str, body: Mapping[str, object] | None = None, **query: str) -> httpx.Response:
        """POST a JSON body."""
        return self._client.post(path, json=body, params=query)

    def get(self, path: str) -> Any:
        """GET and parse."""
        return self._client.get(path).raise_for_status().json()

    def tokens(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy tokens for each prompt, from ``/inference/v1/generate``."""
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        answers = [
            self.post("/inference/v1/generate", {"token_ids": list(prompt), "sampling_params": sampling})
            for prompt in prompts
        ]
        return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]

    def close(self) -> None:
        """End the server and everything in its process group."""
        self._client.close()
        kill_group(self._process.pid)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def _arguments(checkpoint: Path, backend: str | None, url: str) -> list[str]:
    transfer = [] if backend is None else ["--weight-transfer-config", json.dumps({"backend": backend})]
    return [
        *transfer,
        *("--model", str(checkpoint), "--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
        *("--max-model-len", "64", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--enable-scale-out", "--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
