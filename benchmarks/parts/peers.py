"""Peers of our training step: transformers' GPT-2, and a nanoGPT-shaped plain model.

A step is a well-written plain PyTorch loop: zero the gradients, forward, loss, backward, clip to 1.0, AdamW, without
dropout. By default the whole model and AdamW's moments are in the dtype. Under `autocast` the weights stay fp32, as in
nanoGPT and transformers' trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.parts.turns import NotInstalledError

BETAS, LEARNING_RATE, WEIGHT_DECAY, CLIP = (0.9, 0.95), 3e-4, 0.1, 1.0
Step = Callable[[], Tensor]
"""Returns the loss on its device; reading it waits for the step."""
NextBatch = Callable[[], tuple[Tensor, Tensor]]
"""Returns tokens and labels [batch, seq] on the model's device."""


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    batch: int


@dataclass(frozen=True)
class Place:
    """Device, dtype and compiler of a model."""

    dtype: torch.dtype
    device: str = "cpu"
    autocast: bool = False
    compiled: bool = False

    def put(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, torch.float32 if self.autocast else self.dtype).train()

    def casting(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype) if self.autocast else nullcontext()


def peer_step(model: nn.Module, place: Place, loss_of: Callable[[Any], Tensor]) -> Step:
    """Makes a step with fused AdamW, which drops gradients instead of zeroing them."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    called: Any = torch.compile(model) if place.compiled else model

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with place.casting():
            loss = loss_of(called)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.detach()

    return step


def transformers_step(shape: Shape, place: Place, next_batch: NextBatch) -> Step:
    # A script can import its siblings, and transformers would mistake kernels.py for the package of that name.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).resolve().parents[1]]
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise NotInstalledError(f"transformers cannot be imported ({error}): pip install transformers") from None
    settings: dict[str, Any] = {
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_positions": shape.seq,
        "vocab_size": shape.vocab,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = place.put(GPT2LMHeadModel(GPT2Config(**settings)))

    def loss_of(model: Any) -> Tensor:
        tokens, _ = next_batch()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss  # it shifts the labels itself
        return loss

    return peer_step(model, place, loss_of)


def plain_step(shape: Shape, place: Place, next_batch: NextBatch) -> Step:
    return peer_step(place.put(PlainGPT(shape)), place, lambda model: model(*next_batch()))


class PlainBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.norm1(x)).split(hidden, dim=2)
        query, key, value = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in parts)
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(core.transpose(1, 2).contiguous().view(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """The shape of nanoGPT: one class, no options."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-1)
