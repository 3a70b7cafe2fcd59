"""A Hugging Face export has the same bytes whatever layout wrote the checkpoint. All weights are random, none is 0 or
1, so that no part can be mistaken for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.convert_checkpoint import main as convert
from megatron.distributed.rng import stream_seed
from tests.equivalence.test_model_parallel import GPT2, LLAMA, SP, layout
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts

ONE_GROUP = {**LLAMA, "num_query_groups": 1}
MOE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24}


def save(rank: int, ranks: int, argv: list[str]) -> bool:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=ranks)
    with parts, torch.no_grad():
        for name, parameter in parts.engine.model.named_parameters():
            spec = parts.checkpoints.specs[name]
            whole = torch.randn(spec.logical_shape, generator=torch.Generator().manual_seed(stream_seed(1, name)))
            spec.view(parameter).copy_(0.2 * spec.take(whole))
        parts.checkpoints.save(parts.progress)
    return True


def exported(ranks: int, folder: Path, settings: dict[str, Any]) -> dict[str, bytes]:
    run_ranks(ranks, save, ranks, flags(**settings, save=folder / "native", save_interval=1))
    assert convert(["--load", str(folder / "native"), "--to", "hf", "--save", str(folder / "hf")]) == 0
    return {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}


@pytest.mark.parametrize(
    ("family", "ranks", "axes"),
    [
        (GPT2, 4, layout(tp=2, pp=2)),
        (LLAMA, 4, layout(tp=4, **SP)),
        (ONE_GROUP, 8, layout(tp=4, pp=2, num_layers_per_virtual_pipeline_stage=1)),
        (MOE, 8, layout(tp=2, pp=2, expert_model_parallel_size=2, **SP)),
    ],
    ids=["gpt2 tp2 pp2", "llama tp4", "one group tp4 pp2", "moe tp2 pp2 ep2"],
)
def test_bit_equal_to_the_export_of_one_process(
    family: dict[str, Any], ranks: int, axes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    alone = exported(1, tmp_path / "alone", family)
    split = exported(ranks, tmp_path / "split", {**family, **axes})
    assert any(name.endswith(".safetensors") for name in alone)
    assert alone == split
