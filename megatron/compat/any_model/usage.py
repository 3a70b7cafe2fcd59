"""Which parameters took part in a step, and the buffers that the model changes itself: what ranks must agree on."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from megatron.compat.any_model.gathered_writes import refuse_new_parameters
from megatron.compat.any_model.kept_gradients import GuardedWeights, KeptGradients
from megatron.data_parallel.broadcast import share_buffers
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis


class Usage:
    """An optimizer of torch leaves a parameter without a gradient alone: no weight decay, no decaying moments. Over
    several ranks that is one that no rank has used; a parameter may be left out, or frozen, at any time. So they
    compare notes in every step in which the sums of gradients have told that some rank lacked one; in every step where
    those are divided (ZeRO 1), while they are under way. Where gradients are divided as they come (ZeRO 2 and 3),
    all use the same parts, which is checked there.
    """

    def __init__(self, grads: KeptGradients | GuardedWeights, model: nn.Module, dp: Axis) -> None:
        self._grads, self._dp = grads, dp
        self._absent: Collection[str] = ()
        self._model = model
        self._known = {id(one): one for one in model.parameters()}
        self._has_buffers = any(True for _ in model.buffers())

    def absent(self) -> Collection[str]:
        """The parameters that got no gradient on any rank in the step that is being made."""
        return self._absent

    def reduce(self) -> None:
        """Sums the gradients over the ranks, and finds what none of them has used. All ranks call it."""
        grads = self._grads
        if isinstance(grads, GuardedWeights):
            grads.reduce()
            self._absent = grads.absent()
            return
        refuse_new_parameters(self._model, self._known)
        grads.start_reduce()  # first: some ranks may have begun in backward, where others lacked a gradient
        compares = not grads.counts_lacking
        absent: Callable[[], Collection[str]] = self._start_comparing(grads) if compares else tuple
        grads.finish_reduce()
        if not compares and grads.some_rank_lacked():
            absent = self._start_comparing(grads)
        self._absent = absent()

    def _start_comparing(self, grads: KeptGradients) -> Callable[[], Collection[str]]:
        """The result waits for what no rank has used."""
        names, lacking = grads.names, set(grads.lacking)
        used = torch.tensor([name not in lacking for name in names], dtype=torch.int32, device=grads.device)
        users = collectives.start_all_reduce(used, self._dp)
        return lambda: {name for name, number in zip(names, users.wait().tolist(), strict=True) if number == 0}

    def share_buffers(self) -> None:
        """Ranks saw different samples, so buffers such as running means differ; the first rank's are used and saved."""
        if self._has_buffers:
            share_buffers(self._model, self._dp)
