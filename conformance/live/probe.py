"""What the suite puts into every vLLM worker: ``worker_extension_cls="conformance.live.probe.Probe"``.

The worker resolves this class before it loads the model and creates the weight-transfer backend, so importing this
module is the moment to keep weights unpacked and to import the plugin modules of the backend under test. The methods
answer `LLM.collective_rpc`; they only read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import behind

UNPACK = "CONFORMANCE_UNPACK"
"""Environment: "1" keeps CPU weights unpacked with the suite's own switch (truth engines; backends without one)."""
PLUGINS = "CONFORMANCE_PLUGINS"
"""Environment: what every process of the engine loads, separated by commas; see `load`."""
SPIN_S = 0.02
"""Seconds for which a rank spins before it sleeps."""


@functools.cache
def prepare_process() -> None:
    """Apply what the environment asks for, once in each process, before an engine is built."""
    wait_without_spinning()
    if os.environ.get(UNPACK) == "1":
        keep_weights_unpacked()
    for plugin in filter(None, os.environ.get(PLUGINS, "").split(",")):
        load(plugin)


def load(plugin: str) -> None:
    """Load a plugin: ``MODULE`` is imported, of ``MODULE:FUNCTION`` the function is called too."""
    module, _, function = plugin.partition(":")
    found = importlib.import_module(module)
    if function:
        getattr(found, function)()


def wait_without_spinning() -> None:
    """Let the ranks of an idle engine sleep soon: vLLM's spin for a second after each message (0.32).

    The suite runs an engine beside fresh ones, on machines with two cores, where each such second is another's.
    """
    if "vllm" not in sys.modules:  # the suite's own process imports this module too, and no vLLM
        return
    with contextlib.suppress(ImportError):
        from vllm.distributed.device_communicators import shm_broadcast

        condition = getattr(shm_broadcast, "SpinCondition", None)
        if condition is not None and "busy_loop_s" in inspect.signature(condition.__init__).parameters:
            condition.__init__ = functools.partialmethod(condition.__init__, busy_loop_s=SPIN_S)


def keep_weights_unpacked() -> None:
    """Turn off the three packers of vLLM's CPU linear layers (oneDNN, SGL on AMX, zentorch)."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    type(current_platform).is_zen_cpu = lambda self: False


class Probe:
    """Methods added to vLLM's worker, which provides ``rank`` and ``model_runner``."""

    rank: int
    model_runner: Any
    _writes: behind.CountsWrites

    def probe_echo(self, nonce: str) -> tuple[int, str]:
        """Answer (rank, nonce): a stale reply in the RPC channel would carry an older nonce."""
        return self.rank, nonce

    def probe_slow_down(self, seconds: float) -> None:
        """From now on let each step of this rank take ``seconds`` longer, asleep; 0 for none.

        A tiny engine makes a thousand tokens in a second: what is to come while a request runs would come too late.
        """
        runner = self.model_runner
        step = type(runner).execute_model.__get__(runner)

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return step(*args, **kwargs)

        runner.execute_model = slowly if seconds else step

    def probe_dump(self, directory: str) -> str:
        """Write every parameter and buffer of this rank to ``rank{N}.safetensors`` and ``.json``; return the former."""
        model = self.model_runner.get_model()
        path = Path(directory) / f"rank{self.rank}.safetensors"
        entries: dict[str, dict[str, object]] = {}
        payload: dict[str, torch.Tensor] = {}
        first: dict[object, str] = {}
        for kind, name, tensor in _tensors(model):
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype) if tensor.numel() else name
            alias_of = first.setdefault(place, name)
            entries[name] = {
                "kind": kind,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "alias_of": alias_of,
            }
            if alias_of == name:
                payload[name] = raw_bytes(tensor)
        save_file(payload, path)
        path.with_suffix(".json").write_text(json.dumps(entries))
        return str(path)

    def probe_flip(self, rank: int, name: str, position: int) -> None:
        """On one rank flip a bit of one element of a parameter, as a stray write would."""
        if self.rank == rank:
            behind.flip(self.model_runner.get_model(), name, position)

    def probe_replace_storage(self, name: str) -> None:
        """Give a parameter other memory with the same bits."""
        behind.replace_storage(self.model_runner.get_model(), name)

    def probe_addresses(self) -> dict[str, int]:
        """Where each parameter and buffer lies."""
        return behind.addresses(self.model_runner.get_model())

    def probe_count_writes(self) -> None:
        """From now on count what torch writes into the weights."""
        self._writes = behind.CountsWrites(self.model_runner.get_model())
        self._writes.__enter__()  # type: ignore[no-untyped-call]

    def probe_written(self) -> int:
        """Stop counting: elements that torch wrote into the weights."""
        self._writes.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._writes.written

    def probe_call(self, place: str, arguments: list[Any]) -> None:
        """Call a function at ``module:function`` with this rank and ``arguments``."""
        module, _, function = place.partition(":")
        getattr(importlib.import_module(module), function)(self.rank, *arguments)

    def probe_load(self, checkpoint: str, changes: str) -> None:
        """Load the checkpoint's tensors anew, some of them replaced by those of the file ``changes``.

        Through the engine's own loader, then its own post-load step for expert layers, whose parameters are first made
        again as they were before loading. vLLM's `reload_weights` is no help: its experts are wrong on CPU.
        """
        model = self.model_runner.get_model()
        state: dict[str, torch.Tensor] = {}
        for file in [*sorted(Path(checkpoint).glob("*.safetensors")), Path(changes)]:
            state.update(load_file(file))
        experts = [module for module in model.modules() if type(module).__name__ == "RoutedExperts"]
        for layer in experts:
            _make_weights(layer)
        model.load_weights(state.items())
        for layer in experts:
            layer.quant_method.moe_kernel = None
            layer.quant_method.process_weights_after_loading(layer)

    def probe_packed_layers(self) -> list[str]:
        """Names of modules whose CPU matrix product would not read the live parameter."""
        model = self.model_runner.get_model()
        return [name for name, module in model.named_modules() if _packed(module)]

    def probe_compiled_graphs(self) -> list[str]:
        """Classes of the model's parts that run as a graph compiled ahead of time."""
        modules = self.model_runner.get_model().modules()
        return [type(module).__name__ for module in modules if getattr(module, "aot_compiled_fn", None) is not None]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` in logical row-major order, as a one-dimensional uint8 tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield "parameter", name, parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield "buffer", name, buffer


def _make_weights(layer: Any) -> None:
    """Give an expert layer empty parameters of the shapes that the loader expects."""
    config = layer.moe_config
    layer.quant_method.create_weights(
        layer=layer,
        num_experts=layer.local_num_experts,
        hidden_size=config.hidden_dim,
        intermediate_size_per_partition=config.intermediate_size_per_partition,
        params_dtype=layer.params_dtype,
        weight_loader=layer.weight_loader,
    )


def _packed(module: torch.nn.Module) -> bool:
    """Given another weight than the live one, a product that ignores it reads a packed copy."""
    product, weight = getattr(module, "cpu_linear", None), getattr(module, "weight", None)
    if product is None:
        return False
    if not isinstance(weight, torch.Tensor) or weight.numel() == 0:
        return True
    other = torch.rand_like(weight, dtype=torch.float32).to(weight.dtype)
    ones = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    return not torch.equal(product(ones, other, None), torch.nn.functional.linear(ones, other))


prepare_process()
