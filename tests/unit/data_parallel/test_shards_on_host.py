"""A single process keeps parameters on the host; it has no process group until fully_shard asks for one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron.data_parallel import FullySharded
from megatron.distributed.launch import shutdown
from megatron.distributed.parallel_state import Axis
from megatron.parallelize import units_of
from tests.distributed.test_fully_sharded import Foreign, plain_sgd


def test_a_single_process_opens_a_group_and_trains_the_same() -> None:
    assert not dist.is_initialized()
    torch.manual_seed(0)
    model = Foreign().double()
    try:
        units = list(units_of(model, Axis.single("dp")))
        sharded = FullySharded(units, keep_gathered=False, device=torch.device("cpu"), on_host=True)
        for step in range(3):
            sharded.zero()
            for batch in range(2):
                model(torch.full((2, 5), float(step + batch), dtype=torch.float64)).backward()
            sharded.multiply(0.5)
            with torch.no_grad():
                for name, grad in sharded.grads():
                    sharded.weight(name).sub_(0.2 * grad)
            sharded.publish()
        group = model._get_fsdp_state()._fsdp_param_groups[0]  # type: ignore[operator, union-attr]
        assert group.offload_policy == CPUOffloadPolicy(pin_memory=False), "there is no device to copy from it"
        found = {name: sharded.whole_weight(name) for name in sharded.all_names}
    finally:
        shutdown(barrier=False)
    wanted = plain_sgd(1)
    assert found.keys() == wanted.keys() and not dist.is_initialized()
    assert all((found[name] - wanted[name]).abs().max() < 1e-12 for name in wanted)
