"""Grouped queries in Megatron-LM's files: each group's queries, then its key, then its value. This file builds the rows
from the three projections in Megatron-LM's layout, and compares with the Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.cli import convert_checkpoint as convert_cli
from megatron.interop.hf import exchange
from tests.helpers.megatron_lm import Layout, Model, write
from tests.helpers.torch_dist import write as write_dist
from tests.unit.interop.megatron_lm.test_step import LLAMA, make

GROUPS, QUERIES, WIDTH, HIDDEN = 2, 2, 6, 24


def with_projections() -> tuple[Model, dict[str, Tensor]]:
    draw, model = torch.Generator().manual_seed(3), make(LLAMA)
    weights, separate = dict(model.weights), {}
    for name in [name for name in weights if name.endswith("query_key_value.weight")]:
        query = torch.randn(GROUPS * QUERIES * WIDTH, HIDDEN, generator=draw)
        key, value = (torch.randn(GROUPS * WIDTH, HIDDEN, generator=draw) for _ in range(2))
        rows = []
        for group in range(GROUPS):
            rows.append(query[group * QUERIES * WIDTH : (group + 1) * QUERIES * WIDTH])
            rows += [each[group * WIDTH : (group + 1) * WIDTH] for each in (key, value)]
        weights[name] = torch.cat(rows)
        layer = name.split(".")[1]
        for kind, each in (("q", query), ("k", key), ("v", value)):
            separate[f"model.layers.{layer}.self_attn.{kind}_proj.weight"] = each
    return replace(model, weights=weights), separate


def check(folder: Path, separate: dict[str, Tensor]) -> None:
    command = ["--load", str(folder), "--to", "hf", "--save", str(folder / "hf"), "--true-vocab-size=300"]
    assert convert_cli.main(command) == 0
    found = load_file(folder / "hf/model.safetensors")
    for name, tensor in separate.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("form", ["classic", "te", "torch_dist"])
def test_rows_are_those_of_the_three_projections(tmp_path: Path, form: str, tp: int) -> None:
    model, separate = with_projections()
    if form == "torch_dist":
        write_dist(tmp_path, model, tp=tp)
    else:
        write(tmp_path, model, Layout(tp=tp, names=form))
    check(tmp_path, separate)


def test_another_order_of_rows_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the key comes first, as for a reader that expects [key, value, queries...]."""
    model, separate = with_projections()
    write(tmp_path, model, Layout())
    apart = exchange.heads_apart
    monkeypatch.setattr(exchange, "heads_apart", lambda qkv: apart(qkv.roll(-1, 1)))
    with pytest.raises(AssertionError):
        check(tmp_path, separate)


@pytest.mark.parametrize("version", [None, 0, 1.0])
def test_versions_before_grouped_queries_are_refused_with_them(
    tmp_path: Path, version: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older row orders have one key per query; a file that claims one by mistake would be read wrongly."""
    write(tmp_path, make(LLAMA), Layout())
    file = tmp_path / "iter_0000500/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content.pop("checkpoint_version")
    torch.save(content if version is None else {**content, "checkpoint_version": version}, file)
    assert convert_cli.main(["--load", str(tmp_path), "--to", "native", "--save", str(tmp_path / "out")]) == 12
    error = capsys.readouterr().err
    assert "checkpoint_version" in error and "grouped-query attention" in error and error.count("\n") == 1
