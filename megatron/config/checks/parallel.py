"""Checks of how the work is divided, as far as they need no number of ranks."""

from __future__ import annotations

from math import lcm

from megatron.config.meaning import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.layout import nearest_divisors, nearest_multiples


def check_context(config: RunConfig) -> None:
    """The sequence is cut into two chunks per rank."""
    parallel = config.parallel
    kinds, cp = parallel.cp_comm_type, parallel.context_parallel_size
    if len(kinds) > 1:
        raise ConfigError(
            f"{spelled(config, 'cp_comm_type')}: all layers exchange in the same way here; give one value, such as "
            f"{kinds[0]}"
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
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        pieces = lcm(2, parallel.tensor_model_parallel_size)
        given += f" with {spelled(config, 'tensor_model_parallel_size')} --sequence-parallel"
    if seq_length % (cp * pieces):
        lengths = " or ".join(map(str, nearest_multiples(seq_length, cp * pieces)))
        fitting = nearest_divisors(seq_length // pieces, cp) if seq_length % pieces == 0 else ()
        sizes = f", or --context-parallel-size {' or '.join(map(str, fitting))}" if fitting else ""
        raise ConfigError(
            f"{spelled(config, 'seq_length')} does not divide into chunks of equal length for {given}; "
            f"use --seq-length {lengths}{sizes}"
        )


def _check_heads(config: RunConfig) -> None:
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    cp = config.parallel.context_parallel_size
    if not heads or heads % tp or heads // tp % cp == 0:
        return
    whose = f" over {spelled(config, 'tensor_model_parallel_size')}" if tp > 1 else ""
    fitting = " or ".join(map(str, nearest_divisors(heads // tp, cp)))
    raise ConfigError(
        f"{spelled(config, 'cp_comm_type')}: {spelled(config, 'num_attention_heads')}{whose} does not divide by "
        f"{spelled(config, 'context_parallel_size')}; use --context-parallel-size {fitting}, or --cp-comm-type p2p"
    )


CHECKS = (check_context,)
