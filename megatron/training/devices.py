"""Configures the process and its device before anything is allocated: memory, cores, threads, matrix products."""

import torch

from megatron.config import RunConfig
from megatron.distributed.cores import pin, set_scheduling, set_threads
from megatron.distributed.device import activate
from megatron.distributed.launch import LaunchInfo, keep_products_repeatable
from megatron.optimizer import offloads
from megatron.utils.cpu import set_allocator, set_fp32_products
from megatron.utils.cuda import grow_segments, round_products
from megatron.utils.device_kind import kind_of
from megatron.utils.half_products import set_half_products
from megatron.utils.log import RankLog


def prepare_cpu(config: RunConfig, launch: LaunchInfo, device: torch.device, log: RankLog) -> int:
    """Sets allocator, matrix-product library, cores and threads, before the process allocates much. Returns the number
    of threads. With an accelerator, only what the user set is changed.
    """
    cpu, computes = config.cpu, device.type == "cpu"
    if computes or cpu.cpu_allocator != "auto":
        saves = cpu.cpu_allocator == "auto" and config.parallel.zero >= 2  # gathered weights are freed and reallocated
        log.info(set_allocator("system" if saves else cpu.cpu_allocator))
    if computes or cpu.fp32_products != "auto":
        log.info(set_fp32_products(cpu.fp32_products))
    if computes and (config.precision.fp16 or config.precision.bf16):
        log.info(set_half_products(torch.float16 if config.precision.fp16 else torch.bfloat16))
    if cpu.cpu_pinning:
        log.info(f"each rank stays on its own cores; rank 0 on {', '.join(map(str, sorted(pin(launch))))}")
    if computes or cpu.cpu_scheduling != "auto":
        log.info(set_scheduling(cpu.cpu_scheduling, launch))
    return set_threads(launch, cpu.cpu_threads)


def prepare_accelerator(config: RunConfig, device: torch.device, log: RankLog, allocator: str = "") -> None:
    """Selects and configures the device. Call it before anything is allocated on the device, and before kernels are
    selected, because the selection runs some kernels. `allocator`: the user's own setting of torch's allocator."""
    rounds, kind = config.precision.allow_tf32, kind_of(device.type)
    if rounds and not kind.tf32:
        log.info(f"--allow-tf32: has no effect, because the device {device.type} has no TF32 products")
    if config.optimizer.optimizer_cpu_offload and not offloads(config.optimizer, device):
        log.info("--optimizer-cpu-offload: has no effect, because this device uses host memory")
    if config.parallel.parameters_on_host:
        log.info(
            "--remote-device cpu: has no effect, parameters are in host memory anyway"
            if device.type == "cpu"
            else "--remote-device cpu: gradients and the optimizer's state are on the host too, and are updated there"
        )
    if config.recompute.cpu_offloading_num_layers and device.type == "cpu":
        log.info("--cpu-offloading-num-layers: has no effect, activations are in host memory anyway")
    if config.runtime.plans or device.type == "cpu":
        return
    activate(device)  # else every rank of the machine would try its kernels on the first device
    if not kind.cuda_libraries:
        return
    round_products(rounds)
    if config.training.deterministic_mode:
        keep_products_repeatable()
    if not grow_segments(allocator):
        log.info("this torch or driver has no expandable segments: memory may fragment more")
