"""--to megatron: the written tensors equal those of Megatron-LM's own layout, and come back bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.architecture import model_config
from megatron.cli import convert_checkpoint as convert_cli
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf import convert as hf_convert
from megatron.interop.megatron_lm import names as mapped
from megatron.interop.megatron_lm.megatron_args import settings_from_args, their_args
from megatron.interop.megatron_lm.write import TargetLayout, to_megatron
from megatron.model import rope
from megatron.torch_files import safe_load
from tests.helpers.megatron_lm import Layout, Model, rank_content, with_moments, write
from tests.helpers.other_programs import find_checkpoint
from tests.unit.checkpoint.support import one_process
from tests.unit.interop.megatron_lm.test_step import GPT2, LLAMA, MIXTRAL, MOE, check_weights, load, make, params_of


def convert(source: Path, target: Path, to: str, *flags: str) -> None:
    assert convert_cli.main(["--load", str(source), "--save", str(target), "--to", to, *flags]) == 0


def to_native(model: Model, tmp_path: Path, optimizer: str = "") -> Path:
    names = "core" if model.experts else "classic"
    write(tmp_path / "source", model, Layout(optimizer=optimizer, names=names))
    convert(tmp_path / "source", tmp_path / "native", "native", "--true-vocab-size", "300")
    return tmp_path / "native"


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, inner in tree.items() for key, value in flat(inner, f"{path}.{name}").items()}


def written(step: Path) -> dict[str, Any]:
    from argparse import Namespace

    return {
        path.parent.name: safe_load.load_file(path, allow=[Namespace])
        for path in sorted(step.glob("mp_rank_*/model_optim_rng.pt"))
    }


@pytest.mark.parametrize("names", ["classic", "core", "te"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("settings, moe", [(GPT2, None), (LLAMA, None), (MIXTRAL, MOE)])
def test_every_rank_has_what_megatron_gives_it(
    tmp_path: Path, settings: dict[str, Any], moe: dict[str, Any] | None, tp: int, pp: int, names: str
) -> None:
    if moe and names == "classic":
        return  # 23.06 has none
    model = make(settings, moe)
    native = to_native(model, tmp_path)
    flags = [
        f"--target-tensor-parallel-size={tp}",
        f"--target-pipeline-parallel-size={pp}",
        f"--megatron-names={names}",
    ]
    convert(native, tmp_path / "out", "megatron", *flags)
    for number, (rank, content) in enumerate(written(tmp_path / "out/release").items()):
        layout = Layout(tp, pp, names=names)
        expected, _ = rank_content(model, layout, number // pp, number % pp, 0, 0)
        theirs = {k: v for k, v in flat(expected["model"]).items() if isinstance(v, Tensor)}
        ours = flat(content["model"])
        assert set(ours) == set(theirs), rank
        for name, tensor in theirs.items():
            padding = tensor == 0.123  # the rows beyond the vocabulary
            assert torch.equal(torch.where(padding, 0, ours[name]), torch.where(padding, 0, tensor)), (rank, name)
        args = content["args"]
        assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (tp, pp)
        assert content["checkpoint_version"] == 3.0 and args.padded_vocab_size % (128 * tp) == 0
    params = params_of(settings, moe)
    load(tmp_path / "out", params, finetune=True)
    check_weights(params, model)


@pytest.mark.parametrize("names", ["classic", "core", "te"])
@pytest.mark.parametrize("optimizer", ["masters", "fp32"])
def test_the_optimizer_comes_back(tmp_path: Path, optimizer: str, names: str) -> None:
    dtype = torch.bfloat16 if optimizer == "masters" else torch.float32
    model = with_moments(make(GPT2, dtype=dtype))
    native = to_native(model, tmp_path, optimizer)
    flags = ["--target-tensor-parallel-size=2", "--target-pipeline-parallel-size=2", f"--megatron-names={names}"]
    convert(native, tmp_path / "out", "megatron", *flags)
    params = params_of(GPT2, dtype=dtype)
    loaded = load(tmp_path / "out", params)
    check_weights(params, model)
    assert loaded.optimizer is not None and loaded.optimizer_extra is not None
    assert (loaded.iteration, loaded.consumed_train_samples, loaded.optimizer_extra["step"]) == (500, 2000, 499)
    for name, held in loaded.optimizer.items():
        for kind, tensor in held.items():
            assert torch.equal(tensor, model.moments[name][kind]), (name, kind)


def test_a_hugging_face_model_goes_there_directly(tmp_path: Path) -> None:
    convert(to_native(make(LLAMA), tmp_path), tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "between", "native")
    flags = ["--target-tensor-parallel-size=2", "--megatron-names=core"]
    convert(tmp_path / "between", tmp_path / "expected", "megatron", *flags)
    before = set(tmp_path.iterdir())
    convert(tmp_path / "hf", tmp_path / "out", "megatron", *flags)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "out"}
    expected, found = (flat(written(tmp_path / name / "release")) for name in ("expected", "out"))
    assert list(found) == list(expected) and sum(isinstance(value, Tensor) for value in found.values()) > 20
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


YARN = {"position_embedding_type": "yarn", "yarn_factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
YARN |= {"yarn_original_max_position_embeddings": 8}
LLAMA3 = {"position_embedding_type": "rope", "use_rope_scaling": True, "rope_scaling_factor": 32.0}
POSITIONS: list[dict[str, Any]] = [
    YARN,
    {**YARN, "yarn_attention_factor": 1.3},
    LLAMA3,
    {**LLAMA3, "rope_low_freq_factor": 2.0, "rope_original_max_position": 64},
    {"position_embedding_type": "rope", "rotary_seq_len_interpolation_factor": 2.0, "rotary_base": 500},
    {"position_embedding_type": "rope", "rotary_percent": 0.5},
    {"position_embedding_type": "none"},
    {},
]


@pytest.mark.parametrize("settings", POSITIONS)
def test_positions_come_back(settings: dict[str, Any]) -> None:
    """Tests all of our names, and for YaRN also only those that Megatron-LM reads."""
    config = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=4, **settings)
    args = their_args(config, MoEConfig(), 300, tp=1, pp=1, others={})
    for names in (args, {name: value for name, value in args.items() if name not in ("yarn_factor", OURS_ALONE)}):
        back = model_config(settings_from_args(names, Path("args"))["model"])
        assert back.positions == config.positions and back.rope_scaling == config.rope_scaling
        assert rope.attention_factor(back) == pytest.approx(rope.attention_factor(config), abs=1e-14)
        assert torch.equal(rope.inverse_frequencies(back), rope.inverse_frequencies(config))
    assert args["use_rotary_position_embeddings"] == (args["position_embedding_type"] == "rope")


OURS_ALONE = "yarn_attention_factor"
GPT_OSS = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "position_embedding_type": "yarn"}
GPT_OSS |= {"yarn_rotary_scaling_factor": 32.0, "yarn_mscale": 2.0, "yarn_mscale_all_dim": 1.0}


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_yarn_of_theirs_is_read(percent: float) -> None:
    """Their YaRN rotates the whole head, whatever rotary_percent says."""
    config = model_config(settings_from_args({**GPT_OSS, "rotary_percent": percent}, Path("args"))["model"])
    assert rope.rotated_channels(config) == config.head_dim
    assert config.yarn_factor == 32.0
    assert rope.attention_factor(config) == pytest.approx((0.2 * math.log(32) + 1) / (0.1 * math.log(32) + 1))


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"yarn_rotary_scaling_factor": None}, "have YaRN positions but no yarn_rotary_scaling_factor"),
        (
            {"yarn_correction_range_round_to_int": False},
            "yarn_correction_range_round_to_int = False, which is not",
        ),
    ],
)
def test_yarn_that_is_not_built_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        settings_from_args(GPT_OSS | changed, Path("args"))


def test_what_megatron_computes_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native = to_native(make({**LLAMA, "use_rope_scaling": True, "rope_original_max_position": 64}), tmp_path)
    convert(native, tmp_path / "out", "megatron", "--megatron-names=core")
    assert (
        "no scaling of Llama 3 with other numbers than 1, 4 and 8192; with these weights it would compute"
        in capsys.readouterr().out
    )


ROPE = {"max_position_embeddings": 16, "position_embedding_type": "rope"}
PARALLEL, AFTER_NORM, TANH, OTHER_BASE = (
    {**ROPE, "use_parallel_residual": True},
    {**GPT2, "apply_residual_connection_post_layernorm": True},
    {**GPT2, "add_bias_linear": False, "openai_gelu": True},
    {**ROPE, "rotary_base": 500.0},
)


@pytest.mark.parametrize(
    "settings, names, told",
    [
        (PARALLEL, "core", "no parallel residual; with these weights it would compute other results"),
        (AFTER_NORM, "te", "no residual connection after the norm; with these weights it would"),
        (AFTER_NORM, "classic", None),
        (TANH, "core", "no tanh form of GELU without a bias; with these weights it would"),
        (TANH, "classic", None),
        (OTHER_BASE, "classic", "23.06 has no RoPE base other than 10000; for its later models"),
        (OTHER_BASE, "core", None),
    ],
)
def test_a_function_that_its_models_do_not_have_is_told(
    tmp_path: Path, settings: dict[str, Any], names: str, told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(to_native(make(settings), tmp_path), tmp_path / "out", "megatron", f"--megatron-names={names}")
    said = capsys.readouterr().out.replace("note: the optimizer", "")
    assert "note: " not in said if told is None else told in said


def test_yarn_for_a_part_of_the_head_is_told(tmp_path: Path) -> None:
    """A foreign model may have it, but Megatron-LM does not."""
    native = to_native(make({**ROPE, "rotary_percent": 0.67}), tmp_path)
    found = find_checkpoint(native, parallel=one_process(), log=lambda text: None)
    assert found is not None
    model = {**found.manifest.config["model"], "position_embedding_type": "yarn", "yarn_factor": 4.0}
    found = replace(found, manifest=replace(found.manifest, config={**found.manifest.config, "model": model}))
    said: list[str] = []
    to_megatron(found, tmp_path / "out", TargetLayout(names="core"), log=said.append)
    assert any(
        "no YaRN for a part of the head; with these weights it would compute other results" in line for line in said
    )


@pytest.mark.parametrize("settings, told", [(GPT2, True), (LLAMA, False)])
def test_the_bias_that_their_later_routers_have_is_told(
    tmp_path: Path, settings: dict[str, Any], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Routers of 0.16 have a bias if linear layers have one; those of 0.14 and ours have none."""
    convert(to_native(make(settings, MOE), tmp_path), tmp_path / "out", "megatron", "--megatron-names=core")
    assert ("to load these weights there, add zeros as mlp.router.bias" in capsys.readouterr().out) is told


