"""Checks a run's settings against its device, kernels and tokenizer, which `megatron.config` does not know.

Called by `build_run` before ranks wait for each other, for training as well as for --dry-run and --print-config.
"""

from pathlib import Path

import torch

from megatron.checkpoint.find import find_candidates
from megatron.checkpoint.local.replica_folder import Copies
from megatron.config import RunConfig
from megatron.config.refusals import Refusals
from megatron.data.fim import FillInTheMiddle
from megatron.data.sources import check_border_flag
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError
from megatron.ops.select import Kernels
from megatron.optimizer import no_place_for_remainders
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.chat import build_chat_encoder
from megatron.utils.device_kind import kind_of
from megatron.utils.foreign import is_hugging_face


def check_parts(
    config: RunConfig,
    *,
    launch: LaunchInfo,
    device: torch.device,
    kernels: Kernels | None,
    tokenizer: Tokenizer | None,
    needs_data: bool,
    refusals: Refusals,
) -> None:
    """Rejects settings that do not fit the other arguments. `needs_data=False`: the script has its own samples.
    `kernels`: None if their selection was rejected."""
    with refusals.of_checking():
        _check_launches(config, launch, device)
    if config.kernels.cuda_graphs and not kind_of(device.type).graphs:
        with refusals.of_checking():
            raise ConfigError(f"--cuda-graphs: needs a CUDA device, but this run is on {device.type}; remove it")
    no_kernel = kernels is not None and (kernels.adamw is None or config.optimizer.optimizer != "adam")
    if config.optimizer.store_param_remainders and no_kernel and not config.training.skip_train:
        with refusals.of_checking():
            raise no_place_for_remainders()
    if needs_data:
        with refusals.of_checking():
            check_border_flag(config.data, None if tokenizer is None else tokenizer.eod_id)
        if config.data.sft:
            with refusals.of_checking():
                build_chat_encoder(config.tokenizer, None if tokenizer is None else tokenizer.eod_id).check()
        if config.data.fim_data:
            with refusals.of_checking():
                FillInTheMiddle.of(config.data, tokenizer)
    with refusals.of_checking():
        copies_of(config, launch)
    if config.checkpoint.load is not None and (config.runtime.plans or launch.world_size == 1):
        with refusals.of_checking():  # with several ranks, rank 0 looks later and informs the others
            _check_load(config)


def _check_launches(config: RunConfig, launch: LaunchInfo, device: torch.device) -> None:
    stages = config.parallel.pipeline_model_parallel_size
    if launch.blocking_launches and stages > 1 and kind_of(device.type).asynchronous:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages}: would deadlock in its first step under CUDA_LAUNCH_BLOCKING=1, "
            "because each rank blocks in the receive that it posts; unset CUDA_LAUNCH_BLOCKING, or use "
            "--pipeline-model-parallel-size 1"
        )


def _check_load(config: RunConfig) -> None:
    settings = config.checkpoint
    assert settings.load is not None
    if not is_hugging_face(Path(settings.load)):
        save = Path(settings.save) if settings.save else None
        find_candidates(Path(settings.load), step=settings.ckpt_step, save_dir=save, strict=settings.strict_load)


def copies_of(config: RunConfig, launch: LaunchInfo) -> Copies:
    """Replication of local checkpoints' shards, from the settings."""
    settings = config.checkpoint
    if not settings.replication or settings.non_persistent_ckpt_type != "local":
        return Copies()
    jump = settings.replication_jump or launch.local_world_size
    return Copies.of(jump, settings.replication_factor, launch.world_size)
