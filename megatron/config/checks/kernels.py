"""Checks of the kernels, and of what --compile and --cuda-graphs cannot be combined with."""

from __future__ import annotations

from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)


def check_kernels(config: RunConfig) -> None:
    kernels = config.kernels
    mode, *excluded = kernels.kernels.split(",")
    if mode not in ("auto", "native", "ref") or any(not word.startswith("-") or len(word) == 1 for word in excluded):
        raise ConfigError(
            f"{spelled(config, 'kernels')}: begins with auto, native or ref, followed by operations to leave out; "
            "as in --kernels auto,-rope"
        )
    if kernels.use_flash_attn and kernels.attention_backend not in ("auto", "flash"):
        raise ConfigError(
            f"--use-flash-attn and {spelled(config, 'attention_backend')} contradict each other; keep one of them"
        )


def check_cuda_graphs(config: RunConfig) -> None:
    """CUDA graphs cannot capture communication, or control flow that depends on host values."""
    parallel, recompute = config.parallel, config.recompute
    if not config.kernels.cuda_graphs:
        return
    obstacles = {
        "tensor_model_parallel_size": (parallel.tensor_model_parallel_size > 1, "ranks talk within a pass"),
        "pipeline_model_parallel_size": (parallel.pipeline_model_parallel_size > 1, "ranks talk within a pass"),
        "context_parallel_size": (parallel.context_parallel_size > 1, "ranks talk within a pass"),
        "num_experts": (config.moe.num_experts is not None, "the host cuts the tokens by what each expert got"),
        "overlap_grad_reduce": (parallel.overlap_grad_reduce, "reductions are started from within a pass"),
        "overlap_param_gather": (parallel.overlap_param_gather, "weights are waited for within a pass"),
        "compile": (config.kernels.compile, "the two have not been tried together"),
        "cpu_offloading_num_layers": (
            recompute.cpu_offloading_num_layers > 0,
            "activations leave the device within it",
        ),
        "recompute_granularity": (recompute.full or recompute.selective, "it reads the random state within a pass"),
    }
    for name, (given_, why) in obstacles.items():
        if given_:
            setting = "recomputation" if name == "recompute_granularity" else spelled(config, name)
            raise ConfigError(f"--cuda-graphs: cannot record a pass with {setting}: {why}; leave one of the two out")


def check_compile(config: RunConfig) -> None:
    """Only layers that one rank computes alone and once are compiled."""
    if not config.kernels.compile:
        return
    others = [spelled(config, name) for name in _SIZES if getattr(config.parallel, name) > 1]
    if config.recompute.full or config.recompute.selective:
        others.append("recomputation")
    if config.recompute.cpu_offloading_num_layers:
        others.append(spelled(config, "cpu_offloading_num_layers"))
    if config.parallel.overlap_param_gather:
        others.append("--overlap-param-gather")
    if config.moe.is_on:
        others.append(spelled(config, "num_experts"))
    if others:
        raise ConfigError(f"--compile cannot be combined with {others[0]} yet; leave --compile out")


CHECKS = (check_cuda_graphs, check_kernels, check_compile)
