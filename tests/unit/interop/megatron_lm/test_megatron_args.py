"""Settings in a Megatron-LM checkpoint's `args` that define the model, beside the shapes of its tensors. A setting is
read under any of its names, and an unsupported one is rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm import open_foreign
from megatron.interop.megatron_lm.megatron_args import their_args, true_vocabulary
from megatron.model.parameters import HEAD_TABLE, WORD_TABLE
from tests.helpers.megatron_lm import Layout, Model, write
from tests.helpers.torch_dist import write as write_dist
from tests.unit.interop.megatron_lm.test_step import GPT2, LLAMA, MIXTRAL, MOE, VOCABULARY, make

Write = Callable[[Path, Model], Path]


def tree(directory: Path, model: Model) -> Path:
    write(directory, model, Layout(names="core"))
    return directory / "iter_0000500"


FORMS = pytest.mark.parametrize("form", [tree, write_dist])


def with_args(model: Model, args: dict[str, Any]) -> Model:
    return replace(model, args={**model.args, **args})


@FORMS
def test_gains_stored_less_one_are_known_under_the_later_name(tmp_path: Path, form: Write) -> None:
    """`--apply-layernorm-1p` is `layernorm_zero_centered_gamma` in the args of newer versions."""
    step = open_foreign(form(tmp_path, with_args(make(GPT2), {"layernorm_zero_centered_gamma": True})))
    assert step is not None and step.manifest.config["model"]["apply_layernorm_1p"] is True


@pytest.mark.parametrize("names, kept", [("classic", True), ("core", False), ("te", False), ("torch_dist", False)])
def test_what_core_models_do_not_look_at_is_left_out(tmp_path: Path, names: str, kept: bool) -> None:
    """Core models add the residual before the norm and use erf in unfused GELU, whatever these args say."""
    set_ = {"apply_residual_connection_post_layernorm": True, "openai_gelu": True, "bias_gelu_fusion": False}
    model = with_args(make(GPT2), set_)
    if names == "torch_dist":
        write_dist(tmp_path, model)
    else:
        write(tmp_path, model, Layout(names=names))
    step = open_foreign(tmp_path / "iter_0000500")
    assert step is not None
    for name in ("apply_residual_connection_post_layernorm", "openai_gelu"):
        assert step.manifest.config["model"][name] is kept


@pytest.mark.parametrize(
    "args",
    [
        {"layernorm_zero_centered_gamma": True, "apply_layernorm_1p": False},
        {"layernorm_epsilon": 1e-5, "norm_epsilon": 1e-6},
    ],
)
def test_two_names_of_a_setting_that_disagree_are_refused(tmp_path: Path, args: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"its args have {' and '.join(f'{n} = {v}' for n, v in args.items())}"):
        open_foreign(tree(tmp_path, with_args(make(GPT2), args)))


@pytest.mark.parametrize(
    "name, value",
    [
        ("activation_func_clamp_value", 7.0),
        ("enable_hyper_connections", True),
        ("glu_linear_offset", 1.0),
        ("moe_apply_probs_on_input", True),
        ("moe_expert_rank_capacity_factor", 2.0),
        ("moe_mlp_glu_interleave_size", 32),
        ("moe_n_hash_layers", 1),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["sinkhorn", "aux_loss"]),
        ("moe_router_topk_limited_devices", 2),
        ("moe_shared_expert_glu_interleave_size", 32),
        ("qk_l2_norm", True),
        ("rotary_base_per_layer", [10000.0, 10000.0, 10000.0, 1000000.0]),
        ("softmax_scale", 0.5),
        ("use_mup", True),
        ("window_attn_skip_freq", 4),
        ("window_attn_skip_freq", [1, 1, 1, 0]),
    ],
)
def test_settings_without_parameters_that_are_not_built_here_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    model = make(MIXTRAL, MOE)
    with pytest.raises(CheckpointError, match=f"its args have {name} = .*, which is not supported"):
        open_foreign(write_dist(tmp_path, with_args(model, {name: value})))


@pytest.mark.parametrize(
    "args",
    [
        {"moe_router_load_balancing_type": "seq_aux_loss"},
        {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]},
        {"softmax_scale": None, "use_mup": False, "glu_linear_offset": 0.0, "moe_n_hash_layers": 0},
    ],
)
def test_their_values_that_change_nothing_are_taken(tmp_path: Path, args: dict[str, Any]) -> None:
    assert open_foreign(write_dist(tmp_path, with_args(make(MIXTRAL, MOE), args))) is not None


@FORMS
@pytest.mark.parametrize(
    "args, rows",
    [
        ({"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1}, VOCABULARY),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY, "null_tokenizer_eod_id": 3}, VOCABULARY),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_size": VOCABULARY}, VOCABULARY),
    ],
)
def test_the_end_of_document_of_numbers_has_a_row(tmp_path: Path, form: Write, args: dict[str, Any], rows: int) -> None:
    """NullTokenizer has one id more than its --vocab-size."""
    step = open_foreign(form(tmp_path, with_args(make(GPT2), args)))
    assert step is not None
    assert step.manifest.config["tokenizer"]["vocab_size"] == rows
    assert step.manifest.model[WORD_TABLE].logical_shape[0] == rows


def test_numbers_have_as_many_rows_after_a_way_there_and_back() -> None:
    config = ModelConfig(num_layers=4, hidden_size=24, num_attention_heads=4, **GPT2)
    args = their_args(config, MoEConfig(), VOCABULARY, tp=1, pp=1, others={"tokenizer_type": "NullTokenizer"})
    assert args["vocab_size"] == VOCABULARY - 1 and true_vocabulary(args, args["padded_vocab_size"]) == VOCABULARY


@FORMS
def test_a_head_that_the_args_do_not_know_is_not_dropped(tmp_path: Path, form: Write) -> None:
    """The args tie the head, but the files have a separate one."""
    model = with_args(make(LLAMA), {"untie_embeddings_and_output_weights": False})
    with pytest.raises(CheckpointError, match=f"tensors that its args do not describe: {HEAD_TABLE}"):
        open_foreign(form(tmp_path, model))


@FORMS
def test_a_router_with_a_bias_is_refused_by_name(tmp_path: Path, form: Write) -> None:
    """Later versions give routers a bias if linear layers have one."""
    model = make(GPT2, MOE)
    bias = {f"layers.{n}.mlp.router.bias": torch.ones(4) for n in range(4)}
    with pytest.raises(
        CheckpointError, match=r"its routers have a bias, (decoder\.)?layers\.(0\.)?mlp\.router\.bias, .* supported"
    ):
        open_foreign(form(tmp_path, replace(model, weights={**model.weights, **bias})))


def test_the_copy_of_the_head_on_a_last_stage_is_known(tmp_path: Path) -> None:
    write(tmp_path, make(GPT2), Layout(pp=2, names="core"))
    step = open_foreign(tmp_path / "iter_0000500")
    assert step is not None and HEAD_TABLE not in step.manifest.model


def test_another_table_than_the_first_stage_has_is_no_copy(tmp_path: Path) -> None:
    """A last stage's own head would be dropped if the args tie it."""
    write(tmp_path, with_args(make(LLAMA), {"untie_embeddings_and_output_weights": False}), Layout(pp=2, names="core"))
    with pytest.raises(
        CheckpointError, match=f"its {HEAD_TABLE} differs from its token embedding, but its args state that they are"
    ):
        open_foreign(tmp_path / "iter_0000500")


# ---------------------------------------------------------------- counters


SCALER = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}


def counters(folder: Path) -> dict[str, Any]:
    step = open_foreign(folder)
    assert step is not None
    found: dict[str, Any] = step.reader.main_file()["optimizer"]["extra"]
    return found


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize(
    "counted",
    [
        {"state": {"common_step": torch.tensor(417.0)}, "param_groups": [{"params": []}]},
        {"state": {"common_step": 417}, "param_groups": [{"params": []}]},
        {"state": {}, "param_groups": [{"params": [], "step": torch.tensor([417], dtype=torch.int32)}]},
        {"state": {}, "param_groups": [{"params": [], "step": 417}]},
    ],
)
def test_updates_and_the_loss_scale_are_found_wherever_they_are_kept(
    tmp_path: Path, counted: dict[str, Any], chained: bool, common: bool
) -> None:
    """Covers one optimizer or a chain, in a separate file or in entries of the metadata. With fp16, updates are fewer
    than iterations."""
    one = {"optimizer": counted, "grad_scaler": SCALER}
    folder = write_dist(tmp_path, make(GPT2), common=common, state={0: one, 1: one} if chained else one)
    found = counters(folder)
    assert found["step"] == 417 and found["loss_scaler"] == SCALER
