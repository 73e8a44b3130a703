"""vLLM's expert layers: which kernels were proven, what a layer looked like when it was loaded, its post-load step.

Every assumption about them is here. Read from vLLM 0.32.0: ``model_executor/layers/fused_moe/routed_experts.py``,
``unquantized_fused_moe_method.py``, ``experts/cpu_moe.py``. Only duck typing, so that nothing is imported for models
without experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["PROVEN_KERNELS", "as_loaded", "expert_layers", "kernel", "loaded", "reads_live_weights", "run_post_load"]

PROVEN_KERNELS = frozenset({"CPUUnquantizedExperts(vec)", "X86CPUUnquantizedExperts(amx)"})
"""Kernels whose post-load step permutes what was loaded and pads it with zeros, and that read the live weight.

Both are shown again at every start, for every layer. The second is what vLLM takes on a CPU with AMX.
"""


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Module name -> layer, for every layer that owns stacked experts' weights."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "RoutedExperts"}


def kernel(layer: nn.Module) -> str:
    """The kernel that computes a loaded layer: its class, and the instruction set where it packs for one."""
    experts = _kernel_object(layer)
    if getattr(experts, "_use_zentorch", False):
        return "zentorch"
    isa = getattr(experts, "isa", None)
    return type(experts).__name__ + (f"({isa})" if isa else "")


def _kernel_object(layer: nn.Module) -> Any:
    method = cast(Any, layer.quant_method)
    return method if method.moe_kernel is None else method.moe_kernel.fused_experts


def loaded(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The layer's parameters as they were when the loader filled them: on the meta device, made by vLLM's own method.

    The post-load step may have changed their shapes since.
    """
    fresh, config, method = nn.Module(), cast(Any, layer.moe_config), cast(Any, layer.quant_method)
    with torch.device("meta"):
        method.create_weights(
            layer=fresh,
            num_experts=layer.local_num_experts,
            hidden_size=config.hidden_dim,
            unpadded_hidden_size=config.hidden_dim_unpadded,
            intermediate_size_per_partition=config.intermediate_size_per_partition,
            params_dtype=layer.params_dtype,
            weight_loader=layer.weight_loader,
            global_num_experts=layer.global_num_experts,
        )
    return dict(fresh.named_parameters())


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[None]:
    """Show every expert layer of ``model`` as the loader saw it, so that its loader can be traced."""
    with ExitStack() as stack:
        for layer in expert_layers(model).values():
            stack.callback(_put, layer, dict(layer._parameters))
            _put(layer, loaded(layer))
        yield


def run_post_load(layer: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the engine's own post-load step makes of ``weights``, in the order of the layer's parameters.

    Leaves the layer unusable: for a copy of the process (`refdelta.vllm.proof.forked`).
    """
    _put(layer, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights.items()})
    method = cast(Any, layer.quant_method)
    method.moe_kernel = None  # else the step takes the layer for one that was processed already
    method.process_weights_after_loading(layer)
    return {name: cast(Tensor, layer._parameters[name]).detach() for name in weights}


def reads_live_weights(layer: nn.Module) -> bool:
    """Whether the kernel multiplies by the weights that it is given: zeros in either must give zeros, ones must not."""
    w13, w2 = (cast(Tensor, layer._parameters[name]).detach()[:1] for name in ("w13_weight", "w2_weight"))
    one, zero = torch.ones_like, torch.zeros_like
    given = ((one(w13), one(w2)), (zero(w13), one(w2)), (one(w13), zero(w2)))
    outputs = [_product(layer, *weights) for weights in given]
    return [bool(output.ne(0).any()) for output in outputs] == [True, False, False]


def _product(layer: nn.Module, w13: Tensor, w2: Tensor) -> Tensor:
    """[1, hidden] one token of ones through one expert."""
    config = cast(Any, layer.moe_config)
    token = torch.ones((1, config.hidden_dim), dtype=w13.dtype)
    output, empty = torch.zeros_like(token), torch.empty(0, dtype=w13.dtype)
    _kernel_object(layer).apply(
        output=output,
        hidden_states=token,
        w1=w13,
        w2=w2,
        topk_weights=torch.ones((1, 1), dtype=torch.float32),
        topk_ids=torch.zeros((1, 1), dtype=torch.int32),
        activation=layer.activation,
        global_num_experts=1,
        expert_map=None,
        a1q_scale=None,
        a2_scale=None,
        workspace13=empty,
        workspace2=empty,
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return output


def _put(layer: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    for name, parameter in parameters.items():
        layer._parameters[name] = parameter
