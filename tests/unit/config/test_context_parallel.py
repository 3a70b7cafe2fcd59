"""Impossible context-parallel settings are rejected in one line with both flags and the nearest sizes that work."""

from __future__ import annotations

import pytest

from megatron.config import parse_args
from megatron.errors import ConfigError
from tests.helpers.runs import flags

SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"context_parallel_size": 3},
            ["--seq-length 16", "2 x --context-parallel-size 3", "use --seq-length 12,", "size 2 or 4"],
        ),
        ({"context_parallel_size": 2, "seq_length": 15}, ["--seq-length 15", "--seq-length 12 or 16"]),
        (
            {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 12},
            ["--seq-length 12", "--tensor-model-parallel-size 4 --sequence-parallel", "--seq-length 8 or 16", "size 1"],
        ),
        (
            {"context_parallel_size": 4, "cp_comm_type": "a2a", **SIX_HEADS},
            [
                "--cp-comm-type a2a",
                "--num-attention-heads 6",
                "use --context-parallel-size 2, or use --cp-comm-type p2p",
            ],
        ),
        (
            {"context_parallel_size": 2, "cp_comm_type": "a2a", "tensor_model_parallel_size": 2, **SIX_HEADS},
            ["--num-attention-heads 6 over --tensor-model-parallel-size 2", "use --context-parallel-size 1,"],
        ),
        ({"context_parallel_size": 2, "cp_comm_type": ["p2p", "a2a"]}, ["--cp-comm-type p2p a2a", "give one value"]),
        ({"context_parallel_size": 2, "cp_comm_type": "ring"}, ["--cp-comm-type ring", "choose from p2p, a2a"]),
        ({"context_parallel_size": 0}, ["--context-parallel-size 0"]),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_args(flags(**changes))
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    "changes",
    [
        {"context_parallel_size": 4},
        {"context_parallel_size": 8},
        {"context_parallel_size": 4, "cp_comm_type": "a2a"},
        {"context_parallel_size": 4, "cp_comm_type": "p2p", **SIX_HEADS},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "sequence_parallel": True},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 4, "seq_length": 12},
        {"seq_length": 15},
    ],
)
def test_what_fits_is_not(changes: dict[str, object]) -> None:
    parse_args(flags(**changes))


def test_megatrons_spelling_means_the_same() -> None:
    parallel = parse_args(flags(context_parallel_size=2, cp_comm_type="all_gather")).parallel
    assert parallel.cp_attention == "allgather"
