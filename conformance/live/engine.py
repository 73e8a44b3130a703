"""One offline vLLM engine inside a host process: start it, drive a weight update, read its weights and outputs."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import probe

TOKENS = 4
"""Tokens generated for each prompt."""
TOP = 4
"""Log-probabilities returned at each position, besides those of the token itself."""

Output = dict[str, Any]


class Engine:
    """A vLLM ``LLM`` and the calls that the suite makes on it. Times are in seconds, errors are vLLM's own."""

    def __init__(self, *, worker_start: str | None = None) -> None:
        self.llm: Any = None
        self.worker_start = worker_start

    @staticmethod
    def import_vllm() -> None:
        """Import what starting an engine would import, without starting anything."""
        for module in (
            "vllm.entrypoints.llm",
            "vllm.v1.engine.llm_engine",
            "vllm.v1.executor.multiproc_executor",
            "vllm.model_executor.models.qwen3",
            "vllm.model_executor.models.gemma4",
        ):
            importlib.import_module(module)
        for module in (
            # What an engine imports only while it starts; where a version has them.
            "vllm.compilation.backends",
            "vllm.entrypoints.launchers.cli_args",
            "vllm.model_executor.layers.quantization.online.base",
            "vllm.v1.core.sched.scheduler",
        ):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            importlib.import_module("vllm.v1.worker.cpu_worker")
            importlib.import_module("vllm.v1.attention.backends.cpu_attn")

    def start(
        self,
        checkpoint: str,
        tp: int,
        backend: str | None = None,
        hf_overrides: dict[str, Any] | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> float:
        """Build the engine; ``arguments`` are further ones for ``LLM``. Returns the seconds it took."""
        began = time.monotonic()
        probe.prepare_process()
        if self.worker_start == "fork":
            _fork_workers()
        from vllm import LLM

        options: dict[str, Any] = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "seed": 0,
            "disable_log_stats": True,
            "kv_cache_memory_bytes": 16 << 20,
            "worker_extension_cls": f"{__package__}.probe.Probe",
        }
        if backend is not None:
            options["weight_transfer_config"] = {"backend": backend}
        self.llm = LLM(
            model=checkpoint,
            tensor_parallel_size=tp,
            hf_overrides=hf_overrides or {},
            **options | (arguments or {}),
        )
        return time.monotonic() - began

    def init_transfer(self, init_info: dict[str, Any] | None = None) -> None:
        """Open the weight transfer, by default with an empty ``init_info``."""
        self.llm.init_weight_transfer_engine({"init_info": init_info or {}})

    def pause(self) -> None:
        """Pause scheduling, keeping requests."""
        self.llm.sleep(level=0, mode="keep")

    def start_update(self) -> None:
        """Open a weight update."""
        self.llm.start_weight_update()

    def update(self, info: Any) -> None:
        """Send one ``update_info``: a mapping, or a list of one mapping a rank."""
        self.llm.update_weights({"update_info": info})

    def finish(self) -> None:
        """Close the weight update."""
        self.llm.finish_weight_update()

    def resume(self) -> None:
        """Resume scheduling."""
        self.llm.wake_up(tags=["scheduling"])

    def sleep(self, level: int) -> None:
        """Go to sleep and wake up again."""
        self.llm.sleep(level=level)
        self.llm.wake_up()

    def sync(self, info: Any) -> str | None:
        """Pause, start, update, finish, resume. Returns None, or the error's text; resumes in either case."""
        self.pause()
        try:
            self.start_update()
            self.update(info)
            self.finish()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.resume()
        return None

    def dump(self, directory: str) -> list[str]:
        """Every rank writes its weights to ``directory``; returns the files."""
        return list(self.llm.collective_rpc("probe_dump", args=(directory,)))

    def rpc(self, method: str, arguments: list[Any] | None = None) -> list[Any]:
        """A method of every worker, with plain values; the answers in rank order."""
        return list(self.llm.collective_rpc(method, args=tuple(arguments or ())))

    def load(self, checkpoint: str, changes: str) -> None:
        """Every rank loads the checkpoint anew, with the tensors of the file ``changes`` in place of its own."""
        self.llm.collective_rpc("probe_load", args=(checkpoint, changes))

    def echo(self, nonce: str) -> list[tuple[int, str]]:
        """(rank, nonce) as every rank answered it."""
        return list(self.llm.collective_rpc("probe_echo", args=(nonce,)))

    def packed_layers(self) -> list[list[str]]:
        """Per rank the modules whose product reads a packed copy."""
        return list(self.llm.collective_rpc("probe_packed_layers"))

    def keep_busy(self, prompts: list[list[int]], tokens: int) -> int:
        """Keep one request for each prompt in flight, without waiting for it; how many ended since the last call."""
        from vllm import SamplingParams

        core, ended = self.llm.llm_engine, 0
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        if core.has_unfinished_requests():
            ended = sum(output.finished for output in core.step())
        missing = len(prompts) - core.get_num_unfinished_requests()
        for number in range(missing):
            core.add_request(uuid.uuid4().hex, {"prompt_token_ids": prompts[number]}, sampling)
        return ended

    def compiled_graphs(self) -> list[list[str]]:
        """Per rank the classes of the model's parts that run as a compiled graph."""
        return list(self.llm.collective_rpc("probe_compiled_graphs"))

    def generate(self, prompts: list[list[int]], tokens: int = TOKENS, adapter: str | None = None) -> list[Output]:
        """Greedy ``tokens`` and exact log-probabilities, of the prompt's positions too.

        With the directory of a LoRA ``adapter``: of every prompt without it, then of every prompt with it, and no
        prompt's log-probabilities: vLLM's head beside adapters (0.32) takes one row a request.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            logprobs=TOP,
            prompt_logprobs=TOP if adapter is None else None,
            ignore_eos=True,
            detokenize=False,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        loras = [None] if adapter is None else [None, LoRARequest("adapter", 1, adapter)]
        return [
            _output(result)
            for lora in loras
            for result in self.llm.generate(requests, sampling, use_tqdm=False, lora_request=lora)
        ]


def _output(result: Any) -> Output:
    completion = result.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [_position(entry) for entry in completion.logprobs],
        "prompt_logprobs": [_position(entry) for entry in result.prompt_logprobs or () if entry],
    }


def _position(entry: dict[int, Any]) -> list[tuple[int, float]]:
    return sorted((int(token), float(found.logprob)) for token, found in entry.items())


def _fork_workers() -> None:
    """Let vLLM fork its workers, not spawn them, as long as this process has no thread of its own but the main one.

    A fork takes one thread along: a pool (OpenMP's, a plugin's) would be dead in the worker. ZeroMQ's two are there
    always; its contexts know a fork, and vLLM's workers make new ones.
    """
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    def context() -> Any:
        found = settled(other_threads)
        if found:
            print(f"conformance: second ranks are spawned, since these threads run: {found}", flush=True)
        return multiprocessing.get_context("spawn" if found else "fork")

    multiproc_executor.get_mp_context = context


def other_threads() -> list[str]:
    """The kernel's names of the threads of this process, but for the main one and ZeroMQ's."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return ["unknown: no /proc"]
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())]
    return [name for name in names if not name.startswith("ZMQbg/")]


def settled(look: Callable[[], list[str]], seconds: float = 0.5) -> list[str]:
    """What ``look`` finds in the end: a thread gets its name only after it has started."""
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.01)
    return found