def test_core_models_know_the_tanh_form_by_the_fusion_alone(tmp_path: Path) -> None:
    """Core models ignore openai_gelu."""
    native = to_native(make({**GPT2, "openai_gelu": True, "bias_gelu_fusion": False}), tmp_path)
    for names, fused in (("classic", False), ("core", True)):
        convert(native, tmp_path / names, "megatron", f"--megatron-names={names}")
        (content,) = written(tmp_path / names / "release").values()
        assert content["args"].bias_gelu_fusion is fused


def test_a_model_without_a_place_there_is_refused(tmp_path: Path) -> None:
    after = {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_scope": "all"}
    for settings, moe, way_out in ((LLAMA | after, None, "give --to hf"), (MIXTRAL, MOE, "give --megatron-names core")):
        model = make(settings, moe)
        parameter = next(one for one in model.weights if ".attention_output_layernorm" in one or ".router." in one)
        assert mapped.their_name(parameter, "classic", 0, None, with_experts=moe is not None) is None
        config, experts = SimpleNamespace(num_layers=4), SimpleNamespace(expert_layers=lambda count: [0])
        row = SimpleNamespace(name=parameter, layer=0, expert=None)
        with pytest.raises(ConfigError, match=f"Megatron-LM has no name for .* among its classic names; {way_out}"):
            TargetLayout().name_of(row, 0, config, experts)  # type: ignore[arg-type]


def test_core_makes_the_output_projection_first(tmp_path: Path) -> None:
    """The order of parameters numbers the entries of the optimizer."""
    convert(to_native(make(GPT2), tmp_path), tmp_path / "out", "megatron", "--megatron-names=te")
    (content,) = written(tmp_path / "out/release").values()
    assert [name for name in content["model"] if ".layers.0." in name and name.endswith("weight")] == [
        f"decoder.layers.0.{name}weight"
        for name in (
            "self_attention.linear_proj.",
            "self_attention.linear_qkv.layer_norm_",
            "self_attention.linear_qkv.",
            "mlp.linear_fc1.layer_norm_",
            "mlp.linear_fc1.",
            "mlp.linear_fc2.",
        )
    ]


@pytest.mark.parametrize("ours", sorted(mapped._IN_LAYER))
def test_a_wrong_entry_of_the_map_is_seen(tmp_path: Path, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: two of our modules are swapped in the map, so the ranks' files differ from Megatron-LM's."""
    model = make(MIXTRAL, MOE)
    native = to_native(model, tmp_path)
    table = dict(mapped._IN_LAYER)
    other = next((n for n in table if n != ours and n.rpartition(".")[2] == ours.rpartition(".")[2]), "input_layernorm")
    if ours == other:
        other = "post_attention_layernorm"
    table[ours], table[other] = table[other], table[ours]
    monkeypatch.setattr(mapped, "_IN_LAYER", table)
    convert(native, tmp_path / "out", "megatron", "--megatron-names=core")
    (content,) = written(tmp_path / "out/release").values()
    expected, _ = rank_content(model, Layout(names="core"), 0, 0, 0, 0)
    theirs = {k: v for k, v in flat(expected["model"]).items() if isinstance(v, Tensor) and "embed" not in k}
    found = flat(content["model"])
    assert any(
        name not in found or not torch.equal(found[name], t) for name, t in theirs.items() if "output" not in name
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--to", "megatron", "--target-tensor-parallel-size=3"],
            "3: does not divide the model's 4 groups of heads; give 2 or 4",
        ),
        (
            ["--to", "megatron", "--target-pipeline-parallel-size=3"],
            "3: does not divide the model's 4 layers; give 2 or 4",
        ),
        (["--to", "megatron", "--target-pipeline-parallel-size=0"], "0 is less than 1"),
        (["--to", "hf", "--target-tensor-parallel-size=2"], "has no effect without --to megatron"),
        (["--to", "hf", "--true-vocab-size=2"], "has no effect without --from megatron"),
        (["--to", "megatron", "--target-expert-parallel-size", "2"], "writes all experts for expert-parallel size 1"),
        (
            ["--model-type=GPT", "--loader", "mcore", "--saver", "core"],
            "--model-type, --loader, --saver: flags of Megatron-LM's converter; run: python "
            "tools/convert_checkpoint.py --to megatron --megatron-names core --load DIR --save DIR",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    native = to_native(make(GPT2), tmp_path)
    assert convert_cli.main(["--load", str(native), "--save", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--target-tensor-parallel-size=3", "3: does not divide the model's"),
        ("--target-pipeline-parallel-size=3", "3: does not divide the model's 4 layers"),
        ("--megatron-names=classic", "among its classic names"),
    ],
)
def test_a_hugging_face_model_is_refused_before_it_is_converted(
    tmp_path: Path, flag: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    model = make(LLAMA, experts if "names" in flag else None)
    convert(to_native(model, tmp_path), tmp_path / "hf", "hf")
    converted: list[object] = []
    monkeypatch.setattr(hf_convert, "import_weights", lambda *given: converted.append(given))
    before = set(tmp_path.iterdir())
    code = convert_cli.main(["--load", str(tmp_path / "hf"), "--save", str(tmp_path / "out"), "--to", "megatron", flag])
    assert not converted, "what is refused was converted first"
    assert code == 2 and message in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before
