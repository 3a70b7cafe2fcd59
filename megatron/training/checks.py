"""The checks of a run's settings against its device, kernels and tokenizer: what `megatron.config` cannot know.

`build_run` makes them before ranks wait for each other, for a training as for --dry-run and --print-config.
"""

from __future__ import annotations

import torch

from megatron.config import RunConfig
from megatron.data.fim import FillInTheMiddle
from megatron.data.sources import check_border_flag
from megatron.errors import ConfigError
from megatron.ops.select import Kernels
from megatron.optimizer import no_place_for_remainders
from megatron.tokenizer import Tokenizer


def check_parts(
    config: RunConfig, *, device: torch.device, kernels: Kernels, tokenizer: Tokenizer | None, needs_data: bool
) -> None:
    """`needs_data=False`: the samples are the script's own."""
    if config.kernels.cuda_graphs and device.type != "cuda":
        raise ConfigError(f"--cuda-graphs: needs a CUDA device, and this run is on {device.type}; leave it out")
    no_kernel = kernels.adamw is None or config.optimizer.optimizer != "adam"
    if config.optimizer.store_param_remainders and no_kernel and not config.training.skip_train:
        raise no_place_for_remainders()
    if needs_data:
        check_border_flag(config.data, None if tokenizer is None else tokenizer.eod_id)
        if config.data.fim_data:
            FillInTheMiddle.of(config.data, tokenizer)
