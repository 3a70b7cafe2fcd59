"""A launch that the prover knows to hang is rejected before any process group exists."""

from __future__ import annotations

import pytest
import torch

from megatron.config import parse_args
from megatron.config.refusals import Refusals
from megatron.distributed.launch import LaunchInfo
from megatron.errors import ConfigError
from megatron.ops.select import resolve
from megatron.training.checks import check_parts
from tests.helpers.runs import flags


def check(stages: int, device: str, launch: LaunchInfo) -> None:
    config = parse_args(flags(pipeline_model_parallel_size=stages))
    kernels = resolve("ref", "cpu")
    found, where = Refusals(), torch.device(device)
    check_parts(config, launch=launch, device=where, kernels=kernels, tokenizer=None, needs_data=False, refusals=found)
    found.end()


@pytest.mark.parametrize(("value", "blocks"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_environment_is_read_with_the_launch(value: str | None, blocks: bool) -> None:
    env = {} if value is None else {"CUDA_LAUNCH_BLOCKING": value}
    assert LaunchInfo.detect(env=env).blocking_launches is blocks


def test_a_pipeline_whose_launches_block() -> None:
    blocking = LaunchInfo(blocking_launches=True)
    with pytest.raises(
        ConfigError, match=r"--pipeline-model-parallel-size 2: would deadlock.*unset CUDA_LAUNCH_BLOCKING"
    ):
        check(2, "cuda", blocking)
    check(2, "cuda", LaunchInfo())
    check(1, "cuda", blocking)
    check(2, "cpu", blocking)
