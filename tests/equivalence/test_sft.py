"""--sft: packed conversations train what `transformers` trains one by one, in every layout and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.data import loader
from megatron.data.masks import MaskConfig, document_starts, loss_mask
from megatron.engine import StepResult
from megatron.errors import ConfigError, DataError
from megatron.interop.hf.importer import open_folder
from megatron.optimizer import Rates
from megatron.training.assemble import assemble
from tests.equivalence.test_resume import assert_same, run_in_pieces
from tests.equivalence.test_transformers_parity import norms_in_fp64
from tests.helpers.chats import MARKED, some_chats, write_chat_tokenizer, write_chats
from tests.helpers.layouts import unequal
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import LLAMA_SHAPE, TINY, flags, make_run, pretrain_gpt, train_here

transformers = pytest.importorskip("transformers")
CHATS = some_chats(14)
SAMPLES = 10  # that they fill
LENGTH = 128
ROWS = 288


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "theirs"
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=ROWS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_chat_tokenizer(folder, MARKED)
    return folder


@pytest.fixture(scope="module")
def chats(theirs: Path) -> Path:
    return write_chats(theirs.parent / "chats.jsonl", CHATS)


def settings(chats: Path, **changes: Any) -> dict[str, Any]:
    own = {
        "sft": True, "mock_data": None, "vocab_size": None, "data_path": chats, "split": "100,0,0",
        "seq_length": LENGTH, "micro_batch_size": 1, "global_batch_size": SAMPLES, "max_position_embeddings": LENGTH,
        "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    return {**own, **changes}


# ---------------------------------------------------------------- transformers, one conversation after another


def gradients_of_transformers(folder: Path) -> dict[str, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses, count = [], 0
    with norms_in_fp64():
        for messages in CHATS:
            made = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
            ids, answers = torch.tensor([made["input_ids"]]), torch.tensor(made["assistant_masks"]) > 0
            logits = model(ids).logits[0, :-1][answers[1:]]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:][answers[1:]], reduction="sum"))
            count += int(answers.sum())
    (torch.stack(losses).sum() / count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def our_gradients(folder: Path, chats: Path, forward_step: Any = None) -> dict[str, Tensor]:
    """Gradients by their names for one step over all conversations."""
    of_theirs = dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "make_vocab_size_divisible_by"))
    argv = flags(**settings(chats, load=folder, finetune=True, clip_grad=0, optimizer="sgd", **of_theirs))
    run, script = make_run(read_settings(argv), dtype=torch.float64), pretrain_gpt()
    step = forward_step or script.forward_step
    with assemble(run, script.datasets_provider, script.model_provider, step) as parts:
        engine, results = parts.trainer.engine, list[StepResult]()
        batches = [batch for _, batch in zip(range(SAMPLES), parts.trainer.train_batches)]
        rates = Rates(0.0, 0.0)
        engine.train_step(
            batches, iteration=1, batch_size=SAMPLES, tokens_per_sample=LENGTH, rates=lambda: rates, then=results.append
        )
        ours = {name: grad.clone().double() for name, grad in engine.store.grads()}
    return {
        name: part
        for exchange in open_folder(folder).exchanges()
        for name, part in exchange.to_hf(ours[exchange.parameter.name]).items()
    }


def difference(theirs: Path, chats: Path, forward_step: Any = None) -> float:
    expected, ours = gradients_of_transformers(theirs), our_gradients(theirs, chats, forward_step)
    assert ours.keys() == expected.keys()
    return max(float((ours[name][:ROWS] - grad).norm() / grad.norm()) for name, grad in expected.items())


def test_the_gradients_are_those_of_the_conversations_one_by_one(theirs: Path, chats: Path) -> None:
    assert difference(theirs, chats) < 1e-10


def shifted(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray:
    return np.roll(loss_mask(tokens, masks), 1, axis=1)


def together(tokens: np.ndarray, masks: MaskConfig) -> np.ndarray | None:
    found = document_starts(tokens, masks)
    return None if found is None else np.zeros_like(found)


def mean_of_means(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    loss, count = pretrain_gpt().forward_step(model, batch)
    return loss / count, torch.ones_like(count)


@pytest.mark.parametrize(
    ("name", "bug"), [("loss_mask", shifted), ("document_starts", together), ("forward_step", mean_of_means)]
)
def test_a_wrong_mask_or_mean_is_seen(
    name: str, bug: Callable[..., Any], theirs: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "forward_step":
        assert difference(theirs, chats, bug) > 1e-3
        return
    monkeypatch.setattr(loader, name, bug)
    assert difference(theirs, chats) > 1e-3


# ---------------------------------------------------------------- layouts, resume


def from_scratch(theirs: Path, chats: Path, **changes: Any) -> dict[str, Any]:
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": theirs}
    return settings(chats, **{**tokenizer, "global_batch_size": 4, **changes})


def test_every_layout_is_the_single_process(theirs: Path, chats: Path) -> None:
    llama = from_scratch(theirs, chats, **LLAMA_SHAPE)
    learned = from_scratch(theirs, chats, micro_batch_size=2)
    cases = [
        (learned, {"tensor_model_parallel_size": 2}),
        (llama, {"context_parallel_size": 2}),
        (llama, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
    ]
    assert not unequal(4, cases, 1e-10, steps=2)


def test_a_resumed_run_is_the_same(theirs: Path, chats: Path, tmp_path: Path) -> None:
    changes = from_scratch(theirs, chats, train_iters=4)
    assert SAMPLES < 4 * 4 and TINY["log_interval"] == 1, "more than one epoch, every step compared"
    save = str(tmp_path / "saved")
    whole = train_here(flags(**changes))
    pieces = {**changes, "save": save, "load": save, "save_interval": 100}
    assert_same(run_in_pieces([2], **pieces, num_workers=1), whole)
    other = write_chats(tmp_path / "other.jsonl", CHATS[1:])
    with pytest.raises(DataError, match=r"the data differs from that of .*: its content or"):
        train_here(flags(**{**pieces, "data_path": other, "train_iters": 5}))
    with pytest.raises(ConfigError, match="--sft is False here and True in the checkpoint"):
        train_here(flags(**{**pieces, "data_path": None, "sft": None, "mock_data": True, "train_iters": 5}))
