"""Links between stages deliver messages in any order of asking, in one group or in one group per link. NCCL needs a
group per link; here it runs on gloo."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.pipeline_parallel.links import Links, Message
from tests.helpers.distributed import run_ranks


def exchange(rank: int, size: int, by_link: bool) -> list[float]:
    """Every rank sends activations forward and gradients back around the ring, and receives the last ones first."""
    state = ParallelState.build(Layout(size, pp=size), rank, links=by_link)
    assert len(state.pp_links) == (4 if by_link else 0)
    links = Links(state.pp, state.pp_links)
    links.connect(torch.device("cpu"))
    after, before = (rank + 1) % size, (rank - 1) % size
    like, received = torch.empty(0), []
    messages = [Message("activation", rank, m) for m in range(3)] + [Message("gradient", rank, m) for m in range(3)]
    for message in messages:
        links.expect(message, (2, 2), like, before if message.what == "activation" else after)
    for m in range(3):
        links.send(torch.full((2, 2), 100.0 * rank + m), Message("activation", after, m), after)
        links.send(torch.full((2, 2), 100.0 * rank + m + 50), Message("gradient", before, m), before)
    for message in reversed(messages):
        received.append(links.take(message)[0, 0].item())
    links.finish()
    return received


@pytest.mark.parametrize("by_link", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_every_message_arrives_where_it_belongs(size: int, by_link: bool) -> None:
    for rank, received in enumerate(run_ranks(size, exchange, size, by_link)):
        after, before = (rank + 1) % size, (rank - 1) % size
        expected = [100.0 * before + m for m in range(3)] + [100.0 * after + m + 50 for m in range(3)]
        assert received == expected[::-1]
