"""tools/check_layout.py: equal layouts exit with 0, planted faults with 1 and a name, errors are one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.check_layout import FAULT_NAMES, main
from tests.helpers.kernels import backend
from tests.helpers.runs import LLAMA_SHAPE, REPOSITORY, flags

Capture = pytest.CaptureFixture[str]

SMALL: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "lr_warmup_iters": 3,
    "num_workers": 1,
}
LLAMA: dict[str, Any] = {
    **LLAMA_SHAPE,
    "num_query_groups": 1,
}
MIXTURE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 16, "global_batch_size": 8}


def check_layout(*options: str, **changed: Any) -> int:
    return main([*options, "--", *flags(**{**SMALL, **changed})])


EQUAL: dict[str, dict[str, Any]] = {
    "tensor 2 x data 2 on 4 ranks": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
    "tensor 2 x pipeline 2 x data 2 on 8 ranks": {
        **LLAMA,
        "global_batch_size": 8,
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
    "lost-token": ({"pipeline_model_parallel_size": 2}, "first the counted tokens of step 1"),
    "last-token": ({"pipeline_model_parallel_size": 2}, "first the gradient of "),
    "own-chunk-attention": ({"context_parallel_size": 2}, "first the gradient of "),
    "last-chunk": ({"context_parallel_size": 2, "cp_comm_type": "allgather"}, "first the gradient of "),
    "last-stage": ({"pipeline_model_parallel_size": 2}, "first the gradient of "),
    "wide-window": ({"context_parallel_size": 2, "window_size": (5, 0)}, "first the gradient of "),
    "unscaled-positions": (
        {**LLAMA, "pipeline_model_parallel_size": 2, "use_rope_scaling": True, "rope_original_max_position": 16},
        "first the gradient of ",
    ),
}


def test_every_plant_is_tried_and_offered() -> None:
    assert tuple(SEEN) == FAULT_NAMES


@pytest.mark.parametrize("plant", SEEN)
def test_a_planted_mistake_is_found_and_named(plant: str, capsys: Capture) -> None:
    changed, named = SEEN[plant]
    assert check_layout("--plant", plant, "--steps", "1", **changed) == 1
    said = capsys.readouterr().out
    verdict = said.splitlines()[-1]
    assert f"planted fault: {plant}" in said and verdict.startswith("DIFFERENT") and named in verdict, said


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_are_not_summed_are_found_under_zero(stage: int, capsys: Capture) -> None:
    assert check_layout("--plant", "no-gradient-reduction", "--steps", "1", "--ranks", "2", zero_stage=stage) == 1
    assert "DIFFERENT" in (said := capsys.readouterr().out) and "first the gradient of embedding" in said, said


@pytest.mark.parametrize(
    "plant", ["no-replica-sum", "own-chunk-attention", "last-stage", "wide-window", "unscaled-positions"]
)
def test_a_mistake_without_effect_is_refused_and_does_not_pass(plant: str, capsys: Capture) -> None:
    assert check_layout("--plant", plant, tensor_model_parallel_size=2) == 2
    assert "this layout has nothing that this fault could break" in capsys.readouterr().err


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
    if HOW == "raise" and dist.is_initialized() and dist.get_rank() == 1:
        raise ValueError("planted")
    if HOW == "exit" and dist.is_initialized() and dist.get_rank() == 1:
        sys.exit(0)
    if HOW == "shapes":
        return model(batch["x"].double()[:, 1:]), 1
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
        ("raise", 2, "check_layout.py: rank 1: ValueError: planted ("),
        ("exit", 2, "check_layout.py: rank 1: SystemExit: 0 ("),
        ("shapes", 2, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_a_script_of_ones_own(how: str, code: int, named: str, tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "pretrain_mine.py"
    script.write_text(SCRIPT.replace('HOW = "none"', f"HOW = {how!r}"))
    argv = flags(mock_data=None, vocab_size=None, micro_batch_size=1)
    assert main(["--script", str(script), "--", *argv]) == code
    said = capsys.readouterr()
    assert named in said.out + said.err and "Traceback" not in said.err
    assert code in (0, 1) or len(said.err.splitlines()) == 1, said.err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("raise ValueError('planted')", "cannot be imported: ValueError: planted ("),
        ("import sys; sys.exit()", "cannot be imported: SystemExit"),
        ("def", "cannot be imported: SyntaxError"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            "from pretrain_gpt import *\ndef model_provider(run):\n    return run.nothing",
            "has no attribute 'nothing' (",
        ),
    ],
)
def test_a_script_that_fails_is_one_line(text: str, named: str, tmp_path: Path, capsys: Capture) -> None:
    script = tmp_path / "pretrain_mine.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{text}\n")
    assert main(["--script", str(script), "--", *flags()]) == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1, said
    assert main(["--traceback", "--script", str(script), "--", *flags()]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


CYCLIC = {"dataloader_type": "cyclic"}


def test_cyclic_sampling_is_named_as_the_cause(capsys: Capture) -> None:
    assert check_layout("--steps", "2", **CYCLIC) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "DIFFERENT: in step 1 the layout and one process read different samples: --dataloader-type cyclic"
    )
    assert "--no-data-sharding" in said


def test_cyclic_sampling_with_one_order_is_equal(capsys: Capture) -> None:
    assert check_layout("--steps", "2", no_data_sharding=True, **CYCLIC) == 0
    assert check_layout("--steps", "2", tensor_model_parallel_size=2, global_batch_size=1, **CYCLIC) == 0
    assert capsys.readouterr().out.count("EQUAL within") == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (flags(), "the flags of the training come after --"),
        (["--ranks", "3", "--", *flags(tensor_model_parallel_size=2)], "--ranks 3: the layout needs a multiple of 2"),
        (["--ranks", "3", "--", *flags()], "--global-batch-size 8 is not divisible by --micro-batch-size 2 x 3"),
        (["--", *flags(num_layers="two")], "--num-layers"),
        (["--", *flags(mock_data=None, data_path="no/such", tokenizer_type="NullTokenizer")], "no/such"),
        (["--", *flags(tensor_model_parallel_size=3)], "--tensor-model-parallel-size 3"),
        (["--step", "3", "--", *flags()], "--step: no such flag; did you mean --steps?"),
        (["--tolerance", "none", "--", *flags()], "none is not a number above 0"),
        (["--script", "no/such.py", "--", *flags()], "--script no/such.py: no such Python file"),
        (["--script", __file__, "--", *flags()], "has no datasets_provider, model_provider, forward_step"),
        (["--timeout-minutes", "0.001", "--", *flags()], "did not finish within 0 s"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], named: str, capsys: Capture) -> None:
    assert main(argv) in (2, 17)
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("plant", ["own-chunk-attention", "last-chunk", "wide-window", "unscaled-positions"])
def test_what_is_shrunk_still_shows_every_fault(plant: str, capsys: Capture) -> None:
    code = check_layout(
        *("--plant", plant, "--steps", "1"),
        **{**LLAMA, "num_attention_heads": 16, "hidden_size": 1024, "seq_length": 4096},
        max_position_embeddings=4096,
        context_parallel_size=2,
        window_size=(2000, 0),
        use_rope_scaling=True,
        rotary_base=500000,
    )
    said = capsys.readouterr()
    assert "--seq-length 4096 -> 32" in said.out and "--rope-original-max-position 8192 -> 64" in said.out, said
    assert code == 1 and "DIFFERENT beyond 1e-10" in said.out, said


@pytest.mark.parametrize(("asked", "taken"), [("native", "auto"), ("native,-rope", "auto,-rope"), ("auto", None)])
def test_in_fp64_there_are_no_native_kernels_and_that_is_said(asked: str, taken: str | None, capfd: Capture) -> None:
    backend("cpu")
    assert check_layout("--steps", "1", kernels=asked, micro_batch_size=2) == 0
    said = capfd.readouterr()
    assert (f"--kernels {asked} is taken as {taken}: the native kernels do not support fp64" in said.out) == (
        taken is not None
    )
    assert said.out.count("a fallback replaces each native kernel") == 1 and not said.err


def test_plain_formulas_have_nothing_to_say_of_kernels(capsys: Capture) -> None:
    assert check_layout("--steps", "1", kernels="ref", micro_batch_size=2) == 0
    assert "kernels" not in capsys.readouterr().out


def test_a_shrunk_run_says_so(capsys: Capture) -> None:
    code = check_layout(
        "--steps", "1", num_layers=24, hidden_size=1024, seq_length=512, max_position_embeddings=512,
        num_attention_heads=16, tensor_model_parallel_size=2,
    )  # fmt: skip
    said = capsys.readouterr().out
    assert (
        code == 0 and "shrunk to be quick (--full keeps the sizes): --num-layers 24 -> 2, --hidden-size 1024 ->" in said
    )
