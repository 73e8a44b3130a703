"""A process that has imported vLLM and forks one child for every engine: ``python -m conformance.live.zygote FD``.

Importing vLLM costs more than starting a tiny engine, so it is done once for each environment (`processes.Zygote`).
The zygote builds no engine, loads no plugin and starts no thread; what a child inherits are modules alone. A child
takes the environment of its engine, then serves its requests as `conformance.live.host` does.

``FD`` is a socket that keeps messages apart. One JSON message is one request, answered with one:

    {"fork": ENVIRONMENT}, with two descriptors: the child's socket and its log      {"pid": PID}
    {"end": PID}            kill the child's process group and wait for the child    {"status": STATUS}
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
import tempfile
from typing import Any

from . import host, probe
from .engine import Engine

MESSAGE_BYTES = 1 << 18
"""The longest message; an environment is the long part of one."""


def main() -> None:
    """Serve on the socket whose descriptor is the first argument, until its other end closes."""
    host.die_with_parent()
    Engine.import_vllm()
    once_for_all_forks()
    gc.freeze()  # vLLM collects several times while it starts; what the imports left need not be visited again
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 2)
            if not message:
                return
            channel.send(json.dumps(_answer(json.loads(message), descriptors, channel)).encode())


def once_for_all_forks() -> None:
    """What every worker of vLLM does to the modules that it has imported, and what it would do alike in each fork.

    It puts C++ functions in the place of Triton's kernels (0.32, CPU, a walk over all modules) and sets its loggers up:
    half of the time in which a tiny engine starts. Where a version has no such step, there is nothing to save.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)  # done, for every fork
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.config.logging import LoggingConfig
        from vllm.logger import configure_logging_if_needed

        configure_logging_if_needed(LoggingConfig())
    if os.environ.get("TORCHDYNAMO_DISABLE") == "0":
        _what_compilers_do_once()


def _what_compilers_do_once() -> None:
    """Let PyTorch compile what tells it which vector instructions this machine has.

    Where there is no C++ compiler (a RuntimeError), the engines that want one say so.
    """
    with contextlib.suppress(ImportError, AttributeError, RuntimeError), tempfile.TemporaryDirectory() as home:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = home
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.valid_vec_isa_list()


def _answer(request: dict[str, Any], descriptors: list[int], channel: socket.socket) -> dict[str, int]:
    if "end" in request:
        host.kill_group(request["end"])
        return {"status": os.waitstatus_to_exitcode(os.waitpid(request["end"], 0)[1])}
    pid = host.fork(lambda: _serve(request["fork"], descriptors, channel))
    for descriptor in descriptors:
        os.close(descriptor)
    return {"pid": pid}


def _serve(environment: dict[str, str], descriptors: list[int], channel: socket.socket) -> None:
    """The life of a child."""
    channel.close()
    end, log = descriptors
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the environment says where
    probe.prepare_process.cache_clear()  # the zygote ran it for its own environment, which asks for nothing
    host.serve(end, Engine(worker_start="fork"))


if __name__ == "__main__":
    main()
