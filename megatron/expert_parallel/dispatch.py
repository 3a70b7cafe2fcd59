"""Token dispatcher: sends tokens to the ranks of their experts and back, by all-to-all without padding.

    tokens sorted by expert --ep--> rows of this rank's experts --tp--> rows of all tensor-parallel ranks --> experts
    results in the tokens' order <--ep-- results of this rank's rows <--tp-- partial sums of each rank <-- experts

Each expert's weights are split over the tensor-parallel ranks. Without sequence parallelism, these ranks hold copies of
the tokens, which enter through `copied` and leave through `summed`, once for all experts. With sequence parallelism,
the ranks hold different tokens, exchange them, and sum the partial results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed import collectives
from megatron.distributed.collectives import Pending
from megatron.distributed.parallel_state import Axis
from megatron.model.factory import RunExperts
from megatron.model.recompute import Recomputation
from megatron.ops.expert_rows import RowGroups, by_expert, taken

Mapping = Callable[[Tensor, Axis], Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows that ranks send each other."""

    counts: Tensor
    """Rows of each sender and expert of this rank, [tp * ep, experts here], on the device."""
    send: list[int]
    """Rows from this rank to each rank of `ep`."""
    receive: list[int]
    """Rows from each rank of `ep`."""
    shared: list[int]
    """Rows from each rank of `tp` after that exchange."""
    experts: list[int]
    """Rows of each expert of this rank, from all senders."""


