"""Drop-in for torch's DistributedDataParallel, built on this project's gradient buckets.

    model = DistributedDataParallel(module)
    loss_of(model(x)).backward()      # afterwards every parameter.grad is the mean over the ranks
    optimizer.step()

Buckets are reduced while the backward pass still runs; the hook of the last gradient waits for all of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.compat.arrivals import Arrivals, reached
from megatron.compat.moving import moved
from megatron.compat.wrapper import AveragingWrapper
from megatron.data_parallel import BucketStore
from megatron.data_parallel.broadcast import share_buffers
from megatron.distributed import collectives
from megatron.errors import ConfigError

_MIB = 2**20


class _ReopenedBuckets(BucketStore):
    """Buckets whose step may start from existing gradients, and whose backward pass may skip parameters."""

    def reopen(self) -> None:
        """Begins a step that accumulates onto the gradients in `parameter.grad`."""
        kept = {name: slot.parameter.grad for name, slot in self._slots.items()}
        self.zero()
        for name, slot in self._slots.items():
            slot.parameter.grad = kept[name]
            slot.filled = kept[name] is not None

    @torch.no_grad()
    def leave_out(self, names: Iterable[str]) -> None:
        """Announces that the last backward pass, which has begun, gives no gradients for `names`. Each keeps the
        gradient in `parameter.grad`, or counts as zero."""
        for name in names:
            slot = self._slot(name)
            if slot.view is None:
                continue
            grad = slot.parameter.grad
            if grad is None:
                slot.view.zero_()
            elif grad.data_ptr() != slot.view.data_ptr():
                slot.view.copy_(grad)
            slot.filled = True
            self._arrived(slot)


class DistributedDataParallel(AveragingWrapper):
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
    ) -> None:
        """Searches the graph of each pass for the parameters that it uses, if `find_unused_parameters` is set. Else
        every pass must use all parameters. The arguments `check_reduction`, `gradient_as_bucket_view` and
        `static_graph` have no effect. (Gradients are always views of the buckets, and the graph may change in every
        pass.)"""
        del dim, check_reduction, gradient_as_bucket_view, static_graph
        super().__init__(module, process_group)
        self._device = _device_of(module, device_ids, output_device)
        self._broadcasts_buffers, self._find_unused = broadcast_buffers, find_unused_parameters
        self._trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        if not self._trained:
            raise ConfigError(
                "DistributedDataParallel: no parameter of the module requires a gradient; use the module itself"
            )
        self._frozen = [(name, one) for name, one in module.named_parameters() if not one.requires_grad]
        if init_sync:
            self._start_alike()
        size = max(1, int(bucket_cap_mb * _MIB) // next(iter(self._trained.values())).element_size())
        trained = self._trained.items()
        self._grads = _ReopenedBuckets(trained, self._dp, bucket_size=size, overlap=True, in_own_type=True)
        self._arrivals = Arrivals(
            self._trained.values(),
            begun=lambda: self._grads.leave_out(self._unused),
            finish=self._finish,
            surprised=self._refuse_hidden,
        )
        self._unused: list[str] = []
        self._buffers_moved = True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self._buffers_moved and self._broadcasts_buffers:
            share_buffers(self.module, self._dp)
        if not torch.is_grad_enabled():
            self._buffers_moved = False
            return self._pass(inputs, named)
        self._check_last_pass()
        self._check_frozen()
        self._grads.reopen()
        self._buffers_moved = self._syncs
        if not self._syncs:
            self._arrivals.cancel()
            return self._pass(inputs, named)
        output = self._pass(inputs, named)
        self._await(reached(output) if self._find_unused else None)
        return output

    def register_comm_hook(self, *_: Any) -> None:
        raise ConfigError(
            "DistributedDataParallel.register_comm_hook(): not supported; remove the call (gradients are averaged in "
            "their own dtype)"
        )

    def join(self, *_: Any, **__: Any) -> None:
        raise ConfigError(
            "DistributedDataParallel.join(): not supported; give all ranks the same number of batches "
            "(DistributedSampler)"
        )

    def _pass(self, inputs: Any, named: Any) -> Any:
        if self._device is None:
            return self.module(*inputs, **named)
        return self.module(*moved(inputs, self._device), **moved(named, self._device))

    def _await(self, used: set[int] | None) -> None:
        """Prepares for a backward pass. `used` holds the ids of the parameters that it reaches; None means all."""
        self._unused = [] if used is None else [name for name, one in self._trained.items() if id(one) not in used]
        self._arrivals.expect([one for one in self._trained.values() if used is None or id(one) in used])
        self._grads.arm()

    def _refuse_hidden(self, parameter: Tensor) -> None:
        name = next(name for name, one in self._trained.items() if one is parameter)
        raise ConfigError(
            f"DistributedDataParallel: find_unused_parameters=True did not find {name} in the graph of forward()'s "
            "output, but it got a gradient; return tensors in lists, tuples, dicts or dataclasses, and call "
            "backward() once per forward()"
        )

    def _finish(self) -> None:
        """Reduces and averages the gradients, within the backward pass, when the last gradient has arrived."""
        nobodys = self._used_by_nobody() if self._find_unused else ()
        self._grads.reduce()
        if self._dp.size > 1:
            self._grads.multiply(1.0 / self._dp.size)
        for name, one in self._trained.items():
            one.grad = nobodys[name] if name in nobodys else self._grads.grad(name)  # type: ignore[call-overload]

    def _used_by_nobody(self) -> dict[str, Tensor | None]:
        """Returns name -> existing gradient for the parameters that no rank has used in this pass."""
        used = [name not in self._unused for name in self._trained]
        users = collectives.all_reduce(torch.tensor(used, dtype=torch.int32, device=self._grads.device), self._dp)
        counted = zip(self._trained.items(), users.tolist(), strict=True)
        return {name: one.grad for (name, one), number in counted if not number}

    def _check_frozen(self) -> None:
        thawed = [name for name, one in self._frozen if one.requires_grad]
        if thawed:
            raise ConfigError(
                f"DistributedDataParallel: {thawed[0]} was frozen when the module was wrapped and requires a gradient "
                "now, which would not be averaged; wrap the module before requires_grad_(False)"
            )

    def _check_last_pass(self) -> None:
        if awaited := self._awaited():
            raise ConfigError(
                f"DistributedDataParallel: the last backward pass gave no gradient to {awaited}, so the ranks' "
                "gradients were not averaged; use all parameters in the loss, or give find_unused_parameters=True"
            )


def _device_of(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None
) -> torch.device | None:
    """Returns the device that inputs are moved to; None leaves them in place."""
    if not device_ids and output_device is None:
        return None
    own = next(module.parameters()).device
    if own.type == "cpu":
        raise ConfigError(
            f"DistributedDataParallel: device_ids {list(device_ids or [])} with a module on the CPU; remove "
            "device_ids, or move the module to the device first: module.to(rank)"
        )
    if device_ids is not None and len(device_ids) != 1:
        raise ConfigError(
            f"DistributedDataParallel: device_ids {list(device_ids)}; give the one device of this process, and start "
            "one process per device"
        )
    return own
