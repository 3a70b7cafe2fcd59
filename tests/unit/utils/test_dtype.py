"""Tensors that torch only marks as conjugated or negated: taking their bytes gives those of the values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint import manifest
from megatron.checkpoint.background import HostMemory
from megatron.checkpoint.besides_tensors import encode_values
from megatron.checkpoint.reader import StepReader, read_and_verify
from megatron.data_parallel.broadcast import broadcast_parameters, share_buffers
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.layout import Layout
from megatron.state.shard import Shard
from megatron.training.replica_check import tensor_hash
from megatron.utils.dtype import resolved
from tests.helpers.distributed import run_ranks
from tests.unit.checkpoint.support import make_state, save

WHOLE = torch.complex(torch.arange(1.0, 7.0), torch.arange(-3.0, 3.0)).view(2, 3)
MARKED = {
    "conjugated": lambda: WHOLE.clone().conj(),
    "negated": lambda: WHOLE.clone().conj().imag,
    "negated, in order": lambda: torch._neg_view(WHOLE.real.contiguous()),
    "in double precision": lambda: WHOLE.to(torch.complex128).conj(),
}


def plain(marked: Tensor) -> Tensor:
    return torch.from_numpy(marked.resolve_conj().resolve_neg().numpy().copy())


@pytest.fixture(params=MARKED)
def marked(request: pytest.FixtureRequest) -> Tensor:
    tensor = MARKED[request.param]()
    assert tensor.is_conj() or tensor.is_neg()
    return tensor


def test_in_memory(marked: Tensor) -> None:
    found = resolved(marked)
    assert torch.equal(found, marked) and not found.is_conj() and not found.is_neg()
    assert HostMemory(pinned=False).copy(marked).equal(plain(marked))
    assert encode_values({"x": marked}) == encode_values({"x": plain(marked)}) != encode_values({"x": -plain(marked)})
    assert tensor_hash(marked) == tensor_hash(plain(marked)) != tensor_hash(-plain(marked))


def test_saved_and_loaded(marked: Tensor, tmp_path: Path) -> None:
    spec = Shard("buffer", tuple(marked.shape))
    save(tmp_path, make_state(params={"buffer": (spec, marked)}, optimizer=None, config={}, args={}))
    step = tmp_path / "iter_0000010"
    record, target = manifest.read(step), torch.zeros_like(marked)
    target = target.conj() if marked.is_conj() else torch._neg_view(torch.zeros(marked.shape))
    assert target.is_conj() == marked.is_conj() and target.is_neg() == marked.is_neg()
    reader = read_and_verify(step, record, {"buffer": (spec, target)}, {}, None, Axis.single("world"))
    reader.fill(spec, target, record.model["buffer"])
    assert torch.equal(target, marked)
    assert torch.equal(StepReader(step, record).logical("buffer", record.model["buffer"]), marked)


def sent(rank: int) -> list[bool]:
    axis, same = ParallelState.build(Layout(2), rank).dp, []
    for make in MARKED.values():
        module = nn.Module()
        module.register_buffer("shared", make().mul_(1 - rank))
        share_buffers(module, axis)
        same.append(torch.equal(module.shared, make()))
        again = make().mul_(1 - rank)
        broadcast_parameters([("again", again)], axis)
        same.append(torch.equal(again, make()))
    return same


def test_sent_to_the_other_ranks() -> None:
    assert run_ranks(2, sent) == [[True] * 2 * len(MARKED)] * 2
