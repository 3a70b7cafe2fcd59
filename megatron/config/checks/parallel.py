"""Checks of parallel layouts that do not depend on the number of ranks."""

from math import lcm

from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.config.stages import stage_layers
from megatron.errors import ConfigError
from megatron.layout import CP_FLAG, TP_FLAG, SizesError, Way, divisors, multiples_around
from megatron.pipeline_schedules import SCHEDULES


def check_context(config: RunConfig) -> None:
    """Checks context parallelism, where every rank holds two chunks of the sequence."""
    parallel = config.parallel
    kinds, cp = parallel.cp_comm_type, parallel.context_parallel_size
    if len(kinds) > 1:
        raise ConfigError(
            f"{spelled(config, 'cp_comm_type')}: all layers use the same method; give one value, such as {kinds[0]}"
        )
    if cp == 1:
        return
    _check_sequence(config)
    if parallel.cp_attention == "a2a":
        _check_heads(config)


def _check_sequence(config: RunConfig) -> None:
    parallel, seq_length = config.parallel, config.data.seq_length
    cp, pieces = parallel.context_parallel_size, 2
    given = f"2 x {spelled(config, 'context_parallel_size')}"
    if parallel.splits_sequence:
        pieces = lcm(2, parallel.tensor_model_parallel_size)
        given += f" with {spelled(config, 'tensor_model_parallel_size')} --sequence-parallel"
    if seq_length % (cp * pieces):
        sizes = divisors(seq_length // pieces) if seq_length % pieces == 0 else [1]
        raise SizesError(
            f"{spelled(config, 'seq_length')} is not divisible into chunks of equal length for {given}",
            _other_length(seq_length, cp * pieces),
            Way(f"use {CP_FLAG} {{}}", CP_FLAG, cp, sizes),
        )


def _other_length(seq_length: int, unit: int) -> Way:
    return Way("use --seq-length {}", "--seq-length", seq_length, multiples_around(seq_length, unit))


def _check_heads(config: RunConfig) -> None:
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    if not heads or heads % tp or heads // tp % cp == 0:
        return
    whose = f" over {spelled(config, 'tensor_model_parallel_size')}" if tp > 1 else ""
    raise SizesError(
        f"{spelled(config, 'cp_comm_type')}: {spelled(config, 'num_attention_heads')}{whose} is not divisible by "
        f"{spelled(config, 'context_parallel_size')}",
        Way(f"use {CP_FLAG} {{}}", CP_FLAG, cp, divisors(heads // tp)),
        "use --cp-comm-type p2p",
    )


def check_tensor(config: RunConfig) -> None:
    """Checks that every tensor-parallel rank gets whole heads, whole KV heads (or a copy of one), and an equal part of
    the MLP."""
    parallel, model, tp = config.parallel, config.model, config.parallel.tensor_model_parallel_size
    if tp == 1 or not model.num_attention_heads:
        return
    _check_divides(config, "num_attention_heads", model.num_attention_heads)
    _check_divides(config, "ffn_hidden_size", model.ffn_size)
    groups = model.query_groups
    if groups % tp and tp % groups:
        raise SizesError(
            f"{spelled(config, 'num_query_groups')}: {spelled(config, 'tensor_model_parallel_size')} must be a "
            "divisor or a multiple of the number of query groups",
            other_tensor_size(config),
        )
    shared = parallel.context_parallel_size > 1  # checked together with --context-parallel-size
    if parallel.sequence_parallel and not shared and config.data.seq_length % tp:
        raise SizesError(
            f"{spelled(config, 'seq_length')} is not divisible by {spelled(config, 'tensor_model_parallel_size')} for "
            "--sequence-parallel",
            _other_length(config.data.seq_length, tp),
            "remove --sequence-parallel",
        )


def _check_divides(config: RunConfig, setting: str, size: int) -> None:
    tp, named = config.parallel.tensor_model_parallel_size, f"--{setting.replace('_', '-')} {size}"
    if size % tp:
        unset = " (computed from --hidden-size)" if getattr(config.model, setting) is None else ""
        raise SizesError(
            f"{named}{unset} is not divisible by {spelled(config, 'tensor_model_parallel_size')}",
            other_tensor_size(config),
        )


def other_tensor_size(config: RunConfig) -> Way:
    """Returns the tensor-parallel sizes to use instead of one that does not divide a size of the model."""
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    return Way(f"use {TP_FLAG} {{}}", TP_FLAG, tp, divisors(heads or config.model.ffn_size))


def check_pipeline(config: RunConfig) -> None:
    """Checks that the layers divide over the pipeline stages and that the schedule fits the virtual stages."""
    parallel = config.parallel
    if config.model.num_layers:
        stage_layers(config.model.num_layers, parallel)
    if SCHEDULES[parallel.schedule].interleaves != parallel.has_virtual_stages:
        way = (
            "use --pipeline-schedule interleaved"
            if parallel.has_virtual_stages
            else "give --num-layers-per-virtual-pipeline-stage"
        )
        raise ConfigError(
            f"{spelled(config, 'pipeline_schedule')}: interleaved and virtual stages need each other; {way}"
        )
    group, pp = parallel.micro_batch_group, parallel.pipeline_model_parallel_size
    if group is not None and group < pp:
        raise ConfigError(
            f"{spelled(config, 'microbatch_group_size_per_virtual_pipeline_stage')}: fewer micro-batches than stages "
            f"({spelled(config, 'pipeline_model_parallel_size')}) would make stages wait; use at least {pp}, or "
            "remove this setting"
        )


def check_zero(config: RunConfig) -> None:
    """Checks that all settings select the same stage of ZeRO. --use-distributed-optimizer agrees with stages 1 to 3."""
    asked = config.parallel.zero_asked
    (deepest, stage), *_ = sorted(asked.items(), key=lambda item: -item[1]) or [("zero_stage", 0)]
    for name, other in asked.items():
        if other != stage and (name != "use_distributed_optimizer" or not stage):
            raise ConfigError(
                f"{spelled(config, deepest)} and {spelled(config, name)} contradict each other: they select stages "
                f"{stage} and {other} of ZeRO; keep one"
            )
    if config.parallel.num_distributed_optimizer_instances > 1 and not stage:
        raise ConfigError(
            f"{spelled(config, 'num_distributed_optimizer_instances')}: without ZeRO every rank has the whole "
            "optimizer state; add --use-distributed-optimizer (or --zero-stage 2 or 3), or remove this setting"
        )
    if stage == 3 and config.parallel.remote_device == "nvme":
        raise ConfigError(
            f"{spelled(config, 'remote_device')}: parameters are kept in host memory or on the device, not in files; "
            "use cpu, or remove this setting"
        )


def check_device_memory(config: RunConfig) -> None:
    """Raises a ConfigError if --device-memory cannot be parsed."""
    _ = config.runtime.device_bytes


CHECKS = (check_tensor, check_pipeline, check_context, check_zero, check_device_memory)
