"""Changes of a program to a model after `megatron.compat.initialize` act as in a plain torch loop, or give one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.compat.any_model import ModelEngine
from megatron.errors import ConfigError
from tests.unit.compat.any_model.test_initialize import ADAMW, BATCH, loss_of, make, take_step

HALVES = {"bf16": {"enabled": True}}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def test_a_layer_that_is_frozen_later_stays_as_it_is_and_one_that_is_trained_again_moves() -> None:
    model, plain = nn.Linear(10, 10), nn.Linear(10, 10)
    plain.load_state_dict(model.state_dict())
    engine, reference = make(model=model, optimizer=adamw(model), config=BATCH), adamw(plain)
    for step in range(5):
        for each in (model, plain):
            each.weight.requires_grad_(step not in (2, 3))
        take_step(engine, step)
        reference.zero_grad()
        loss_of(plain, step).backward()  # type: ignore[arg-type]
        reference.step()
        torch.testing.assert_close(model.weight, plain.weight, msg=f"after step {step}")


def load(engine: ModelEngine, weights: dict[str, torch.Tensor]) -> None:
    engine.load_state_dict({f"module.{name}": one for name, one in weights.items()})


def load_the_model(engine: ModelEngine, weights: dict[str, torch.Tensor]) -> None:
    engine.module.load_state_dict(weights)


def copy(engine: ModelEngine, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, one in engine.module.named_parameters():
            one.copy_(weights[name])


def replace(engine: ModelEngine, weights: dict[str, torch.Tensor]) -> None:
    for name, one in engine.module.named_parameters():
        one.data = weights[name]


@pytest.mark.parametrize("write", [load, load_the_model, copy, replace])
def test_weights_that_are_written_later_are_what_goes_on(
    write: Callable[[ModelEngine, dict[str, torch.Tensor]], None],
) -> None:
    """Training continues from the fp32 masters of half-precision weights, so a write must reach them."""
    engine = make(config={**BATCH, **ADAMW, **HALVES})
    take_step(engine)
    weights = {name: torch.full_like(one, 3.0) for name, one in engine.module.state_dict().items()}
    write(engine, weights)
    take_step(engine, 1)
    for one in engine.module.parameters():
        torch.testing.assert_close(one.float(), torch.full_like(one, 3.0).float(), atol=0.1, rtol=0)


def test_a_part_that_is_written_leaves_the_last_bits_of_the_others() -> None:
    bias = torch.zeros(10, dtype=torch.bfloat16)
    ours, untouched = (make(config={**BATCH, **ADAMW, **HALVES}) for _ in range(2))
    for step in range(6):
        for engine in (ours, untouched):
            take_step(engine, step)
            with torch.no_grad():
                if engine is ours:
                    engine.module.weight.copy_(engine.module.weight.clone())  # writes the same values
                    bias.copy_(engine.module.bias)
    assert torch.equal(ours.module.weight, untouched.module.weight) and torch.equal(bias, untouched.module.bias)


def read(engine: ModelEngine) -> None:
    engine.module.weight.grad.norm()


def read_weights(engine: ModelEngine) -> None:
    assert all(one.grad.isfinite() for one in engine.parameters())


def clip(engine: ModelEngine) -> None:
    nn.utils.clip_grad_norm_(engine.parameters(), 1.0)


def clip_values(engine: ModelEngine) -> None:
    nn.utils.clip_grad_value_(engine.module.parameters(), 1.0)


def scale(engine: ModelEngine) -> None:
    engine.module.bias.grad += 1


@pytest.mark.parametrize("config", [{}, HALVES], ids=["fp32", "bf16"])
@pytest.mark.parametrize("uses", [read, read_weights, clip, clip_values, scale])
def test_gradients_that_the_engine_keeps_are_no_none(
    uses: Callable[[ModelEngine], None], config: dict[str, object]
) -> None:
    engine = make(config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, **ADAMW, **config})
    engine.backward(loss_of(engine))
    with pytest.raises(ConfigError, match=r'parameter.grad: .* give "gradient_clipping" in the config') as error:
        uses(engine)
    assert "\n" not in str(error.value)


def test_stand_ins_for_gradients_lose_none() -> None:
    """Covers accumulated micro-batches, a loss beside the engine's, and programs that zero gradients."""
    found = []
    for disturbs in (False, True):
        engine = make(config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, **ADAMW})
        for seed in range(2):
            if disturbs:
                engine.optimizer.zero_grad(set_to_none=False)
                engine.module.zero_grad(set_to_none=False)
            losses = [loss_of(engine, seed), loss_of(engine, seed + 2) / 2]
            if disturbs:
                engine.backward(losses[0])
                losses[1].backward()
            else:
                engine.backward(losses[0] + 2 * losses[1])
            engine.step()
        found.append(engine.module.weight.clone())
    torch.testing.assert_close(*found)


