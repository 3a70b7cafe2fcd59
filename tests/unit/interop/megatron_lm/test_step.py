"""Checkpoints of Megatron-LM of every version, generation of names and layout give the same model, bit for bit."""

from __future__ import annotations

import enum
import sys
import types
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.run_state import LoadedState, Sharded
from megatron.cli import convert_checkpoint as convert_cli
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError
from megatron.model.parameters import parameters
from megatron.state.shard import Shard
from tests.helpers.megatron_lm import Layout, Model, with_moments, write
from tests.helpers.other_programs import find_checkpoint
from tests.unit.checkpoint.support import load as load_own
from tests.unit.checkpoint.support import make_state, one_process, save

VOCABULARY, LAYERS = 300, 4
GPT2: dict[str, Any] = {"max_position_embeddings": 16}
LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "group_query_attention": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "bias_gelu_fusion": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "max_position_embeddings": 16,
    "ffn_hidden_size": 32,
    "norm_epsilon": 1e-6,
}
MIXTRAL = {**LLAMA, "qk_layernorm": True}
MOE = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 24}


def make(settings: dict[str, Any], moe: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """Makes all weights with std 0.2, so that any swap of rows or tensors shows."""
    config = ModelConfig(num_layers=LAYERS, hidden_size=24, num_attention_heads=4, **settings)
    experts = MoEConfig(**(moe or {}))
    draw = torch.Generator().manual_seed(1)
    table = parameters(config, VOCABULARY, experts)
    args = {"num_layers": LAYERS, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 1}
    args |= {"kv_channels": 6, "layernorm_epsilon": config.norm_epsilon, **settings, **(moe or {})}
    args.pop("norm_epsilon", None)
    weights = {n: (torch.randn(p.stored_shape, generator=draw) * 0.2).to(dtype) for n, p in table.items()}
    return Model(
        weights=weights,
        layers=LAYERS,
        heads=4,
        groups=config.query_groups,
        width=config.head_dim,
        gated=config.gated,
        tied=config.tied,
        experts=experts.num_experts or 0,
        args=args,
    )


def params_of(
    settings: dict[str, Any], moe: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Sharded]:
    """Parameters of a run with the same model, filled with another value."""
    config = ModelConfig(num_layers=LAYERS, hidden_size=24, num_attention_heads=4, **settings)
    table = parameters(config, VOCABULARY, MoEConfig(**(moe or {})))
    return {
        name: (
            Shard(name, each.shape, each.row.split_dim or 0, fold=each.row.fold),
            torch.nn.Parameter(torch.full(each.stored_shape, 5.0, dtype=dtype)),
        )
        for name, each in table.items()
    }


def load(directory: Path, params: dict[str, Sharded], **options: Any) -> LoadedState:
    found = find_checkpoint(directory, parallel=one_process(), log=lambda text: None)
    assert found is not None
    return load_checkpoint(found, parallel=one_process(), params=params, log=lambda text: None, **options)


def check_weights(params: dict[str, Sharded], model: Model) -> None:
    for name, (_, tensor) in params.items():
        assert torch.equal(tensor, model.weights[name]), name


@pytest.mark.parametrize("version", [None, 0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2), Layout(tp=4, pp=2, vpp=2), Layout(pp=4)])
def test_every_version_and_layout(tmp_path: Path, version: float | None, layout: Layout) -> None:
    model = make(GPT2)
    write(tmp_path, model, Layout(layout.tp, layout.pp, layout.vpp, version=version))
    params = params_of(GPT2)
    loaded = load(tmp_path, params, finetune=True)
    assert loaded.iteration == 0 and loaded.step == 500
    check_weights(params, model)


@pytest.mark.parametrize("names", ["classic", "core", "te"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, vpp=2)])
def test_every_generation_of_names(tmp_path: Path, names: str, layout: Layout) -> None:
    model = make(LLAMA)
    write(tmp_path, model, Layout(layout.tp, layout.pp, layout.vpp, names=names))
    params = params_of(LLAMA)
    load(tmp_path, params, finetune=True)
    check_weights(params, model)


