"""The model. Plain PyTorch: nothing here knows about ranks, and the result is the oracle of every parallel layout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig, RecomputeConfig
from megatron.model.attention import AttentionContext, KVCache, SequenceView
from megatron.model.block import Block
from megatron.model.embedding import Dropout, Embedding, Table, look_up_and_share
from megatron.model.loss import HeadAndLoss
from megatron.model.moe_losses import RouterReports
from megatron.model.norm import Norm
from megatron.model.recompute import Checkpoint, Recompute, checkpoint
from megatron.model.rope import RotaryEmbedding
from megatron.ops import Kernels


class GPT(nn.Module):
    """A decoder-only language model, or a run of its layers.

    Parameters are created in torch's default dtype and on its default device, and left unset: `model.init` draws them
    by name. Layers are keyed by their number in the whole model, so names never depend on what else is held here.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int | None = None,
        kernels: Kernels,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        moe: MoEConfig | None = None,
        recompute: RecomputeConfig | None = None,
        dropout: Dropout = F.dropout,
        checkpoint: Checkpoint = checkpoint,
    ) -> None:
        super().__init__()
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        assert rows >= vocab_size, f"{rows} padded vocabulary rows cannot hold {vocab_size} tokens"
        assert first or not last or not config.tied, "a tied head needs the embedding in the same part of the model"
        held = range(config.num_layers) if layers is None else layers
        self.config = config
        self.vocab_size = vocab_size
        self.routers = RouterReports(moe, config.num_layers) if moe is not None and moe.is_on else None
        with_experts = moe.expert_layers(config.num_layers) if moe is not None else ()
        self.recompute = Recompute.of(recompute, checkpoint)
        self.embedding = Embedding(config, rows, dropout) if first else None
        self.rotary = RotaryEmbedding(config) if config.positions == "rope" else None
        self.layers = nn.ModuleDict(
            {
                str(n): Block(
                    config,
                    n,
                    kernels,
                    dropout=dropout,
                    recompute=self.recompute,
                    routers=self.routers if n in with_experts else None,
                )
                for n in held
            }
        )
        self.final_layernorm = Norm(config.hidden_size, config, kernels) if last else None
        self.output_layer = Table(rows, config.hidden_size) if last and not config.tied else None
        self.head_and_loss = HeadAndLoss(vocab_size, kernels) if last else None
        self.sequence = SequenceView()

    def forward(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """tokens, position_ids, labels, document_ids [batch, seq]; `hidden` is the previous part's result.

        Returns logits [batch, seq, vocabulary]; with labels the loss of every token [batch, seq] in fp32; from a part
        of the model that is not the last, its hidden states [batch, seq, hidden].
        """
        past, seq = self.sequence.past(cache), tokens.shape[1]
        words = shared = None
        if position_ids is None:
            position_ids = self.sequence.positions(seq, past, tokens.device).unsqueeze(0)  # [1, seq]
        if hidden is None:
            assert self.embedding is not None, "a part without the embedding needs the hidden states of the one before"
            if labels is not None:
                words, shared = self._look_up(tokens)
            hidden = self.embedding(tokens, position_ids, words)
        context = self._context(position_ids, document_ids, seq, cache)
        hidden = self._run_layers(hidden, context)
        if cache is not None:
            cache.length += seq
        if self.final_layernorm is None or self.head_and_loss is None:
            return hidden
        weight = self.head_weight if shared is None else shared
        return self.head_and_loss(self.final_layernorm(hidden), weight, labels)

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary, hidden]: the output layer's or, tied, the embedding's."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def _look_up(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The tokens' rows, and the table for the head, where one tensor can be the gradient of both. On a CPU: an
        accelerator would have to wait for the number of distinct tokens."""
        table = self.embedding.word_embeddings if self.embedding is not None else None
        alone = self.head_and_loss is None or self.output_layer is not None
        if alone or not isinstance(table, Table) or tokens.device.type != "cpu" or not table.weight.requires_grad:
            return None, None
        return look_up_and_share(table.weight, tokens)

    def make_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for generation with this model, in its dtype and on its device."""
        like = next(self.parameters())
        return KVCache(
            [int(name) for name in self.layers],
            batch=batch,
            groups=self.config.query_groups,
            max_length=max_length,
            head_dim=self.config.head_dim,
            dtype=like.dtype,
            device=like.device,
        )

    def _context(
        self, position_ids: Tensor, document_ids: Tensor | None, seq: int, cache: KVCache | None
    ) -> AttentionContext:
        assert cache is None or document_ids is None, "generation continues one document: no document ids with a cache"
        past, window, device = self.sequence.past(cache), self.config.window, position_ids.device
        mask, causal = self.sequence.visible(seq, past, window=window, document_ids=document_ids, device=device)
        dtype = next(self.parameters()).dtype
        rope = None if self.rotary is None else self.rotary(position_ids, dtype)
        return AttentionContext(mask, causal, rope, cache)

    def _run_layers(self, hidden: Tensor, context: AttentionContext) -> Tensor:
        blocks = list(self.layers.values())

        def run(start: int, stop: int, x: Tensor) -> Tensor:
            for block in blocks[start:stop]:
                x = block(x, context)
            return x

        for positions, recomputed in self.recompute.groups(len(blocks)):
            hidden = self.recompute.run(run, recomputed, positions.start, positions.stop, hidden)
        return hidden
