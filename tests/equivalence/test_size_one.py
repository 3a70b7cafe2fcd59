"""One process pays nothing for parallelism: a step through the whole assembly executes the plain model's operations and
sends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.model import GPT
from tests.equivalence.test_model_parallel import GPT2, LLAMA
from tests.helpers.runs import flags, make_parts, pretrain_gpt

DROPOUT = {**GPT2, "hidden_dropout": 0.1, "attention_dropout": 0.1}
MOE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24}
SELECTIVE = {**GPT2, "recompute_granularity": "selective"}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        self.seen.append(f"{op} {shapes}")
        return op(*args, **(kwargs or {}))


def operations(model: torch.nn.Module, passes: Any, batch: Any) -> list[str]:
    """Operations of one forward and backward pass."""
    model.train()
    torch.manual_seed(1)
    with Operations() as operations:
        passes(batch)
    return operations.seen


@pytest.mark.parametrize(
    "family", [GPT2, LLAMA, DROPOUT, SELECTIVE, MOE], ids=["gpt2", "llama", "drop", "again", "moe"]
)
def test_the_operations_are_those_of_the_plain_model(family: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run, parts = make_parts(flags(**family, kernels="auto,-wgrad_accumulation,-adamw"))
    with parts:
        batch = next(iter(parts.trainer.train_batches))
        engine, script = parts.trainer.engine, pretrain_gpt()
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "isend", "broadcast"):
            monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("something was sent"))
        ours = operations(engine.model, lambda b: engine.passes.forward_backward([b], 1.0, lambda: None), batch)
        plain = script.model_provider(run)
        assert isinstance(plain, GPT) and plain is not engine.model
        for ours_p, plain_p in zip(engine.model.parameters(), plain.parameters(), strict=True):
            plain_p.data.copy_(ours_p.data)
        theirs = operations(plain, lambda b: script.forward_step(plain, b)[0].mul(1.0).backward(), batch)
    assert without_accumulation(ours) == without_accumulation(theirs) and len(ours) > 100


def without_accumulation(seen: list[str]) -> list[str]:
    """Leaves out how gradients are stored, which data parallelism decides."""
    return [name for name in seen if not name.startswith(("aten.add_.", "aten.detach", "aten.alias"))]
