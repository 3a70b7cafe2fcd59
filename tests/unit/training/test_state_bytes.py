"""The formula for a rank's memory, compared with the bytes of all tensors that a run has after a step."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.background import HostMemory
from megatron.training.settings import read_settings
from megatron.training.state_bytes import copy_bytes, state_bytes
from megatron.utils.device import human_bytes
from tests.helpers.runs import flags, make_parts, pretrain_here

SIZE = {"hidden_size": 256, "vocab_size": 2048, "make_vocab_size_divisible_by": 1, "num_layers": 2, "train_iters": 1}
BF16 = {"bf16": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
DISK = {"optimizer_offload_directory": tempfile.gettempdir()}


SCRATCH = 4 << 20
"""Bytes in which half-precision gradients are widened, for any model; the batch and other tensors need less."""


def storages() -> dict[int, torch.UntypedStorage]:
    """Storages of all tensors by address. They are kept, so that no later storage gets the same address. Earlier tests
    leave tensors of all kinds, even without a storage."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.device.type == "cpu"]
    dense = [one for one in tensors if one.layout is torch.strided]
    return {one.untyped_storage()._cdata: one.untyped_storage() for one in dense}


def test_tensors_without_a_storage_are_passed_over() -> None:
    """Earlier tests may have left some."""
    dense = torch.eye(2)
    kept = dense, dense.to_sparse()
    assert dense.untyped_storage()._cdata in storages() and len(kept) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kernels": "ref"},
        BF16,
        {**BF16, "kernels": "ref"},
        {**BF16, "store_param_remainders": True},
        {**BF16, "grad_reduce_in_bf16": True},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "sgd_momentum": 0},
        {"optimizer": "lion"},
        {"optimizer": "adam8bit"},
        {"optimizer": "adafactor"},
        {"optimizer": "adafactor", "adafactor_beta1": 0.9},
        NARROW,
        {**NARROW, **BF16, "exp_avg_sq_dtype": "bf16"},
    ],
    ids=str,
)
def test_the_formula_is_what_a_run_keeps(settings: dict[str, Any]) -> None:
    before = storages()
    run, parts = make_parts(flags(**{"optimizer": "adam", **SIZE, **settings}))
    with parts:
        parts.trainer.fit()
        elements = sum(parameter.numel() for parameter in parts.engine.model.parameters())
        sizes = [storage.nbytes() for address, storage in storages().items() if address not in before]
        sizes = [size for size in sizes if size != SCRATCH]
    kept, expected = sum(sizes) / elements, state_bytes(run.config, elements, 1).total / elements
    assert 0.99 * expected < kept < 1.01 * expected + 0.2, (kept, expected)


@pytest.mark.parametrize(
    "settings",
    [{}, BF16, {**BF16, "store_param_remainders": True}, {**BF16, "no_save_optim": True}, {"optimizer": "sgd"}],
)
def test_a_save_in_the_background_copies_what_is_told(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied: list[int] = []
    copy = HostMemory.copy
    monkeypatch.setattr(HostMemory, "copy", lambda self, tensor: (copied.append(tensor.nbytes), copy(self, tensor))[1])
    given = {"optimizer": "adam", **SIZE, **settings, "save": tmp_path, "async_save": True}
    run, parts = make_parts(flags(**given))
    with parts:
        parts.trainer.fit()
        elements = sum(parameter.numel() for parameter in parts.engine.model.parameters())
    expected = copy_bytes(run.config, elements, 1)
    assert expected <= sum(copied) < 1.01 * expected, (sum(copied) / elements, expected / elements)
    assert copy_bytes(run.config, elements, 2) < expected or "no_save_optim" in settings
    assert pretrain_here(flags(**given, dry_run=True)) == 0
    assert f"{human_bytes(round(expected))} of host memory (--async-save)" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_what_is_offloaded_is_not_counted(share: float) -> None:
    config = read_settings(flags(**{"optimizer": "adam", **SIZE, **BF16}))
    whole, rest = (state_bytes(config, 1000, 4, offloaded=away) for away in (0.0, share))
    assert (rest.parameters, rest.gradients) == (whole.parameters, whole.gradients) == (2000, 4000)
    assert (whole.optimizer, rest.optimizer) == (12000, 12000 * (1 - share))


def test_the_dry_run_says_what_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here(flags(**{"optimizer": "adam", **SIZE, **DISK, "dry_run": True})) == 0
    assert "of weights, gradients and optimizer; 100% of the optimizer's state is offloaded" in capsys.readouterr().out


def test_one_rank_that_keeps_parameters_on_the_host_keeps_masters() -> None:
    """One rank does not shard them, and half-precision weights are made when a layer runs."""
    config = read_settings(flags(**{"optimizer": "adam", **SIZE, **BF16, "zero_stage": 3, "remote_device": "cpu"}))
    kept, plain = state_bytes(config, 1000, 1, on_host=True), state_bytes(config, 1000, 1)
    assert (kept.parameters, kept.gradients, kept.optimizer) == (4000, 4000, 8000)
    assert (plain.parameters, plain.gradients, plain.optimizer) == (2000, 4000, 12000)
