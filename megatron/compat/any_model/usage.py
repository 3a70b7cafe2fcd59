"""Makes ranks agree on the parameters that none of them used in a step, and on buffers that the model changes."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from megatron.compat.any_model.gathered_writes import refuse_new_parameters
from megatron.compat.any_model.kept_gradients import GuardedWeights, KeptGradients
from megatron.data_parallel.broadcast import share_buffers
from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis


class Usage:
    """Finds the parameters that no rank has used in a step. torch's optimizers skip a parameter without a gradient: no
    weight decay, no decaying moments. A parameter may be left out, or frozen, at any time.

    Ranks compare in every step in which the sums of gradients report that some rank lacked a gradient. At ZeRO 1 they
    compare in every step, while the sums are in flight. At ZeRO 2 and 3 all ranks must use the same layers, which
    `same_use.py` checks.
    """

    def __init__(self, grads: KeptGradients | GuardedWeights, model: nn.Module, dp: Axis) -> None:
        self._grads, self._dp = grads, dp
        self._absent: Collection[str] = ()
        self._model = model
        self._known = {id(one): one for one in model.parameters()}
        self._has_buffers = any(True for _ in model.buffers())

    def absent(self) -> Collection[str]:
        """Returns the parameters without a gradient on any rank in the current step."""
        return self._absent

    def reduce(self) -> None:
        """Sums the gradients over the ranks, and finds the parameters that none of them has used. All ranks call it."""
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
        """Starts comparing. The returned function waits, and returns the parameters that no rank has used."""
        names, lacking = grads.names, set(grads.lacking)
        used = torch.tensor([name not in lacking for name in names], dtype=torch.int32, device=grads.device)
        users = collectives.start_all_reduce(used, self._dp)
        return lambda: {name for name, number in zip(names, users.wait().tolist(), strict=True) if number == 0}

    def share_buffers(self) -> None:
        """Broadcasts the first rank's buffers, such as running means, because ranks saw different samples."""
        if self._has_buffers:
            share_buffers(self._model, self._dp)