@pytest.mark.parametrize("names", ["core", "te"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, ep=2), Layout(pp=2, ep=4)])
def test_experts(tmp_path: Path, names: str, layout: Layout) -> None:
    model = make(MIXTRAL, MOE)
    write(tmp_path, model, Layout(layout.tp, layout.pp, ep=layout.ep, names=names))
    params = params_of(MIXTRAL, MOE)
    load(tmp_path, params, finetune=True)
    check_weights(params, model)


@pytest.mark.parametrize("names", ["classic", "te"])
@pytest.mark.parametrize("version", [0, 3.0])
@pytest.mark.parametrize("optimizer", ["masters", "fp32", "distributed", "aligned"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, vpp=2)])
def test_the_optimizer_comes_too(tmp_path: Path, layout: Layout, optimizer: str, version: float, names: str) -> None:
    dtype = torch.float32 if optimizer == "fp32" else torch.bfloat16
    model = with_moments(make(GPT2, dtype=dtype))
    write(tmp_path, model, Layout(layout.tp, layout.pp, layout.vpp, names=names, version=version, optimizer=optimizer))
    params = params_of(GPT2, dtype=dtype)
    loaded = load(tmp_path, params)
    check_weights(params, model)
    assert (loaded.iteration, loaded.consumed_train_samples, loaded.rng) == (500, 2000, None)
    assert loaded.optimizer is not None and loaded.optimizer_extra is not None and loaded.scheduler is not None
    assert loaded.optimizer_extra["step"] == 499 and loaded.scheduler["max_lr"] == 1e-3
    assert bool(loaded.optimizer_extra["loss_scaler"]) == (optimizer == "masters")
    kinds = {"exp_avg", "exp_avg_sq"} | ({"master"} if optimizer != "fp32" else set())
    for name, held in loaded.optimizer.items():
        assert set(held) == kinds, name
        for kind, tensor in held.items():
            assert torch.equal(tensor, model.moments[name][kind]), (name, kind)


@pytest.mark.parametrize("names", ["core", "te"])
@pytest.mark.parametrize("optimizer", ["masters", "fp32", "aligned"])
@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(tp=2, pp=2, vpp=2, ep=4)])
def test_the_optimizer_of_experts_comes_too(tmp_path: Path, layout: Layout, optimizer: str, names: str) -> None:
    """Expert parallelism has a list of two optimizers; one expert rank's file has the dense one's vectors."""
    dtype = torch.float32 if optimizer == "fp32" else torch.bfloat16
    model = with_moments(make(MIXTRAL, MOE, dtype))
    write(tmp_path, model, replace(layout, names=names, optimizer=optimizer))
    params = params_of(MIXTRAL, MOE, dtype)
    loaded = load(tmp_path, params)
    check_weights(params, model)
    assert loaded.optimizer is not None and loaded.optimizer.keys() == model.weights.keys()
    for name, held in loaded.optimizer.items():
        assert ("master" in held) == (optimizer != "fp32")
        for kind, tensor in held.items():
            assert torch.equal(tensor, model.moments[name][kind]), (name, kind)


@pytest.mark.parametrize("optimizer", ["fp32", "aligned"])
def test_two_optimizers_of_the_same_parameters_are_refused(tmp_path: Path, optimizer: str) -> None:
    dtype = torch.float32 if optimizer == "fp32" else torch.bfloat16
    write(tmp_path, with_moments(make(GPT2, dtype=dtype)), Layout(optimizer=optimizer))
    for name in ("model_optim_rng.pt", "distrib_optim.pt")[: 1 + (optimizer == "aligned")]:
        file = tmp_path / "iter_0000500/mp_rank_00" / name
        content = torch.load(file, weights_only=False)
        torch.save(
            [content] * 2 if "optimizer" not in content else {**content, "optimizer": [content["optimizer"]] * 2}, file
        )
    with pytest.raises(CheckpointError, match=r"divide the parameters in an unknown way.*--no-load-optim"):
        load(tmp_path, params_of(GPT2, dtype=dtype))


