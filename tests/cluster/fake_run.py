"""Runs the real step of one rank of any layout on a fake device with fake peers: nothing is computed or sent."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron.config import parse_args
from megatron.distributed import messages
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.model.passes import Batch
from megatron.ops import select
from megatron.training import assemble as assembling
from megatron.training import model as modelling
from megatron.training.assemble import Parts
from megatron.training.batches import BatchMaker
from megatron.training.initialize import Run, tokenizer_of
from megatron.utils.dtype import cast_floats
from megatron.utils.log import RankLog
from tests.cluster.fake_device import CUDA, NumbersOnDevice, fake_cuda, pin, replace_everywhere
from tests.helpers.runs import pretrain_gpt


@contextlib.contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[None]:
    """Opens a process group of torch's "fake" backend, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_parts(argv: Sequence[str], rank: int, ranks: int) -> Iterator[Parts]:
    """The parts of a run on rank `rank` of `ranks`, whose tensors are on a fake CUDA device."""
    config, script = parse_args(argv), pretrain_gpt()
    kernels = select.resolve(config.kernels.spec, "cuda", attention=config.kernels.attention)
    with fake_world(rank, ranks), fake_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelling, "initialise_part", lambda *_: None)  # a host's work, and once
        patch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)  # it was made there, in its dtype
        patch.setattr(BatchMaker, "_load", on_the_host(BatchMaker._load))
        replace_everywhere(patch, messages.all_gather_json, all_gather_json)
        replace_everywhere(patch, cast_floats, lambda model, _: model)
        evaluation = BatchMaker.evaluation
        patch.setattr(BatchMaker, "evaluation", lambda *given: _pinned(evaluation(*given)))
        launch = LaunchInfo(rank=rank, world_size=ranks, local_rank=0, local_world_size=ranks)
        run = Run(
            config=config,
            launch=launch,
            device=CUDA,
            dtype=getattr(torch, config.precision.params_dtype),
            parallel=ParallelState.build(config.parallel.layout(ranks), rank),
            kernels=kernels,
            tokenizer=tokenizer_of(config, required=False),
            log=RankLog(1),
            run_id="fake",
            started=time.monotonic(),
        )
        providers = script.datasets_provider, script.model_provider, script.forward_step
        with contextlib.ExitStack() as stack:
            with NumbersOnDevice():  # which is watched later
                parts = stack.enter_context(assembling.assemble(run, *providers))
            parts.trainer.train_batches = _pinned(parts.trainer.train_batches)
            yield parts


def all_gather_json(value: Any, axis: Axis, kind: type, *, after_work: bool = False) -> list[Any]:
    """Returns this rank's value for every fake peer."""
    return [value] * axis.size


def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that does not touch the device, so that it is not watched."""

    @functools.wraps(function)
    def unwatched(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return unwatched


def _pinned_value(value: Any) -> Any:
    """Returns what torch's loader makes of one value of a batch."""
    return pin(value) if isinstance(value, torch.Tensor) else getattr(value, "pin_memory", lambda: value)()


def _pinned(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Batches as the loader gives them for a device: real tensors in pinned host memory."""
    while True:
        with _disable_current_modes():
            batch = {name: _pinned_value(v) for name, v in next(batches).items()}
        yield batch