def save_nowhere(engine: ModelEngine) -> None:
    engine.save_checkpoint(None)  # type: ignore[arg-type]


def load_nowhere(engine: ModelEngine) -> None:
    engine.load_checkpoint(3)  # type: ignore[arg-type]


def double_inputs(engine: ModelEngine) -> None:
    engine(torch.randn(4, 10).double())


def halve(engine: ModelEngine) -> None:
    engine.module.half()
    take_step(engine)


def halve_both(engine: ModelEngine) -> None:
    take_step(engine)
    engine.module.half()
    engine.backward(engine(torch.randn(4, 10).half()).mean())


SLIPS: dict[Callable[[ModelEngine], None], str] = {
    save_nowhere: "save_checkpoint: save_dir is None, which is not a path; give a directory",
    load_nowhere: "load_checkpoint: load_dir is 3, which is not a path; give a directory",
    double_inputs: r"engine\(x\): an input is float64, but the model is float32 .*; cast the input, as in x.float\(\)",
    halve: "the model was cast to float16 after megatron.compat.initialize.* set the precision in the config",
    halve_both: "the model was cast to float16 after megatron.compat.initialize",
}


@pytest.mark.parametrize("slips", SLIPS, ids=lambda slip: slip.__name__)
def test_what_torch_would_explain_in_other_words_is_one_line(slips: Callable[[ModelEngine], None]) -> None:
    with pytest.raises(ConfigError, match=SLIPS[slips]) as error:
        slips(make())
    assert "\n" not in str(error.value)


def thaw(engine: ModelEngine) -> None:
    engine.module.weight.requires_grad_(True)
    take_step(engine)


def another_group(engine: ModelEngine) -> None:
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    take_step(engine)


def another_engine(engine: ModelEngine) -> None:
    take_step(make(model=engine.module))


def by_columns(engine: ModelEngine) -> None:
    engine.module.weight.data = engine.module.weight.data.t().contiguous().t()
    take_step(engine)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (by_columns, "weight got another memory format after megatron.compat.initialize.*; remove the conversion"),
        (thaw, "weight was frozen when megatron.compat.initialize.* call initialize.. before you freeze it"),
        (another_group, r"add_param_group\(\): the engine has no gradient buffers .* give the optimizer all of them"),
        (another_engine, "bias was taken by an earlier engine of this model; use that engine"),
    ],
)
def test_what_would_train_nothing_is_refused(does: Callable[[ModelEngine], None], said: str) -> None:
    model = nn.Linear(10, 10)
    model.weight.requires_grad_(does is not thaw)
    with pytest.raises(ConfigError, match=said):
        does(make(model=model, optimizer=adamw(model), config=BATCH))


def complex_weights() -> nn.Module:
    model = nn.Linear(10, 10)
    model.phases = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def transposed_pair() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 10))
    model[1].weight.data = model[0].weight.data.t()
    return model


UNFIT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.LazyLinear(10), "weight has no values yet; run a lazy module once on a batch"),
    "meta": (lambda: nn.Linear(10, 10, device="meta"), "weight has no values yet"),
    "complex": (complex_weights, "phases is complex, .* make it a real parameter with a last dimension of 2"),
    "shared memory": (
        transposed_pair,
        "0.weight and 1.weight are two parameters that share memory, .* use one parameter",
    ),
    "an engine": (make, "model is an engine already; use that"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_model_that_cannot_be_trained_is_refused(name: str) -> None:
    model, said = UNFIT[name]
    with pytest.raises(ConfigError, match=said):
        make(model=model())


def test_parameters_that_are_all_frozen_are_refused() -> None:
    model = nn.Linear(10, 10).requires_grad_(False)
    for given in ({"model_parameters": list(model.parameters())}, {"optimizer": adamw(model), "config": BATCH}):
        with pytest.raises(ConfigError, match="nothing is trained"):
            make(model=model, **given)


def test_a_client_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, object] = {}
    state["again"] = state
    with pytest.raises(ConfigError, match="client_state: contains itself, or is nested more than"):
        make().save_checkpoint(tmp_path, client_state=state)
