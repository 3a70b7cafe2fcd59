"""What programs for DeepSpeed call before `initialize`: its flags, and the process group."""

from __future__ import annotations

import argparse
import atexit
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.compat.any_model.ranks import TIMEOUT, shutdown_at_exit
from megatron.distributed.device import resolve_backend, resolve_device
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.rendezvous import init_process_group, open_group_of_one
from megatron.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="no effect: calling initialize() says it")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the settings, as DeepSpeed's JSON")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Opens the process group of the launcher's ranks, or of this process alone, unless one is open. Where they meet
    is what the launcher said."""
    del auto_mpi_discovery, distributed_port, verbose, dist_init_required, config
    if dist.is_initialized():
        return
    launch = LaunchInfo.detect()
    if init_method is not None or rank not in (-1, launch.rank) or world_size not in (-1, launch.world_size):
        raise ConfigError(
            "init_distributed(): init_method, rank and world_size are what the launcher says; start the program with "
            "torchrun, or call torch.distributed.init_process_group() yourself: an open group is used"
        )
    device = resolve_device("auto", launch.local_rank)
    backend = resolve_backend(dist_backend, device, "init_distributed(): dist_backend")
    if launch.world_size == 1:
        open_group_of_one(device)
    else:
        init_process_group(launch, backend, timeout, device)
    atexit.register(shutdown_at_exit)
