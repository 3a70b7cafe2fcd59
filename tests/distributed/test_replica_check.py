"""Replicated parameters are equal bit for bit on all their ranks; one flipped bit is found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import ReplicaError
from megatron.training.hooks import Hook
from megatron.training.replica_check import ReplicaCheck, tensor_hash
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, pretrain_here

TINY: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4, "check_replicas_every": 2, "train_iters": 5}
LLAMA: dict[str, Any] = {
    **TINY,
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 1,
    "qk_layernorm": True,
}


def layout(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


def flip_one_bit(tensor: Tensor, element: int) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor.detach().view(-1).view(integers[tensor.element_size()])[element] ^= 1


def train(
    rank: int, world_size: int, argv: list[str], poked_rank: int, poked: str, element: int, moment: str | None = None
) -> str:
    """Message of the error that ends the run, or "done"."""
    _, parts = make_parts(argv, rank=rank, world_size=world_size)
    with parts:
        trainer = parts.trainer

        class Poke(Hook):
            def after_iteration(self, iteration: int) -> None:
                if iteration == 4 and rank == poked_rank:
                    state = trainer.engine.optimizer.state()[poked] if moment else {}
                    tensor = state[moment] if moment else dict(trainer.engine.model.named_parameters())[poked]
                    flip_one_bit(tensor, element)

        trainer.hooks = [Poke(), *trainer.hooks]  # before the check, which comes after the same iteration
        try:
            return trainer.fit().kind
        except ReplicaError as error:
            return str(error)


def ends(ranks: int, argv: list[str], poked_rank: int = -1, poked: str = "", element: int = 0, **more: Any) -> set[str]:
    return set(run_ranks(ranks, train, ranks, argv, poked_rank, poked, element, *more.values()))


CLEAN = {
    "tp2 x dp2": (TINY, layout(tp=2)),
    "tp2 x dp2, sequence": (TINY, layout(tp=2, sequence_parallel=True, bf16=True)),
    "tp2 x dp2, divided state": (TINY, layout(tp=2, zero_stage=1, bf16=True)),
    "pp2 x dp2, divided state": (TINY, layout(pp=2, zero_stage=1)),
    "tp2 x pp2": (TINY, layout(tp=2, pp=2)),
    "tp4, one group": (LLAMA, layout(tp=4)),
    "pp2 x cp2": (TINY, layout(pp=2, context_parallel_size=2, attention_dropout=0, hidden_dropout=0)),
}


@pytest.mark.parametrize("case", CLEAN)
def test_equal_copies_pass(case: str) -> None:
    family, axes = CLEAN[case]
    assert ends(4, flags(**family, **axes)) == {"done"}


TIED, QKV = "embedding.word_embeddings.weight", "layers.1.self_attention.query_key_value.weight"

# case: flags, poked rank, parameter, element, what the message names
POKED = {
    "norm over tp": (TINY, layout(tp=2), 3, "layers.1.input_layernorm.weight", 5, "rank 3 from ranks 0, 1, 2"),
    "split weight over dp": (TINY, layout(tp=2), 2, "layers.0.mlp.dense_h_to_4h.weight", 7, "rank 2 from rank 0"),
    "tied table over stages": (TINY, layout(tp=2, pp=2), 2, TIED, 0, "rank 2 from rank 0"),
    "shared key": (LLAMA, layout(tp=4), 1, QKV, -1, "rank 1 from ranks 0, 2, 3"),
}


@pytest.mark.parametrize("case", POKED)
def test_one_bit_is_found_and_named(case: str) -> None:
    family, axes, rank, name, element, who = POKED[case]
    (message,) = ends(4, flags(**family, **axes), rank, name, element)
    assert message.startswith("--check-replicas-every, iteration 4: ") and f"the replicas of {name} " in message, (
        message
    )
    assert who in message


@pytest.mark.parametrize(("axes", "where"), [({}, "exp_avg"), ({"zero_stage": 1}, "exp_avg, elements 0 to 32")])
def test_a_bit_of_a_moment_is_found(axes: dict[str, Any], where: str) -> None:
    argv = flags(**TINY, **layout(tp=2, **axes))
    (message,) = ends(4, argv, 1, "final_layernorm.bias", 0, moment="exp_avg")
    assert f"final_layernorm.bias (optimizer: {where})" in message


EVERY_MOMENT = {
    "fp32": {},
    "bf16, masters": {"bf16": True},
    "fp16, masters": {"fp16": True, "initial_loss_scale": 1024},
    "sgd": {"optimizer": "sgd"},
    "experts": {"num_experts": 4, "disable_bias_linear": True},
}


@pytest.mark.parametrize("case", EVERY_MOMENT)
def test_the_lowest_bit_of_every_moment_counts(case: str) -> None:
    """Runs in one process: each flipped bit changes the fingerprint that ranks would compare."""
    _, parts = make_parts(flags(**{**TINY, "train_iters": 2}, **EVERY_MOMENT[case]))
    with parts:
        trainer = parts.trainer
        trainer.fit()
        check = ReplicaCheck(1, trainer.engine, trainer.checkpoints.specs)
        before, flipped = check._fingerprints(), set()
        for name, moments in trainer.engine.optimizer.state().items():
            for key, tensor in moments.items():
                flip_one_bit(tensor, 0)
                flipped.add(f"{name} (optimizer: {key})")
        assert flipped == {place[0] for place, value in check._fingerprints().items() if before[place] != value}


def test_padding_rows_are_no_copy() -> None:
    """97 tokens in 112 rows; padding rows are not compared."""
    argv = flags(**TINY, **layout(tp=2))
    assert ends(4, argv, 1, "embedding.word_embeddings.weight", -1) == {"done"}


def test_one_process_has_no_copies() -> None:
    assert pretrain_here(flags(**TINY)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_the_fingerprint_sees_every_bit_and_the_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 40).to(dtype)
    before = tensor_hash(tensor)
    assert before == tensor_hash(tensor.clone()) and before != tensor_hash(tensor.flip(0))
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    for element in (0, 17, -1):
        for bit in range(8 * tensor.element_size()):
            changed = tensor.clone()
            mask = -(1 << bit) if bit == 8 * tensor.element_size() - 1 else 1 << bit
            changed.view(integers)[element] ^= mask
            assert tensor_hash(changed) != before


def test_a_bit_anywhere_in_a_large_tensor_is_seen() -> None:
    tensor = torch.ones(2**20 + 5)
    before = tensor_hash(tensor)
    for element in (2**20 - 1, 2**20, -1):  # the end of a block, the beginning of the next
        flip_one_bit(tensor, element)
        assert tensor_hash(tensor) != before
        flip_one_bit(tensor, element)
    assert tensor_hash(tensor) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_signs_that_change_together_are_seen(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    tensor = torch.randn(300, generator=generator).to(dtype)
    before = tensor_hash(tensor)
    for count in (2, 4, 10, 300):
        for _ in range(50):
            changed = tensor.clone()
            changed[torch.randperm(300, generator=generator)[:count]] *= -1
            assert tensor_hash(changed) != before


def test_elements_exchanged_or_changed_together_are_seen() -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(5000, generator=generator)
    before = tensor_hash(tensor)
    for _ in range(200):
        i, j = torch.randint(5000, (2,), generator=generator).tolist()
        changed = tensor.clone()
        changed[[i, j]] = tensor[[j, i]]
        assert (tensor_hash(changed) != before) == (i != j)
    assert tensor_hash(torch.zeros(3)) != tensor_hash(torch.zeros(4)) != tensor_hash(-torch.zeros(4))
