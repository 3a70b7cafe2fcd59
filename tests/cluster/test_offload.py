"""A step with an offloaded optimizer, on a fake GPU: the host waits only for the decision and the gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cluster.fake_device import CUDA, is_pinned
from tests.cluster.fake_run import fake_parts
from tests.cluster.host_waits import HostWait, Known, Watch
from tests.cluster.known_waits import KNOWN, OUTCOME
from tests.equivalence.test_model_parallel import GPT2
from tests.helpers.runs import flags

DECISION = "megatron/optimizer/decision.py:on_host"
START = "megatron/optimizer/adam_offload.py:start"
ARRIVAL = "megatron/optimizer/adam_offload.py:_sweep"
NEEDED = (
    Known(DECISION, "the norm decides whether there is an update", lambda names, tensor: torch.ones(4)),
    Known(START, "whether there is an update, read from the host", lambda names, tensor: 1.0),
    Known(ARRIVAL, "the gradients, run by run", lambda names, tensor: None),
)


def argv(**changes: object) -> list[str]:
    return flags(
        **{**GPT2, "bf16": True, "optimizer": "adam", "train_iters": 3, "optimizer_cpu_offload": True, **changes}
    )


@pytest.mark.parametrize("changes", [{}, {"optimizer_offload_fraction": 0.0}])
def test_the_host_waits_for_the_decision_and_the_gradients(changes: dict[str, object]) -> None:
    with fake_parts(argv(**changes), 0, 1) as parts:
        buffers = len(list(parts.engine.store.runs())) if not changes else 0
        with Watch((*KNOWN, *NEEDED)) as watch:
            parts.trainer.fit(1)
    assert buffers or changes
    assert watch.waits == +Counter({OUTCOME: 1, DECISION: 1, START: 1, ARRIVAL: buffers})


def test_without_its_exceptions_the_wait_is_found() -> None:
    with fake_parts(argv(), 0, 1) as parts, Watch(KNOWN), pytest.raises(HostWait, match=r"decision\.py"):
        parts.trainer.fit(1)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_the_ranks_send_of_the_state_is_on_the_device(
    monkeypatch: pytest.MonkeyPatch, fraction: float, stage: int
) -> None:
    """Groups below the world have only the device's backend, which does not take host tensors."""
    sent: list[torch.device] = []
    for name in ("broadcast", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda tensor, *_, **__: sent.append(tensor.device))
    changes = {"zero_stage": stage, "optimizer_offload_fraction": fraction, "ddp_bucket_size": 2000}
    with fake_parts(argv(**changes, tensor_model_parallel_size=2), 0, 4) as parts:
        optimizer = parts.engine.optimizer
        state = optimizer.state()
        on_host = {name for name, kinds in state.items() if kinds["master"].device.type == "cpu"}
        assert on_host == set(state) if fraction == 1.0 else 0 < len(on_host) < len(state)
        norm = optimizer.params_norm()
    assert norm.device.type == "cuda" and {device.type for device in sent} == {"cuda"}


PASS = "megatron/model/passes.py:forward_backward"
SUM = "megatron/optimizer/norms.py:sum_on_device"
SHARDS = (
    Known(SUM, "the sum of squares of the host's gradients", lambda names, tensor: tensor.new_empty((), device=CUDA)),
    Known(DECISION, "the norm decides whether there is an update", lambda names, tensor: torch.ones(4)),
    Known(START, "the decision, read from the host", lambda names, tensor: 1.0),
    Known("megatron/optimizer/update_rules.py:step", "the decision, read from the host", lambda names, tensor: 1.0),
    Known(
        PASS,
        "the gradients of shards, at the end of a pass, and in it where they are added to others",
        lambda names, tensor: None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype),
    ),
)


def shards(**changes: object) -> list[str]:
    """Parameters on the host. Tensor parallelism is on, because an unsplit model is allocated in real memory here."""
    settings = {"zero_stage": 3, "remote_device": "cpu", "optimizer_cpu_offload": False, **changes}
    return argv(**{"tensor_model_parallel_size": 2, "global_batch_size": 2, "micro_batch_size": 1, **settings})


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("dp", [1, 2])
def test_parameters_are_on_the_host_and_come_without_a_wait(optimizer: str, dp: int) -> None:
    with fake_parts(shards(optimizer=optimizer), 0, 2 * dp) as parts:
        engine = parts.engine
        grads, micro_batches = engine.store, 2 // dp
        assert all(is_pinned(grads.weight(name)) for name in grads.names)
        assert {grads.weight(name).device.type for name in grads.names} == {"cpu"} and grads.device.type == "cuda"
        with Watch((*KNOWN, *SHARDS)) as watch:
            parts.trainer.fit(1)
        assert {tensor.device.type for kinds in engine.optimizer.state().values() for tensor in kinds.values()} == {
            "cpu"
        }
    assert watch.waits[OUTCOME] == watch.waits[DECISION] == 1
    assert watch.waits[PASS] == micro_batches * len(grads.names)
    assert watch.waits.keys() <= {OUTCOME, DECISION, PASS, *(known.place for known in SHARDS)}


def test_shards_that_are_not_pinned_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import fsdp

    policy = fsdp.CPUOffloadPolicy
    monkeypatch.setattr(fsdp, "CPUOffloadPolicy", lambda pin_memory: policy(pin_memory=False))
    with fake_parts(shards(), 0, 4) as parts, Watch((*KNOWN, *SHARDS)), pytest.raises(HostWait, match="_to_copy"):
        parts.trainer.fit(1)


def test_what_the_ranks_send_of_shards_is_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    for name in ("broadcast", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(torch.distributed, name, lambda tensor, *_, **__: sent.append(tensor.device.type))
    with fake_parts(shards(log_num_zeros_in_grad=True), 0, 4) as parts:
        engine, optimizer = parts.engine, parts.engine.optimizer
        assert {tensor.device.type for _, tensor in engine.whole_weights()} == {"cuda"}
        assert optimizer.params_norm().device.type == "cuda"
        engine.store.zero()
        assert optimizer.count_zeros().device.type == "cuda"
        engine.sum_replicas(engine.store)
    assert sent and set(sent) == {"cuda"}
