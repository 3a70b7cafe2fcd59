"""Expert parallelism applied to a GPT: which experts are here, how tokens reach them, and what routers add up."""

from __future__ import annotations

from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.shard import even_ranges
from megatron.distributed.state import Axis, ParallelState
from megatron.expert_parallel import ExpertDispatcher
from megatron.model.gpt import GPT
from megatron.model.moe import MoE
from megatron.tensor_parallel import mappings


def is_expert(name: str) -> bool:
    """Whether a parameter is of an expert, so that the ranks of an `ep` group hold different ones."""
    return ".mlp.experts." in name


def share_experts(model: GPT, parallel: ParallelState, *, sequence_parallel: bool) -> None:
    """In place. This rank keeps its experts; a model without any stays as it is."""
    ep, tp = parallel.ep, parallel.tp
    splits = tuple(axis for axis in (parallel.cp, *((tp,) if sequence_parallel else ())) if axis.size > 1)
    for module in model.modules():
        if not isinstance(module, MoE):
            continue
        if splits:
            module.router.sum_of_sequence = SumOver(splits)
        if ep.size > 1 or tp.size > 1:
            _keep_own(module, ep)
            module.dispatcher = ExpertDispatcher(
                ep, tp, split_tokens=sequence_parallel, copied=mappings.copied, summed=mappings.summed
            )
    if model.routers is not None:
        for axis in splits:
            model.routers.pieces *= axis.size


def _keep_own(module: MoE, ep: Axis) -> None:
    ((first, last),) = even_ranges(module.num_experts, ep.size, ep.rank)
    for name in list(module.experts):
        if not first <= int(name) < last:
            del module.experts[name]


class SumOver:
    """What the ranks of some axes counted, together."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        self.axes = axes

    def __call__(self, counts: Tensor) -> Tensor:
        counts = counts.clone()
        for axis in self.axes:
            collectives.all_reduce(counts, axis)
        return counts
