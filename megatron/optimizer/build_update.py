"""Builds the update of all parameters: on flat buffers, tensor by tensor, or on the host."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import TrainingStore
from megatron.errors import ConfigError
from megatron.ops import Kernels
from megatron.ops.optim import adamw_in_place
from megatron.optimizer.adam_flat import FlatAdam, Resident
from megatron.optimizer.adam_offload import Offloaded, share_of
from megatron.optimizer.groups import GroupRule
from megatron.optimizer.rules.choose import choose_rules
from megatron.optimizer.update_rules import DecidedOnHost, TorchUpdate, Update
from megatron.state.shard import Shard
from megatron.utils.device import HostLink


def build_update(
    grads: TrainingStore,
    config: OptimizerConfig,
    rules: Mapping[str, GroupRule],
    specs: Mapping[str, Shard],
    kernels: Kernels | None,
    device: torch.device,
    asynchronous: bool,
) -> Update:
    """Builds AdamW on flat buffers if there is a native kernel and all gradients are in flat buffers. Otherwise builds
    torch's or apex's update, tensor by tensor. With offloading, the host updates."""
    kernel = kernels.adamw if kernels is not None else None
    if device.type != "cpu" and all(grads.weight(name).device.type == "cpu" for name in grads.names):
        return _on_host(grads, config, rules, specs, kernel)
    if offloads(config, device):
        return build_offloaded(grads, config, rules, kernel, device)
    dtypes = {grads.grad_dtypes[name] for name in grads.names}
    if config.is_plain_adamw and kernel is not None and grads.flat and dtypes <= {torch.float32, torch.bfloat16}:
        betas = config.adam_beta1, config.adam_beta2
        memory = Resident(grads.runs(), remainders=config.store_param_remainders)
        return FlatAdam(grads, rules, betas, config.adam_eps, kernel, [memory])
    if config.store_param_remainders:
        raise no_place_for_remainders()
    apex = kernels is not None and dtypes == {torch.float32} and kernels.backend("adamw") == "apex"
    chosen = choose_rules(grads, config, rules, specs, device, apex=apex)
    return TorchUpdate(grads, rules, chosen, asynchronous=asynchronous)


def _on_host(
    grads: TrainingStore,
    config: OptimizerConfig,
    rules: Mapping[str, GroupRule],
    specs: Mapping[str, Shard],
    kernel: Callable[..., None] | None,
) -> Update:
    """Builds the update for weights, gradients and optimizer state that are all in host memory."""
    host = torch.device("cpu")
    if config.is_plain_adamw:
        return build_offloaded(grads, config, rules, kernel, host)
    return DecidedOnHost(TorchUpdate(grads, rules, choose_rules(grads, config, rules, specs, host)))


def build_offloaded(
    grads: TrainingStore,
    config: OptimizerConfig,
    rules: Mapping[str, GroupRule],
    kernel: Callable[..., None] | None,
    device: torch.device,
) -> FlatAdam:
    """Builds AdamW on the host for --optimizer-offload-fraction of the state, and on the device for the rest. `kernel`:
    the native AdamW, for fp32."""
    runs = grads.runs()
    if kernel is None or any(run.grads.dtype == torch.float64 for run in runs):
        kernel = adamw_in_place
    count, directory = share_of(runs, config.optimizer_offload_fraction), config.optimizer_offload_directory
    away = Offloaded(
        grads,
        runs[:count],
        directory=None if directory is None else Path(directory),
        link=None if device.type == "cpu" else HostLink(device),
    )
    rest = [Resident(runs[count:])] if count < len(runs) else []
    betas = config.adam_beta1, config.adam_beta2
    return FlatAdam(grads, rules, betas, config.adam_eps, kernel, [away, *rest])


def offloads(config: OptimizerConfig, device: torch.device) -> bool:
    """True if the optimizer's state is offloaded. On a CPU, only offloading to a file has an effect."""
    on_disk = config.optimizer_offload_directory is not None
    return on_disk or (config.optimizer_cpu_offload and device.type != "cpu")


def no_place_for_remainders() -> ConfigError:
    return ConfigError(
        "--store-param-remainders: needs the native AdamW kernel, which this run does not use; remove the flag, or see "
        "the reason in the row adamw of the log's table of kernels"
    )