def test_a_vector_of_several_buckets_is_refused_by_name(tmp_path: Path) -> None:
    """The vector has fewer elements than one bucket would; the start of the second bucket is unknown."""
    write(tmp_path, with_moments(make(GPT2, dtype=torch.bfloat16)), Layout(optimizer="aligned"))
    file = tmp_path / "iter_0000500/mp_rank_00/distrib_optim.pt"
    content = torch.load(file, weights_only=False)
    (vectors,) = content[0].values()
    vectors["numel_unpadded"] -= 1
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"has several buckets, whose order is unknown.*--no-load-optim"):
        load(tmp_path, params_of(GPT2, dtype=torch.bfloat16))


def test_every_tensor_and_position_counts(tmp_path: Path) -> None:
    """Changing one element of one rank's file changes just that place: no part is read twice or left out."""
    model = make(LLAMA)
    write(tmp_path, model, Layout(tp=2, pp=2, names="te"))
    file = tmp_path / "iter_0000500/mp_rank_01_001/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    for name, tensor in content["model"].items():
        if isinstance(tensor, Tensor):
            before = tensor.view(-1)[0].clone()
            tensor.view(-1)[0] += 1
            torch.save(content, file)
            params = params_of(LLAMA)
            load(tmp_path, params, finetune=True)
            changed = [n for n, (_, t) in params.items() if not torch.equal(t, model.weights[n])]
            replicated = "norm" in name
            assert len(changed) == (0 if replicated else 1), (name, changed)
            assert all(int((params[n][1] != model.weights[n]).sum()) == 1 for n in changed)
            tensor.view(-1)[0] = before


def test_the_vocabulary_may_be_padded_otherwise(tmp_path: Path) -> None:
    model = make(GPT2)
    write(tmp_path, model, Layout(tp=2, pad_to=64))
    params = params_of(GPT2)
    name = "embedding.word_embeddings.weight"
    wide = torch.ones(512, 24)
    params[name] = (params[name][0], wide)
    load(tmp_path, params, finetune=True)
    assert torch.equal(wide[:VOCABULARY], model.weights[name]) and not wide[VOCABULARY:].any()


def test_files_of_torch_before_its_zip_format(tmp_path: Path) -> None:
    model = make(GPT2)
    write(tmp_path, model, Layout(version=None))
    file = tmp_path / "iter_0000500/mp_rank_00/model_optim_rng.pt"
    torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    params = params_of(GPT2)
    load(tmp_path, params, finetune=True)
    check_weights(params, model)


def test_classes_of_another_program_are_neither_imported_nor_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("some_program.enums")

    class ModelType(enum.Enum):
        encoder_or_decoder = 1

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "called",)

    ModelType.__module__, ModelType.__qualname__ = module.__name__, "ModelType"
    module.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_program", types.ModuleType("some_program"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = make(GPT2)
    args = {**model.args, "model_type": ModelType.encoder_or_decoder, "bomb": Bomb()}
    write(tmp_path, Model(**{**vars(model), "args": args}), Layout())
    monkeypatch.delitem(sys.modules, module.__name__)
    params = params_of(GPT2)
    load(tmp_path, params, finetune=True)
    check_weights(params, model)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"checkpoint_version": 7}, r"checkpoint_version 7; supported: 0 to 3"),
        ({"checkpoint_version": "3"}, r"checkpoint_version 3; supported: 0 to 3"),
        ({"model": {}}, r"its files have 0"),
        ({"model": {"language_model": {"encoder": {"layers.0.x": 1}}}}, "has an entry layers.0.x that is not a tensor"),
        ({"args": Namespace(hidden_size=24)}, "its args have no num_layers, num_attention_heads"),
        ({"args": None}, "its args have no num_layers"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, make(GPT2), Layout(), changes=changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, params_of(GPT2), finetune=True)


