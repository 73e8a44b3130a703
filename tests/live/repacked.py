"""Puts vLLM's own CPU packing back, as where refdelta's plugin was not loaded in a process; for engines under test."""


def _put_back() -> None:
    from vllm.model_executor.layers import utils
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    utils.dispatch_cpu_unquantized_gemm = utils.dispatch_cpu_unquantized_gemm.refdelta_original


_put_back()
