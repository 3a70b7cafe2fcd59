"""FairScale's ShardedDataParallel: every gradient is reduced to the rank that owns its parameter.

    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3)
    model = ShardedDataParallel(model, optimizer)
    loss_of(model(x)).backward()      # the owner's parameter.grad is the mean over the ranks, the others' is None
    optimizer.step()

Gradients are sharded over the ranks; parameters stay whole on all of them (ZeRO's stage 3 shards these too).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.compat.arrivals import Arrivals
from megatron.compat.fairscale.oss import OSS, by_type
from megatron.compat.wrapper import AveragingWrapper
from megatron.data_parallel.broadcast import share_buffers
from megatron.distributed import collectives
from megatron.errors import ConfigError


@dataclass
class _Bucket:
    """Parameters of one owner and dtype whose gradients are reduced in one message."""

    owner: int
    parameters: list[nn.Parameter]
    came: set[int] = field(default_factory=set)
    pending: collectives.Pending | None = None


class ShardedDataParallel(AveragingWrapper):
    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
    ) -> None:
        """Limits a message to `reduce_buffer_size` elements, or one larger parameter. With `reduce_fp16`, messages are
        rounded to fp16. `auto_refresh_trainable` has no effect: every pass checks which parameters are frozen."""
        del auto_refresh_trainable
        self._optimizers = _checked_optimizers(sharded_optimizer)
        super().__init__(module, process_group)
        self._broadcasts_buffers, self._reduce_fp16 = broadcast_buffers, reduce_fp16
        self._size = reduce_buffer_size
        if sync_models_at_startup:
            self._start_alike()
        self._owner_of = self._owners(module)
        parameters = [one for one in module.parameters() if one.requires_grad]
        self._hooked = {id(one) for one in parameters}
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._next = 0
        self._reduced: dict[int, Tensor] = {}
        # Before Arrivals: of two hooks of a parameter, the first one registered runs first.
        self._hooks = [one.register_post_accumulate_grad_hook(self._arrived) for one in parameters]
        self._hooks += [
            one.register_hook(partial(self._add_to_mean, one))
            for one in parameters
            if self._owner_of[id(one)] == self._dp.rank
        ]
        self._arrivals = Arrivals(parameters, begun=lambda: None, finish=self._finish)
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._check_reduced)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        if not self._syncs:
            self._buckets = []
            self._arrivals.cancel()
            return self.module(*inputs, **named)
        if self._broadcasts_buffers:
            share_buffers(self.module, self._dp)
        trained = [one for one in self.module.parameters() if one.requires_grad]
        if any(id(one) not in self._hooked for one in trained):
            raise ConfigError(
                "ShardedDataParallel: a parameter that was frozen requires a gradient now; create OSS and "
                "ShardedDataParallel again"
            )
        self._buckets = list(self._make_buckets(reversed(trained)))
        self._bucket_of = {id(one): bucket for bucket in self._buckets for one in bucket.parameters}
        self._next = 0
        self._arrivals.expect(trained)
        return self.module(*inputs, **named)

    def _owners(self, module: nn.Module) -> dict[int, int]:
        owners = {id(one): optimizer.owner_of(one) for optimizer in self._optimizers for one in optimizer.parameters}
        apart = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in owners]
        if apart:
            raise ConfigError(
                f"ShardedDataParallel: no optimizer has {', '.join(apart[:4])}{' and others' if apart[4:] else ''}; "
                "move the module to its device, then create OSS from its parameters"
            )
        return owners

    def _make_buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[_Bucket]:
        """Yields buckets in the same order on every rank."""
        by_owner: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_owner.setdefault(self._owner_of[id(parameter)], []).append(parameter)
        for owner, mine in sorted(by_owner.items()):
            for alike in by_type(mine):
                some: list[nn.Parameter] = []
                for parameter in alike:
                    if some and sum(one.numel() for one in some) + parameter.numel() > self._size:
                        yield _Bucket(owner, some)
                        some = []
                    some.append(parameter)
                yield _Bucket(owner, some)

    @torch.no_grad()
    def _add_to_mean(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Prepares a gradient that was reduced and not zeroed for another addition. It is a mean over the ranks, so it
        is multiplied by their number: the next reduction divides the whole sum."""
        before = self._reduced.pop(id(parameter), None)
        if before is not None and before is parameter.grad:
            before.mul_(self._dp.size)

    def _arrived(self, parameter: Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter)) if self._buckets else None
        if bucket is None:
            return
        bucket.came.add(id(parameter))
        for following in self._buckets[self._next :]:
            if len(following.came) < len(following.parameters):
                break
            self._launch(following)
            self._next += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        message = torch.cat([_gradient(one).reshape(-1) for one in bucket.parameters])
        if self._reduce_fp16:
            message = message.div_(self._dp.size).half()  # first: the sum might overflow
        bucket.pending = collectives.start_reduce(message, self._dp, bucket.owner)

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for the reductions and keeps the owned gradients, at the end of the backward pass."""
        for bucket in self._buckets:
            assert bucket.pending is not None
            message = bucket.pending.wait()
            if bucket.owner != self._dp.rank:
                for parameter in bucket.parameters:
                    parameter.grad = None
                continue
            if not self._reduce_fp16:
                message.div_(self._dp.size)
            parts = message.split([one.numel() for one in bucket.parameters])
            for parameter, part in zip(bucket.parameters, parts, strict=True):
                parameter.grad = part.view(parameter.shape).to(parameter.dtype)
                self._reduced[id(parameter)] = parameter.grad
        self._buckets = []

    def _check_reduced(self, *_: Any) -> None:
        if awaited := self._awaited():
            raise ConfigError(
                f"ShardedDataParallel: the backward pass gave no gradient to {awaited}, so gradients were not reduced; "
                "use all parameters in the loss, or freeze those with requires_grad_(False)"
            )


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def _checked_optimizers(given: Any) -> list[OSS]:
    optimizers = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in optimizers:
        if isinstance(one, OSS):
            continue
        kind = one.__name__ if isinstance(one, type) else type(one).__name__
        raise ConfigError(
            f"ShardedDataParallel: {kind} is not an OSS; make one first, from the plain model: optimizer = "
            "OSS(model.parameters(), optim=torch.optim.AdamW, lr=1e-3), then ShardedDataParallel(model, optimizer)"
        )
    if not optimizers:
        raise ConfigError("ShardedDataParallel: no optimizer is given; give an OSS")
    return optimizers
