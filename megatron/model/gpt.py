"""The GPT in plain PyTorch. Its code does not depend on ranks, so a single process gives the reference results for
every layout."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig, RecomputeConfig
from megatron.model.attention import AttentionContext
from megatron.model.attention_mask import documents_of
from megatron.model.block import Layer, make_layer
from megatron.model.embedding import Embedding, TiedHead
from megatron.model.factory import ModuleFactory
from megatron.model.host_activations import HostActivations, host_link
from megatron.model.inventory import inventory
from megatron.model.kv_cache import KVCache, slots_for
from megatron.model.parameters import Parameter, parameters
from megatron.model.recompute import groups
from megatron.model.rope import RotaryEmbedding
from megatron.model.table import Table, look_up_and_share
from megatron.ops import Kernels
from megatron.ops.documents import Documents


@dataclass(frozen=True)
class Stage:
    """The layers that one forward pass runs on a pipeline rank with several stages."""

    layers: range
    last: bool
    """True if the head follows."""


class GPT(nn.Module):
    """A decoder-only language model, or the layers of it that one pipeline rank holds.

    Parameters use torch's default dtype and device and stay uninitialised: `model.init` draws them by name. Layers are
    keyed by their number in the whole model, so names do not depend on the layout.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab_size: int | None = None,
        kernels: Kernels,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
        moe: MoEConfig | None = None,
        recompute: RecomputeConfig | None = None,
        make: ModuleFactory | None = None,
    ) -> None:
        """`make`: factory for the modules of a parallel layout (megatron/parallelize); by default plain modules."""
        super().__init__()
        rows = vocab_size if padded_vocab_size is None else padded_vocab_size
        assert rows >= vocab_size, f"{rows} padded vocabulary rows cannot hold {vocab_size} tokens"
        if make is None:
            make = ModuleFactory(config, kernels, moe, recompute)
        given = (config, kernels, moe or make.moe, recompute or make.recompute)
        known = (make.config, make.kernels, make.moe, make.recompute)
        assert all(one is other for one, other in zip(given, known)), "make: its settings differ from the GPT's"
        self.config, self.make, self.vocab_size, self.padded_vocab_size = config, make, vocab_size, rows
        self.routers, self.recompute, self.sequence = make.routers, make.recompute, make.sequence()
        self.embedding = _embedding(make, rows, first=first, last=last)
        self.rotary = RotaryEmbedding(config) if config.positions == "rope" else None
        held = range(config.num_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(layer): make_layer(make, layer) for layer in held})
        self.final_layernorm = make.norm(config.hidden_size) if last else None
        self.output_layer = make.vocabulary_table(rows) if last and not config.tied else None
        self.head_and_loss = make.head_and_loss(vocab_size) if last else None
        self.computes_in: torch.dtype | None = None
        """Dtype of the computation, if sharded weights are stored in another dtype; None: the weights' dtype."""
        self.as_made = inventory(self)

    def forward(
        self,
        tokens: Tensor | None,
        *,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        document_ids: Documents | Tensor | None = None,
        cache: KVCache | None = None,
        hidden: Tensor | None = None,
        stage: Stage | None = None,
    ) -> Tensor:
        """Runs the model on tokens, position_ids and labels [batch, seq].

        document_ids: the loader's `Documents`, or ids [batch, seq]. Queries see only keys of their document.
        `hidden` is the previous stage's result; position_ids may then replace the tokens. `stage` selects the layers to
        run; None runs all. Returns logits [batch, seq, vocabulary], or with labels the loss of every token [batch, seq]
        in fp32. A stage that is not the last returns its hidden states [batch, seq, hidden].
        """
        per_token = position_ids if tokens is None else tokens
        assert per_token is not None, "neither tokens nor positions were given"
        past, seq = self.sequence.past(cache), per_token.shape[1]
        words = shared = None
        if position_ids is None:
            position_ids = self.sequence.positions(seq, past, per_token.device).unsqueeze(0)  # [1, seq]
        if hidden is None:
            assert self.embedding is not None, "a stage without the embedding needs hidden states"
            assert tokens is not None, "the stage with the embedding needs tokens"
            if labels is not None:
                words, shared = self._look_up(tokens)
            hidden = self.embedding(tokens, position_ids, words)
        context = self._context(position_ids, document_ids, per_token.shape, cache)
        hidden = self._run_layers(hidden, context, stage)
        if cache is not None:
            cache.advance(seq)
        if self.final_layernorm is None or self.head_and_loss is None or (stage is not None and not stage.last):
            return hidden
        weight = self.head_weight if shared is None else shared
        return self.head_and_loss(self.final_layernorm(hidden), weight, labels)

    def table(self) -> dict[str, Parameter]:
        """Name -> parameter, for the whole model, even if this rank holds only a part of it."""
        return parameters(self.config, self.vocab_size, self.make.moe)

    @property
    def head_weight(self) -> Tensor:
        """Weight [padded vocabulary, hidden] of the output layer or, if tied, of the embedding."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def _look_up(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the token embeddings and the tied table for the head; the gradients of both share one tensor.

        Returns (None, None) if the table is not tied, or is split, or not on a CPU: on an accelerator, counting the
        distinct tokens would need a host sync."""
        assert self.embedding is not None
        table = self.embedding.word_embeddings
        alone = self.head_and_loss is None or self.output_layer is not None
        split = type(table) is not Table
        if alone or split or tokens.device.type != "cpu" or not table.weight.requires_grad:
            return None, None
        return look_up_and_share(table.weight, tokens)

    def make_cache(self, batch: int, max_length: int) -> KVCache:
        """Makes an empty cache for generation, in the model's dtype and on its device."""
        like = next(self.parameters())
        return KVCache(
            [int(name) for name in self.layers],
            batch=batch,
            groups=self._groups_here,
            max_length=max_length,
            head_dim=self.config.head_dim,
            dtype=like.dtype,
            window=self.config.window,
            device=like.device,
        )

    def cache_bytes(self, batch: int, max_length: int) -> int:
        """Size in bytes of the cache that `make_cache` makes."""
        tokens, width = slots_for(max_length, self.config.window), self._groups_here * self.config.head_dim
        return 2 * len(self.layers) * batch * tokens * width * next(self.parameters()).element_size()

    @property
    def _groups_here(self) -> int:
        """Number of key/value heads in a layer on this rank."""
        first = next(iter(self.layers.values()))
        assert isinstance(first, Layer)
        return first.self_attention.groups

    def _context(
        self,
        position_ids: Tensor,
        document_ids: Documents | Tensor | None,
        shape: torch.Size,
        cache: KVCache | None,
    ) -> AttentionContext:
        assert cache is None or document_ids is None, (
            "document_ids and a cache exclude each other: a cache holds one document"
        )
        if cache is None:
            documents = documents_of(document_ids)
            window, device = self.config.window, position_ids.device
            visible = self.sequence.visible(shape, window=window, documents=documents, device=device)
        else:
            visible = cache.begin(shape[1])
        dtype = self.computes_in or next(self.parameters()).dtype
        rope = None if self.rotary is None else self.rotary(position_ids, dtype)
        return AttentionContext(visible, rope, cache)

    def _run_layers(self, hidden: Tensor, context: AttentionContext, stage: Stage | None) -> Tensor:
        blocks = [self.layers[name] for name in (self.layers if stage is None else map(str, stage.layers))]
        activations, on_host = self._on_host(hidden.device), self.recompute.cpu_offloading_num_layers or 0

        def run_group(start: int, stop: int, x: Tensor) -> Tensor:
            for number, block in enumerate(blocks[start:stop], start):
                if activations is None or number >= on_host:
                    x = block(x, context)
                    continue
                with activations.layer(block):
                    x = block(x, context)
            return x

        for positions, recomputed in groups(self.recompute, len(blocks)):
            hidden = self.make.recomputation.call(run_group, recomputed, positions.start, positions.stop, hidden)
        return hidden

    def _on_host(self, device: torch.device) -> HostActivations | None:
        """Returns an object that offloads activations to host memory; None if offloading is off, the model
        is on a CPU, or there is no backward pass."""
        if not self.recompute.cpu_offloading_num_layers or _is_host(device) or not torch.is_grad_enabled():
            return None
        return HostActivations(host_link(device))


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _embedding(make: ModuleFactory, rows: int, *, first: bool, last: bool) -> Embedding | TiedHead | None:
    if first:
        return Embedding(make, rows)
    return TiedHead(make, rows) if last and make.config.tied else None