class ExpertDispatcher(nn.Module):
    """Sends rows to the ranks of their experts and back. Rank r of the `ep` axis owns the r-th of equal shares of the
    experts. `copied` and `summed` are the mappings of `tensor_parallel.mappings`. `split_tokens`: tensor-parallel ranks
    hold different tokens, not copies.

    The host waits for the device once, for the sizes of the exchange. Nothing waits if no rows move, or if all experts
    have buffers of a fixed size.
    """

    def __init__(
        self,
        ep: Axis,
        tp: Axis,
        *,
        split_tokens: bool,
        copied: Mapping,
        summed: Mapping,
        padding: int = 0,
        taken: Callable[..., Tensor] = taken,
        recomputation: Recomputation | None = None,
    ) -> None:
        """`padding`: rows of zeros that the experts need after each expert's rows. `taken`: the operation."""
        super().__init__()
        self.ep, self.tp = ep, tp
        self.senders = tp if split_tokens else Axis.single("tp")
        self.copied, self.summed, self.taken = copied, summed, taken
        self.moves_rows = ep.size * self.senders.size > 1
        self.padding = 0 if self.moves_rows else padding
        self.padding_after_exchange = padding
        self.recomputation = recomputation or Recomputation()

    def forward(
        self, rows: Tensor, groups: RowGroups, experts: RunExperts, meanwhile: Callable[[], T]
    ) -> tuple[Tensor, T]:
        if not self.moves_rows:
            return self._summed_slices(rows, lambda rows: experts(rows, groups)), meanwhile()
        sizes = self.recomputation.once(lambda: self._sizes(groups))
        exchange = RowExchange(sizes.send, sizes.receive, self.ep)
        rows = exchange.start(rows)
        other = meanwhile()
        rows = self._on_every_slice(exchange.wait(rows), sizes, experts)
        return exchanged(rows, sizes.receive, sizes.send, self.ep), other

    def _sizes(self, groups: RowGroups) -> Sizes:
        """Exchanges the sizes of the groups and copies what the host needs of them; waits once."""
        if groups.fixed:
            counts = self._here(self._like_here(groups.counts))
            everybody = self._like_here(torch.tensor(groups.on_host))
        else:
            of_ep = torch.stack(collectives.all_gather(groups.counts, self.ep))
            everybody = torch.stack(collectives.all_gather(of_ep, self.senders))  # [tp, ep, all experts]
            counts = self._here(everybody)
        own, here = everybody[self.senders.rank, self.ep.rank].view(self.ep.size, -1), self._here(everybody)
        sums = [own.sum(1), here[self.senders.rank].sum(1), here.sum((1, 2)), here.sum((0, 1))]
        numbers = iter(torch.cat(sums).tolist())
        send, receive, shared, experts = ([next(numbers) for _ in one] for one in sums)
        assert sum(send) == groups.rows, f"{groups.rows} rows, but {sum(send)} of them have an expert"
        return Sizes(counts.flatten(0, 1), send, receive, shared, experts)

    def _like_here(self, counts: Tensor) -> Tensor:
        """The rows of all experts on all ranks that exchange rows, [tp, ep, experts], if all have these."""
        return counts.expand(self.senders.size, self.ep.size, -1)

    def _here(self, everybody: Tensor) -> Tensor:
        """[tp, ep, all experts] -> [tp, ep, experts here]."""
        return everybody.unflatten(2, (self.ep.size, -1))[:, :, self.ep.rank]

    def _on_every_slice(self, rows: Tensor, sizes: Sizes, experts: RunExperts) -> Tensor:
        """Runs all tensor-parallel slices of this rank's experts on `rows`, sorted by sender and then by expert."""

        def run(rows: Tensor) -> Tensor:
            return self._run(rows, sizes, experts)

        if self.senders.size == 1:
            return self._summed_slices(rows, run)
        own = [rows.shape[0]] * self.tp.size
        gathered = exchanged(rows.repeat(self.tp.size, 1), own, sizes.shared, self.tp)
        return exchanged(run(gathered), sizes.shared, own, self.tp).view(self.tp.size, *rows.shape).sum(0)

    def _summed_slices(self, rows: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        return self.summed(run(self.copied(rows, self.tp)), self.tp)

    def _run(self, rows: Tensor, sizes: Sizes, experts: RunExperts) -> Tensor:
        """Calls the experts on rows sorted by sender and then by expert."""
        senders, count = sizes.counts.shape
        numbers = torch.arange(count, device=rows.device).repeat(senders)
        chosen = numbers.repeat_interleave(sizes.counts.flatten(), output_size=rows.shape[0])
        order = by_expert(chosen, count, self.padding_after_exchange, sizes.experts)
        return self.taken(experts(self.taken(rows, order), order.groups), order.back)


class RowExchange:
    """All-to-all of rows [sum(send), width]: the first send[0] go to member 0, the next send[1] to member 1, and so on.
    The result holds receive[i] rows from each member i, in the members' order.

    Work between `start` and `wait` runs beside the exchange, and its backward beside that of the gradients.
    """

    def __init__(self, send: Sequence[int], receive: Sequence[int], axis: Axis) -> None:
        self.send, self.receive, self.axis = send, receive, axis
        self.of_rows: Pending | None = None
        self.of_gradients: Pending | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Returns the tensor that will hold the result."""
        return rows if self.axis.size == 1 else _Start.apply(rows, self)

    def wait(self, result: Tensor) -> Tensor:
        return result if self.axis.size == 1 else _Wait.apply(result, self)


def exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    """Exchanges rows and waits for them."""
    exchange = RowExchange(send, receive, axis)
    return exchange.wait(exchange.start(rows))


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.of_rows = collectives.start_exchange(rows, exchange.send, exchange.receive, exchange.axis)
        return exchange.of_rows.result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor, None]:
        pending, ctx.exchange.of_gradients = ctx.exchange.of_gradients, None
        return pending.wait(), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        pending, exchange.of_rows = exchange.of_rows, None
        assert pending is not None, "wait() was called before start()"
        return pending.wait().view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange: RowExchange = ctx.exchange
        exchange.of_gradients = collectives.start_exchange(gradient, exchange.receive, exchange.send, exchange.axis)
        return gradient, None  # autograd wants one of this shape; `_Start` returns those that arrive