@pytest.mark.parametrize(
    "args, message",
    [
        ({"num_layers": 5}, "its args have 5 layers, but its files have 4"),
        ({"num_layers": 1000}, "its args have 1000 layers"),
        ({"num_layers": 10**9}, "--num-layers 1000000000: out of range"),
        ({"hidden_size": 48}, "has shape .* on a rank, but its args describe"),
        ({"multi_latent_attention": True}, "multi_latent_attention = True, which is not supported"),
        ({"swiglu": True}, "mlp.dense_h_to_4h.weight has shape"),
        ({"add_bias_linear": False}, "tensors that its args do not describe"),
        ({"qk_layernorm": True}, "has no layers.0.self_attention.q_layernorm.weight"),
        ({"tensor_model_parallel_size": 2}, "is incomplete: its args have TP 2"),
    ],
)
def test_args_that_contradict_the_tensors_are_refused(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    model = make(GPT2)
    write(tmp_path, Model(**{**vars(model), "args": {**model.args, **args}}), Layout())
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, params_of(GPT2), finetune=True)


def test_another_model_than_that_of_the_run_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, make(LLAMA), Layout())
    ours = ModelConfig(num_layers=LAYERS, hidden_size=24, num_attention_heads=4, **{**LLAMA, "rotary_base": 5e5})
    with pytest.raises(CheckpointError, match=r"--rotary-base: checkpoint 10000.0, this run 500000.0"):
        load(tmp_path, params_of(LLAMA), model_config=ours, load_optim=False)


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    write(tmp_path, make(GPT2), Layout(tp=2, pp=2))
    folder = tmp_path / "iter_0000500/mp_rank_01_000"
    (folder / "model_optim_rng.pt").unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError, match=r"is incomplete: it has 3 of the 4 folders of TP 2, PP 2"):
        load(tmp_path, params_of(GPT2), finetune=True)


def test_without_an_optimizer_the_way_out_is_named(tmp_path: Path) -> None:
    write(tmp_path, make(GPT2), Layout())
    with pytest.raises(CheckpointError, match=r"without its optimizer state; give --no-load-optim"):
        load(tmp_path, params_of(GPT2))


def test_an_optimizer_of_unknown_order_is_refused_by_name(tmp_path: Path) -> None:
    model = with_moments(make(GPT2))
    write(tmp_path, model, Layout(optimizer="fp32"))
    file = tmp_path / "iter_0000500/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["optimizer"]["param_groups"][0]["params"].pop()
    torch.save(content, file)
    with pytest.raises(
        CheckpointError,
        match=r"optimizer's state cannot be read \(a parameter group does not have the expected \d+ parameters",
    ):
        load(tmp_path, params_of(GPT2))
    params = params_of(GPT2)
    load(tmp_path, params, load_optim=False)
    check_weights(params, model)


def test_our_own_step_without_its_manifest_is_not_taken_for_foreign(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    (tmp_path / "iter_0000010/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_own(tmp_path, finetune=True)


@pytest.mark.parametrize("optimizer", ["", "fp32"])
def test_conversion_to_a_native_checkpoint_keeps_every_bit(
    tmp_path: Path, optimizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_moments(make(GPT2))
    write(tmp_path / "theirs", model, Layout(tp=2, pp=2, version=1.0, optimizer=optimizer))
    command = ["--load", str(tmp_path / "theirs"), "--to", "native", "--save", str(tmp_path / "ours")]
    assert convert_cli.main([*command, "--true-vocab-size", str(VOCABULARY)]) == 0
    assert "vocabulary 300; train on with --load and --" in capsys.readouterr().out
    params = params_of(GPT2)
    loaded = load(tmp_path / "ours", params, finetune=not optimizer, load_rng=False)
    check_weights(params, model)
    for name, held in (loaded.optimizer or {}).items():
        for kind, tensor in held.items():
            assert torch.equal(tensor, model.moments[name][kind]), (name, kind)


def test_a_wrong_true_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, make(GPT2), Layout())
    command = ["--load", str(tmp_path), "--to", "native", "--save", str(tmp_path / "out")]
    assert convert_cli.main([*command, "--true-vocab-size", "385"]) == 2
    assert "has 384 rows; give 1 to 384" in capsys.readouterr().err
