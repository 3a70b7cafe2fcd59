"""tools/check_layout.py: equal layouts exit with 0, planted mistakes with 1 and a name, and nothing else passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RunConfig, check, check_world, parse_args
from megatron.errors import ConfigError
from megatron.training.check_layout import PLANTED, main
from megatron.training.layout_settings import changes, is_large, ranks_of, reproducible, shrink
from megatron.training.planted import PLANTS
from tests.helpers.kernels import backend
from tests.helpers.runs import LLAMA_SHAPE, REPOSITORY, flags

Capture = pytest.CaptureFixture[str]

SMALL: dict[str, Any] = {"num_layers": 4, "micro_batch_size": 1, "lr_warmup_iters": 3, "num_workers": 1}
LLAMA: dict[str, Any] = {
    **LLAMA_SHAPE,
    "num_query_groups": 1,
}
MIXTURE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 16, "global_batch_size": 16}


def check_layout(*options: str, **changed: Any) -> int:
    return main([*options, "--", *flags(**{**SMALL, **changed})])


EQUAL: dict[str, dict[str, Any]] = {
    "tensor 2 x data 2 on 4 ranks": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
    "tensor 2 x pipeline 2 x data 2 on 8 ranks": {
        **LLAMA,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
    },
    "context 2 x data 2 on 4 ranks": {"context_parallel_size": 2, "recompute_granularity": "selective"},
    "expert 2 x data 4 on 4 ranks": {**MIXTURE, "expert_model_parallel_size": 2},
    "data 2 on 2 ranks": {"overlap_grad_reduce": True, "fp16": True},
}


@pytest.mark.parametrize("layout", EQUAL)
def test_equal_layouts(layout: str, capsys: Capture) -> None:
    assert check_layout(**EQUAL[layout]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{layout}, and one process: 3 steps on the CPU, in fp64, without dropout")
    assert "EQUAL within 1e-10" in said
    for kind in ("loss", "gradient norm", "gradient", "weight"):
        shown = re.search(rf"^  {kind} +(\S+)  \(", said, re.MULTILINE)
        assert shown is not None and float(shown[1]) < 1e-11, said


SEEN: dict[str, tuple[dict[str, Any], str]] = {
    "no-gradient-reduction": ({"tensor_model_parallel_size": 2}, "gradient of embedding.word_embeddings.weight"),
    "no-replica-sum": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "position_embeddings.weight"),
    "one-weight-off": ({"pipeline_model_parallel_size": 2}, "embedding.word_embeddings.weight"),
    "lost-token": ({"pipeline_model_parallel_size": 2}, "gradient of embedding.word_embeddings.weight"),
}


def test_every_plant_is_tried_and_offered() -> None:
    assert tuple(PLANTS) == PLANTED == tuple(SEEN)


@pytest.mark.parametrize("plant", SEEN)
def test_a_planted_mistake_is_found_and_named(plant: str, capsys: Capture) -> None:
    changed, named = SEEN[plant]
    assert check_layout("--plant", plant, "--steps", "1", **changed) == 1
    said = capsys.readouterr().out
    verdict = said.splitlines()[-1]
    assert f"planted on purpose: {plant}" in said and verdict.startswith("DIFFERENT") and named in verdict, said


def test_a_mistake_without_effect_is_refused_and_does_not_pass(capsys: Capture) -> None:
    assert check_layout("--plant", "no-replica-sum", tensor_model_parallel_size=2) == 2
    assert "this layout has nothing to break so" in capsys.readouterr().err


def test_a_tolerance_below_rounding_fails(capsys: Capture) -> None:
    assert check_layout("--tolerance", "1e-18", tensor_model_parallel_size=2) == 1
    assert "DIFFERENT beyond 1e-18: first the gradient of " in capsys.readouterr().out


# A script of one's own, and what goes wrong in it.

SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import torch
from pretrain_gpt import model_provider
import pretrain_gpt
import torch.distributed as dist
from megatron.errors import DataError

HOW = "none"

class Numbers:
    def __len__(self): return 100
    def __getitem__(self, n): return {{"x": torch.full((4,), float(n))}}

def datasets_provider(run, wanted):
    return Numbers(), None, None

def model_provider(run):
    return torch.nn.Linear(4, 1)

def forward_step(model, batch):
    if HOW == "kill" and dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "data" and dist.is_initialized() and dist.get_rank() == 1:
        raise DataError("planted data error")
    x = batch["x"].to(next(model.parameters()).dtype) / 100
    share = 1.0 if HOW != "rank" or not dist.is_initialized() else 1.0 + dist.get_rank()
    return (model(x) ** 2).sum() * share, torch.tensor(len(x))
"""


