"""vLLM's linear layers: what one that was emptied after loading looked like when the loader filled it.

On CPU a packer may keep its own copy of a weight and leave an empty parameter without its loader. Every assumption
about that is here. Read from vLLM 0.32.0: ``model_executor/layers/linear.py``, ``model_executor/layers/utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from refdelta.vllm import BACKENDS

__all__ = ["emptied_linears", "keep_cpu_weights_unpacked", "linears_as_loaded"]


def emptied_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Module name -> layer, for every linear layer whose weight was taken out after loading."""
    return {name: module for name, module in model.named_modules() if _is_emptied(module)}


@contextmanager
def linears_as_loaded(model: nn.Module) -> Iterator[None]:
    """Show every emptied linear layer of ``model`` as the loader saw it, on the meta device."""
    with ExitStack() as stack:
        for layer in emptied_linears(model).values():
            stack.callback(layer._parameters.__setitem__, "weight", layer._parameters["weight"])
            layer._parameters["weight"] = _loaded(layer)
        yield


def _is_emptied(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    method = type(getattr(module, "quant_method", None)).__name__
    return isinstance(weight, Tensor) and weight.numel() == 0 and method == "UnquantizedLinearMethod"


def _loaded(layer: nn.Module) -> nn.Parameter:
    """The weight as vLLM's own method made it, with its loader and no memory."""
    fresh, described = nn.Module(), cast(Any, layer)
    with torch.device("meta"):
        described.quant_method.create_weights(
            layer=fresh,
            input_size_per_partition=getattr(described, "input_size_per_partition", described.input_size),
            output_partition_sizes=described.output_partition_sizes,
            input_size=described.input_size,
            output_size=described.output_size,
            params_dtype=described.params_dtype,
            # Layers that are cut have the second loader; replicated ones only the first.
            weight_loader=getattr(described, "weight_loader_v2", None) or described.weight_loader,
        )
    return cast(nn.Parameter, fresh._parameters["weight"])


def keep_cpu_weights_unpacked() -> None:
    """Make vLLM's CPU linear layers read the live weight, in engines that use this backend.

    ``dispatch_cpu_unquantized_gemm`` repacks a weight for zentorch, the SGL kernels (AMX) or oneDNN and empties the
    parameter; embeddings keep theirs but read the packed copy. It has no switch for all three, so it is replaced, for
    2-D weights, by its own fallback. Both call sites import it at call time; `attest.packed_layers` verifies it.
    """
    from vllm.model_executor.layers import utils

    original = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if original is None or hasattr(original, "refdelta_original"):
        return  # a GPU build without it, or done already

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if not _uses_this_backend() or not isinstance(weight, torch.Tensor) or weight.ndim != 2:
            original(layer, remove_weight)
            return
        setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010  # no such attribute in nn.Module's types

    dispatch.refdelta_original = original  # type: ignore[attr-defined]  # marks the function as replaced
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _uses_this_backend() -> bool:
    from vllm.config import get_current_vllm_config

    transfer = get_current_vllm_config().weight_transfer_config
    return transfer is not None and transfer.backend in BACKENDS
