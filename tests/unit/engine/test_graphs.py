"""Recorded passes without a GPU: a stand-in replays by calling the work again on the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data_parallel import BucketStore
from megatron.engine import GraphedPasses
from megatron.engine import assembly as build_module
from megatron.engine import graphs as module
from megatron.errors import ConfigError
from megatron.ops.documents import Documents
from tests.helpers.kernels import backend
from tests.helpers.runs import flags, make_parts


class ReplayedByCalling:
    """Behaves like a recording. Capturing leaves only memory, whose contents are right after a replay. A replay writes
    to the captured tensors; changes to Python objects are undone."""

    made: list[ReplayedByCalling]

    def __init__(self, grads: BucketStore) -> None:
        self.grads, self.replays = grads, 0

    def warm_up(self, work: Callable[[], object]) -> None:
        state = torch.get_rng_state()
        work()
        torch.set_rng_state(state)

    def capture(self, work: Callable[[], Any]) -> Any:
        state = torch.get_rng_state()
        self.work, self.outputs = work, tuple(torch.full_like(output, float("nan")) if output.is_floating_point() else
                                              torch.full_like(output, -1) for output in work())  # fmt: skip
        torch.set_rng_state(state)
        return self.outputs

    def replay(self) -> None:
        self.replays += 1
        filled = {name: slot.filled for name, slot in self.grads._slots.items()}
        for place, result in zip(self.outputs, self.work(), strict=True):
            place.copy_(result)
        for name, slot in self.grads._slots.items():
            slot.filled = filled[name]


def run(argv: list[str], *, graphed: bool) -> tuple[list[Any], dict[str, Tensor], list[ReplayedByCalling]]:
    backend("cpu")
    _, parts = make_parts(argv)
    engine, graphs = parts.trainer.engine, list[ReplayedByCalling]()

    def make_graph() -> ReplayedByCalling:
        graphs.append(ReplayedByCalling(engine.store))
        return graphs[-1]

    if graphed:
        engine.passes = GraphedPasses(engine.passes, engine.store, make_graph)  # type: ignore[arg-type]
    with parts:
        results = []
        while not parts.trainer.finished:
            results.append(parts.trainer.iterate())
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    return results, weights, graphs


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16, overflows": {"fp16": True, "initial_loss_scale": 2.0**20},
    "no dropout, untied": {
        "attention_dropout": 0, "hidden_dropout": 0, "untie_embeddings_and_output_weights": True, "seed": 7,
    },
    "torch's update": {"kernels": "auto,-adamw,-grad_norm"},
    "documents": {
        "reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True,
        "tokenizer_type": "NullTokenizer", "vocab_size": 96,
    },
    "a growing batch": {
        "rampup_batch_size": [4, 2, 16], "train_iters": None, "train_samples": 48, "lr_decay_style": "constant",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_replayed_passes_train_the_same_model(name: str) -> None:
    """Losses, norms and weights, bit for bit, with dropout."""
    argv = flags(**CASES[name])
    expected, wanted, _ = run(argv, graphed=False)
    results, weights, graphs = run(argv, graphed=True)
    assert repr(results) == repr(expected)
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    # A batch with more documents than the recording takes is recorded anew.
    assert len(graphs) == 1 or (name == "documents" and len(graphs) < 5)
    assert sum(graph.replays for graph in graphs) == sum(result.batch_size for result in results) // 2


def test_a_recording_for_more_documents_replaces_the_smaller() -> None:
    backend("cpu")
    _, parts = make_parts(flags(**CASES["documents"], attention_dropout=0, hidden_dropout=0))
    engine, made = parts.trainer.engine, list[ReplayedByCalling]()

    def make_graph() -> ReplayedByCalling:
        assert not graphed._recordings, "the smaller recording still holds its memory"
        made.append(ReplayedByCalling(engine.store))
        return made[-1]

    graphed = GraphedPasses(engine.passes, engine.store, make_graph)  # type: ignore[arg-type]
    batch = next(iter(parts.trainer.train_batches))
    shape = batch["tokens"].shape
    every = [2, 8, 4, 1, 8]  # tokens from one document to the next
    for length, recordings in zip(every, (1, 1, 1, 2, 2), strict=True):
        starts = torch.arange(shape.numel()).view(shape) % length == 0
        one = {**batch, "document_ids": Documents.of_starts(starts)}
        engine.store.zero()
        expected = engine.passes.forward_backward([one], 0.5, lambda: None)
        engine.store.zero()
        found = graphed.forward_backward([one], 0.5, lambda: None)
        assert torch.equal(torch.stack(found[0]), torch.stack(expected[0]))
        assert len(made) == recordings and len(graphed._recordings) == 1


def test_a_new_shape_is_recorded_too_and_a_fifth_is_refused() -> None:
    backend("cpu")
    _, parts = make_parts(flags(micro_batch_size=1, attention_dropout=0, hidden_dropout=0))
    engine, made = parts.trainer.engine, list[ReplayedByCalling]()

    def make_graph() -> ReplayedByCalling:
        made.append(ReplayedByCalling(engine.store))
        return made[-1]

    plain = engine.passes
    graphed = GraphedPasses(plain, engine.store, make_graph)  # type: ignore[arg-type]
    batch = next(iter(parts.trainer.train_batches))

    def gradients(passes: Any, batches: list[Any]) -> list[Tensor]:
        engine.store.zero()
        passes.forward_backward(batches, 0.5, lambda: None)
        engine.store.reduce()
        return [grad.clone() for _, grad in engine.store.grads()]

    shapes = [
        {key: value[:, :length] if value.dim() > 1 else value for key, value in batch.items()}
        for length in (16, 8, 4, 2)
    ]
    for batches in (shapes[:1], shapes[:2], shapes[::-1]):
        for ours, theirs in zip(gradients(graphed, batches), gradients(plain, batches), strict=True):
            assert torch.equal(ours, theirs), "what recording a later shape computed is in no gradient"
    assert len(made) == 4
    fifth = {key: value[:, :3] if value.dim() > 1 else value for key, value in batch.items()}
    with pytest.raises(ConfigError, match=r"micro-batches have more than 4 shapes \(new: labels \[1, 3\]"):
        gradients(graphed, [fifth])
    graphed.forget()  # and with them, what they hold
    for ours, theirs in zip(gradients(graphed, shapes[:1]), gradients(plain, shapes[:1]), strict=True):
        assert torch.equal(ours, theirs)
    assert len(made) == 5


# rejections


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2 exclude each other: ranks comm"),
        ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 2 exclude each other: ranks comm"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2 exclude each other: ranks comm"),
        ({"num_experts": 4, "disable_bias_linear": True}, "--num-experts 4 exclude each other: the host splits"),
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce exclude each other: gradient reductions start"),
        ({"compile": True}, "--compile exclude each other: the combination is untested"),
        ({"recompute_activations": True}, "recomputation exclude each other: recomputation reads the random state"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--cuda-graphs and {words}.*keep one of them"):
        make_parts(flags(cuda_graphs=True, **settings))


def test_it_needs_a_cuda_device() -> None:
    with pytest.raises(ConfigError, match="--cuda-graphs: needs a CUDA device, but this run is on cpu; remove it"):
        make_parts(flags(cuda_graphs=True))


def test_other_models_are_refused() -> None:
    engine = make_parts(flags())[1].trainer.engine
    with pytest.raises(ConfigError, match="--cuda-graphs: supports only the package's GPT, not a Linear"):
        build_module._graphed(engine.passes, torch.nn.Linear(1, 1), engine.store, torch.device("cuda"))


# mistakes that must be seen


def plant_inputs_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: every replay uses the micro-batch of the recording."""
    right = module._Recording.run

    def wrong(self: Any, batch: Any, factor: Any) -> Any:
        return right(self, self.inputs, factor)

    patch.setattr(module._Recording, "run", wrong)


def plant_factor_not_copied(patch: pytest.MonkeyPatch) -> None:
    right = module._Recording.run
    patch.setattr(module._Recording, "run", lambda self, batch, factor: right(self, batch, self.factor.clone()))


def plant_results_not_copied(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: all micro-batches report the last one's loss."""

    def wrong(self: Any, batch: Any, factor: Any) -> Any:
        for name, place in self.inputs.items():
            place.copy_(batch[name])
        self.factor.fill_(factor)
        self.graph.replay()
        return self.loss_sum, self.count

    patch.setattr(module._Recording, "run", wrong)


def plant_buffers_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    """Planted bug: gradients of the previous step and of the warm-up remain."""

    def wrong(self: BucketStore) -> None:
        for slot in self._slots.values():
            slot.filled = True
            assert slot.view is not None
            slot.parameter.grad = slot.view

    patch.setattr(BucketStore, "fill_with_zeros", wrong)


PLANTS = [plant_inputs_not_copied, plant_factor_not_copied, plant_results_not_copied, plant_buffers_not_zeroed]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    argv = flags(train_iters=3)
    expected, _, _ = run(argv, graphed=False)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        results, _, _ = run(argv, graphed=True)
    assert repr(results) != repr(expected)