@pytest.mark.parametrize(
    ("how", "code", "named"),
    [
        ("none", 0, "EQUAL within"),
        ("rank", 1, "DIFFERENT beyond 1e-10: first the gradient of weight"),
        ("kill", 17, "check_layout.py: rank 1 was killed (SIGKILL)"),
        ("data", 11, "check_layout.py: rank 1: planted data error"),
    ],
)
def test_a_script_of_ones_own(how: str, code: int, named: str, tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "pretrain_mine.py"
    script.write_text(SCRIPT.replace('HOW = "none"', f"HOW = {how!r}"))
    argv = flags(mock_data=None, vocab_size=None, micro_batch_size=1)
    assert main(["--script", str(script), "--", *argv]) == code
    said = capsys.readouterr()
    assert named in said.out + said.err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (flags(), "the flags of the training come after --"),
        (["--ranks", "3", "--", *flags(tensor_model_parallel_size=2)], "--ranks 3: the layout needs a multiple of 2"),
        (["--", *flags(num_layers="two")], "--num-layers"),
        (["--", *flags(tensor_model_parallel_size=3)], "--tensor-model-parallel-size 3"),
        (["--step", "3", "--", *flags()], "--step: no such flag; did you mean --steps?"),
        (["--tolerance", "none", "--", *flags()], "none is not a number above 0"),
        (["--script", "no/such.py", "--", *flags()], "--script no/such.py: no such Python file"),
        (["--script", __file__, "--", *flags()], "has no datasets_provider, model_provider, forward_step"),
        (["--timeout-minutes", "0.001", "--", *flags()], "did not end within 0 s"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], named: str, capsys: Capture) -> None:
    assert main(argv) in (2, 17)
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1, said


# What is too large is shrunk and keeps its structure.

LARGE = {
    "llama3-8b, tp 8 with sequence, pp 4 with virtual stages": (
        "--model llama3-8b --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 512 --train-iters 9 --seq-length 8192"
    ),
    "llama3-8b, more ranks than groups": (
        "--model llama3-8b --tensor-model-parallel-size 16 --global-batch-size 512 --train-iters 9 --seq-length 4096"
    ),
    "gpt2-124m, uneven stages": (
        "--model gpt2-124m --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 2 --global-batch-size 64 --train-iters 9 --seq-length 1024"
    ),
    "mixtral, ep 8": (
        "--model mixtral-8x7b --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
        "--global-batch-size 256 --train-iters 9 --seq-length 4096"
    ),
    "llama3-8b, all-to-all context": (
        "--model llama3-8b --context-parallel-size 4 --cp-comm-type a2a --tensor-model-parallel-size 2 "
        "--global-batch-size 64 --train-iters 9 --seq-length 8192"
    ),
}


def prepared(text: str) -> tuple[RunConfig, int]:
    words = [*text.split(), "--micro-batch-size", "1", "--lr", "1e-4", "--mock-data", "--vocab-size", "50257"]
    config = parse_args(words)
    ranks = ranks_of(config, None)
    return reproducible(config, ranks, 3, Path("cache")), ranks


