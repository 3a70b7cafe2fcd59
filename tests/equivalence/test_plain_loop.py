"""200 steps against an independent loop: a GPT-2 written out in plain PyTorch, with torch's AdamW."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.data.indexed.builder import IndexedDatasetBuilder
from tests.helpers.runs import flags, make_parts

STEPS, HEADS, HIDDEN, VOCAB, SEQ = 200, 4, 32, 97, 16


def plain_gpt2(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """A GPT-2 written out; `weights` under our names, QKV rows ordered (head, q/k/v, width)."""
    batch, seq = tokens.shape
    x = weights["embedding.word_embeddings.weight"][tokens] + weights["embedding.position_embeddings.weight"][:seq]
    for n in range(2):
        w = {name.removeprefix(f"layers.{n}."): v for name, v in weights.items() if name.startswith(f"layers.{n}.")}
        normed = F.layer_norm(x, (HIDDEN,), w["input_layernorm.weight"], w["input_layernorm.bias"])
        qkv = normed @ w["self_attention.query_key_value.weight"].T + w["self_attention.query_key_value.bias"]
        q, k, v = qkv.view(batch, seq, HEADS, 3, HIDDEN // HEADS).permute(3, 0, 2, 1, 4)  # [b, heads, s, width]
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
        core = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, HIDDEN)
        x = x + core @ w["self_attention.dense.weight"].T + w["self_attention.dense.bias"]
        normed = F.layer_norm(x, (HIDDEN,), w["post_attention_layernorm.weight"], w["post_attention_layernorm.bias"])
        inner = F.gelu(normed @ w["mlp.dense_h_to_4h.weight"].T + w["mlp.dense_h_to_4h.bias"], approximate="tanh")
        x = x + inner @ w["mlp.dense_4h_to_h.weight"].T + w["mlp.dense_4h_to_h.bias"]
    x = F.layer_norm(x, (HIDDEN,), weights["final_layernorm.weight"], weights["final_layernorm.bias"])
    return x @ weights["embedding.word_embeddings.weight"].T


def plain_loop(start: dict[str, Tensor], batches: list[Tensor]) -> list[float]:
    """Cosine schedule with warm-up, decay of matrices only, clipping at 1.0, like the test's flags."""
    weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    decayed = [p for p in weights.values() if p.dim() > 1]
    others = [p for p in weights.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95)
    )
    losses = []
    for step, text in enumerate(batches):
        rate = 1e-2 * step / 20 if step <= 20 else 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 20) / 180)) * 9e-3
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = plain_gpt2(weights, text[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), text[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Learnable text: every token follows from the one before, with noise."""
    random = np.random.RandomState(3)
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus"), np.uint16)
    for _ in range(300):
        tokens = [random.randint(VOCAB)]
        for _ in range(random.randint(20, 60)):
            tokens.append((tokens[-1] * 5 + 3) % VOCAB if random.rand() < 0.9 else random.randint(VOCAB))
        builder.add_document(np.array(tokens, dtype=np.uint16), None)
    builder.finalize()
    return str(tmp_path / "corpus")


def remember(batch: dict[str, Tensor], into: list[Tensor]) -> dict[str, Tensor]:
    into.append(torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1))  # [b, s + 1]
    return batch


def test_the_loss_curve_is_that_of_a_plain_loop(corpus: str) -> None:
    argv = flags(
        mock_data=None,
        data_path=corpus,
        tokenizer_type="NullTokenizer",
        vocab_size=VOCAB - 1,
        train_iters=STEPS,
        attention_dropout=0,
        hidden_dropout=0,
        lr_warmup_iters=20,
        min_lr=1e-3,
        lr_decay_style="cosine",
        weight_decay=0.1,
        adam_beta2=0.95,
    )
    run, parts = make_parts(argv, dtype=torch.float64)
    start: dict[str, Any] = {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}
    assert run.vocab_size == VOCAB
    start["embedding.word_embeddings.weight"] = start["embedding.word_embeddings.weight"][:VOCAB]
    seen: list[Tensor] = []
    ours: list[float] = []
    trainer = parts.trainer
    trainer.train_batches = (remember(batch, seen) for batch in trainer.train_batches)
    for _ in range(STEPS):
        result = trainer.iterate()
        assert result is not None
        ours.append(result.lm_loss)
    batches = [torch.cat(seen[step * 4 : step * 4 + 4]) for step in range(STEPS)]
    torch.testing.assert_close(ours, plain_loop(start, batches), rtol=1e-9, atol=0)
    assert ours[-1] < 0.6 * ours[0]
