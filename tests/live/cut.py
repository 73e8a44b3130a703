"""A client that ends between two calls: in this process, or as a process that is killed.

``python -m tests.live.cut URL DELTA CALL`` starts ``sync`` and is killed while the answer to CALL is under way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import httpx

from refdelta.vllm.calls.client import Client
from refdelta.vllm.calls.http import HttpEngine


class Killed(BaseException):
    """The client ends here."""


class Cut(httpx.BaseTransport):
    """Ends the client before its call number ``at`` is sent, or (``heard``) after it was done and before it is read."""

    def __init__(self, at: int, *, unheard: bool) -> None:
        self._inner = httpx.HTTPTransport()
        self._at, self._unheard = at, unheard
        self.calls: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, unless this is where it ends."""
        due = len(self.calls) == self._at
        if due and not self._unheard:
            raise Killed
        self.calls.append(request.url.path)
        response = self._inner.handle_request(request)
        if due:
            response.read()
            response.close()
            raise Killed
        return response

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class Killing(httpx.HTTPTransport):
    """Kills this process a moment after a request to a path was sent."""

    def __init__(self, path: str, delay_s: float) -> None:
        super().__init__()
        self._path, self._delay_s = path, delay_s

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; no answer to that path is seen."""
        if request.url.path != self._path:
            return super().handle_request(request)
        threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        super().handle_request(request)
        while True:
            signal.pause()


def main() -> None:
    """Be killed."""
    url, delta, path = sys.argv[1:]
    Client(HttpEngine(url, transport=Killing(path, 0.02))).sync(delta, kv="reset_prefix", weight_version="killed")


if __name__ == "__main__":
    main()
