"""The checks of a run's settings against its device, kernels and tokenizer: what `megatron.config` cannot know.

`build_run` makes them before ranks wait for each other, for a training as for --dry-run and --print-config.
"""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.data.fim import FillInTheMiddle
from megatron.data.sources import check_border_flag
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError
from megatron.ops.select import Kernels
from megatron.optimizer import no_place_for_remainders
from megatron.tokenizer import Tokenizer


def check_parts(
    config: RunConfig,
    *,
    launch: LaunchInfo,
    device: torch.device,
    kernels: Kernels,
    tokenizer: Tokenizer | None,
    needs_data: bool,
) -> None:
    """`needs_data=False`: the samples are the script's own."""
    stages = config.parallel.pipeline_model_parallel_size
    if launch.blocking_launches and stages > 1 and device.type == "cuda":
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages}: would hang in its first step under CUDA_LAUNCH_BLOCKING=1, "
            "which stops a rank at each operation until it ends: stages post receives before they compute what the "
            "sender waits for; unset CUDA_LAUNCH_BLOCKING, or use --pipeline-model-parallel-size 1"
        )
    if config.kernels.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"--cuda-graphs: needs a CUDA device, and this run is on {device.type}; leave it out")
    no_kernel = kernels.adamw is None or config.optimizer.optimizer != "adam"
    if config.optimizer.store_param_remainders and no_kernel and not config.training.skip_train:
        raise no_place_for_remainders()
    if needs_data:
        check_border_flag(config.data, None if tokenizer is None else tokenizer.eod_id)
        if config.data.fim_data:
            FillInTheMiddle.of(config.data, tokenizer)
