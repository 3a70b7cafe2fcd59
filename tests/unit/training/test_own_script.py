"""A user's own `pretrain_x.py`: own model, own datasets, own loss; buffers, tied, frozen and scalar parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import REPOSITORY, flags, launch, read_metrics, same_numbers

SCRIPT = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
import torch
import torch.nn.functional as F
from torch import nn
from megatron.pretrain import pretrain


class Points(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(self.seed * 10**6 + i))
        return {{"x": x, "y": int(x.sum() > 0)}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.two.weight = self.one.weight
        self.fixed = nn.Linear(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        h = self.norm(self.inner(x))
        return self.scale * self.out(self.drop(self.two(F.relu(self.one(h)))) + self.fixed(h))


def datasets(run, wanted):
    train, _, _ = wanted
    return Points(train, 1), Points(20, 2), Points(20, 3)


def forward_step(model, batch):
    assert len(batch["sample_ids"]) == len(batch["x"])
    assert not batch["x"].is_shared()  # it came through the worker's pipe: containers limit shared memory
    logits = model(batch["x"].to(model.out.weight.dtype)).float()
    return F.cross_entropy(logits, batch["y"], reduction="sum"), len(batch["y"])


pretrain(datasets, lambda run: Net(), forward_step, needs_data=False)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_points.py"
    path.write_text(SCRIPT)
    return path


def own_flags(**changes: Any) -> list[str]:
    """Flags without tokenizer, vocabulary and data path."""
    base = {"mock_data": None, "vocab_size": None, "lr_decay_style": "constant", "seq_length": 8}
    return flags(**{**base, "eval_iters": 1, "eval_interval": 2, **changes})


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_saves_and_resumes_bit_for_bit(tmp_path: Path, script: Path, ranks: int) -> None:
    save, whole, pieces = tmp_path / "ckpt", tmp_path / "whole.jsonl", tmp_path / "pieces.jsonl"
    precision = {"bf16": True} if ranks == 1 else {}
    for metrics, extra in (
        (whole, {}),
        (pieces, {"save": save, "load": save, "save_interval": 100, "exit_interval": 4, "num_workers": 1}),
        (pieces, {"save": save, "load": save, "save_interval": 100}),
    ):
        done = launch(own_flags(metrics_jsonl=metrics, **precision, **extra), ranks=ranks, script=script)
        assert done.returncode == 0, done.stderr
    for split in ("train", "valid", "test"):
        expected = [same_numbers(record) for record in read_metrics(whole, split)]
        assert [same_numbers(record) for record in read_metrics(pieces, split)] == expected, split
        assert len(expected) == {"train": 6, "valid": 4, "test": 1}[split]
    model = torch.load(save / "iter_0000006/mp_rank_00/model_optim_rng.pt", weights_only=True)["model"]
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "scale", "fixed.weight"} <= set(model)
    assert "two.weight" not in model, "a tied parameter is saved once, under its first name"
    assert model["norm.num_batches_tracked"] == 6 * 4 // ranks


def test_samples_that_are_no_dicts_are_named(tmp_path: Path, script: Path) -> None:
    script.write_text(SCRIPT.replace('return {"x": x, "y": int(x.sum() > 0)}', "return x, 1"))
    done = launch(own_flags(num_workers=1), script=script)
    assert done.returncode == 2
    assert "error: datasets_provider: sample 0 is a tuple; a sample must be a dict" in done.stderr


def test_a_model_that_needs_a_vocabulary_says_so(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt_own_data.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import pretrain_gpt as p\n"
        "from megatron.pretrain import pretrain\n"
        "pretrain(lambda run, wanted: (None, None, None), p.model_provider, p.forward_step, needs_data=False)\n"
    )
    done = launch(own_flags(), script=script)
    assert done.returncode == 2 and "error: --vocab-size: not given" in done.stderr, done.stderr


def test_a_dry_run_plans_a_model_of_ones_own(script: Path) -> None:
    done = launch([*own_flags(), "--dry-run"], script=script)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout and "vocabulary" not in done.stdout


def test_setup_gives_the_parts_without_the_loop(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "import json, torch\n"
        "from megatron.distributed.collectives import all_reduce\n"
        "from megatron.distributed.launch import shutdown\n"
        "from megatron.pretrain import setup\n"
        "run = setup()\n"
        "total = all_reduce(torch.tensor([1 + run.launch.rank]), run.parallel.world).item()\n"
        "found = [run.parallel.dp.rank, run.parallel.dp.size, total, run.vocab_size, run.config.training.seed,\n"
        "    run.device.type, str(run.dtype), run.run_id, torch.rand(1).item()]\n"
        "print(json.dumps(found) + chr(10), end='')\n"  # in one write: the ranks share the pipe
        "shutdown()\n"
    )
    done = launch(flags(seed=7, bf16=True), ranks=2, script=script)
    assert done.returncode == 0, done.stderr
    first, second = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert first[:7] == [0, 2, 3, 97, 7, "cpu", "torch.bfloat16"]
    assert second[:7] == [1, 2, 3, 97, 7, "cpu", "torch.bfloat16"]
    assert first[7] == second[7], "one run has one id"
    assert first[8] != second[8], "each data-parallel rank has a random stream of its own"


def test_setup_refuses_what_pretrain_refuses() -> None:
    from megatron.errors import ConfigError
    from megatron.pretrain import setup

    with pytest.raises(ConfigError, match="--global-batch-size 7 is not divisible by"):
        setup(flags(global_batch_size=7))