@pytest.mark.parametrize("case", LARGE)
def test_a_large_configuration_is_shrunk_to_the_same_structure(case: str) -> None:
    config, ranks = prepared(LARGE[case])
    assert is_large(config, ranks, 50257)
    small = shrink(config, ranks)
    assert small.model.hidden_size <= 256 and small.data.seq_length <= 256, changes(config, small)
    check(small, needs_data=False)
    check_world(small, ranks)
    before, after, tp = config.model, small.model, config.parallel.tensor_model_parallel_size
    assert (before.query_groups < before.num_attention_heads) == (after.query_groups < after.num_attention_heads)
    assert (before.query_groups < tp) == (after.query_groups < tp)
    assert (before.num_layers == config.parallel.pipeline_model_parallel_size) or after.num_layers > 1
    assert (before.tied, before.gated, before.positions) == (after.tied, after.gated, after.positions)
    assert any(line.startswith("--hidden-size ") for line in changes(config, small))
    for size in ("tensor", "pipeline", "expert"):
        name = f"{size}_model_parallel_size"
        assert getattr(small.parallel, name) == getattr(config.parallel, name)


@pytest.mark.parametrize(
    ("cut", "layers", "first", "last"),
    [
        ("4 --decoder-first-pipeline-num-layers 20 --decoder-last-pipeline-num-layers 4", 8, 3, 1),
        ("4 --decoder-first-pipeline-num-layers 6", 7, 1, None),
        ("4 --decoder-last-pipeline-num-layers 12", 8, None, 2),
        ("2 --decoder-first-pipeline-num-layers 30", 3, 2, None),
        ("4", 8, None, None),
    ],
)
def test_uneven_stages_are_shrunk_and_stay_uneven(cut: str, layers: int, first: int | None, last: int | None) -> None:
    config, ranks = prepared(
        f"--num-layers 48 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
        f"--train-iters 9 --pipeline-model-parallel-size {cut}"
    )
    small = shrink(config, ranks)
    assert small.model.num_layers == layers, changes(config, small)
    assert small.parallel.decoder_first_pipeline_num_layers == first
    assert small.parallel.decoder_last_pipeline_num_layers == last


@pytest.mark.parametrize(("asked", "taken"), [("native", "auto"), ("native,-rope", "auto,-rope"), ("auto", None)])
def test_in_fp64_there_are_no_native_kernels_and_that_is_said(asked: str, taken: str | None, capfd: Capture) -> None:
    backend("cpu")
    assert check_layout("--steps", "1", kernels=asked, micro_batch_size=4) == 0
    said = capfd.readouterr()
    assert (f"--kernels {asked} is taken as {taken}: the native kernels know no fp64" in said.out) == (
        taken is not None
    )
    assert said.out.count("a fallback runs in place of each native one") == 1 and not said.err


def test_plain_formulas_have_nothing_to_say_of_kernels(capsys: Capture) -> None:
    assert check_layout("--steps", "1", kernels="ref", micro_batch_size=4) == 0
    assert "kernels" not in capsys.readouterr().out


def test_a_small_configuration_is_not_shrunk() -> None:
    config, ranks = prepared("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
                             "--max-position-embeddings 64 --train-iters 9")  # fmt: skip
    assert not is_large(config, ranks, 50257)


def test_a_shrunk_run_says_so(capsys: Capture) -> None:
    code = check_layout(
        "--steps", "1", num_layers=24, hidden_size=1024, seq_length=512, max_position_embeddings=512,
        num_attention_heads=16, tensor_model_parallel_size=2,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert (
        code == 0
        and "shrunk to be quick (--full runs it as it is): --num-layers 24 -> 2, --hidden-size 1024 ->" in said
    )


def test_a_world_that_holds_the_layout() -> None:
    for words, ranks in (("", 2), ("--tensor-model-parallel-size 2", 4), ("--pipeline-model-parallel-size 2 "
        "--tensor-model-parallel-size 4", 8)):  # fmt: skip
        config = parse_args([*flags(num_layers=4), *words.split()])
        assert ranks_of(config, None) == ranks
    with pytest.raises(ConfigError, match="use 2"):
        ranks_of(parse_args(flags()), 1)
