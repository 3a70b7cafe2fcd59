"""Runs the passes of a generation: one over each prompt, then one per token, on all ranks of a model.

The last pipeline stage has the logits. Its first rank chooses the tokens and broadcasts them. No other rank samples, so
ranks cannot diverge.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.distributed.collectives import broadcast
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError, MegatronError, NonFiniteError
from megatron.layout import CP_FLAG, Layout
from megatron.model import GPT
from megatron.model.gpt import Stage
from megatron.model.kv_cache import KVCache
from megatron.model.passes import Batch, Passes
from megatron.utils.cpu import available_memory


def generate_step(model: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
    """Forward step of a generation. Returns logits [rows, vocabulary] of the last position, and 0 as the count."""
    layers = [int(name) for name in model.layers]
    body = Stage(range(layers[0], layers[-1] + 1), last=False)
    hidden = model(batch["tokens"], position_ids=batch["position_ids"], cache=batch["cache"], stage=body)
    assert model.final_layernorm is not None and model.head_and_loss is not None, "not the last stage"
    logits = model.head_and_loss(model.final_layernorm(hidden[:, -1:]), model.head_weight, None)
    return logits[:, 0], logits.new_zeros(())


class Decoder:
    """Decodes one batch of prompts, a row for each. All ranks of a model make the same calls."""

    def __init__(self, model: GPT, passes: Passes | None = None, parallel: ParallelState | None = None) -> None:
        """Prepares to decode. A model that is split over ranks needs `passes` and `parallel`."""
        self.model, self.passes = model, passes
        self.parallel = parallel or ParallelState.plan(Layout(1), 0)
        if self.parallel.cp.size > 1:
            raise ConfigError(
                f"{CP_FLAG} {self.parallel.cp.size}: generation needs whole sequences on every rank; use {CP_FLAG} 1"
            )
        self.device = next(model.parameters()).device
        # Data-parallel ranks that share experts compute together, so they generate the same texts.
        self.together = self.parallel.world if self.parallel.ep.size > 1 else self.parallel.model
        stages = self.parallel.pp.size
        self._source = self.together.size // stages * (stages - 1)
        self._cache: KVCache | None = None
        self._positions = torch.empty(0, 1, dtype=torch.int64)

    @property
    def decides(self) -> bool:
        return self.together.size == 1 or self.together.rank == self._source

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "no prompts were read"
        return self._cache

    def read(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor | None:
        """Returns the logits [rows, vocabulary] after each prompt, on the last stage. Prompts of equal length must be
        adjacent. The KV cache is allocated for `new_tokens` more tokens."""
        lengths = [len(prompt) for prompt in prompts]
        self._check_memory(len(prompts), max(lengths) + new_tokens - 1)
        self._cache = self.model.make_cache(len(prompts), max(lengths) + new_tokens - 1)
        self._positions = torch.tensor(lengths, device=self.device).unsqueeze(1)  # [rows, 1]: of the next token
        found = []
        for rows, cache in self.cache.prompts(lengths):
            tokens = torch.tensor([list(prompt) for prompt in prompts[rows]], device=self.device)
            found.append(self._pass(tokens, None, cache))
        parts = [logits for logits in found if logits is not None]
        return torch.cat(parts) if parts else None

    def _check_memory(self, rows: int, length: int) -> None:
        """Rejects a KV cache that does not fit. The system allocates memory only at the first write, and would then
        kill the process."""
        size, free = self.model.cache_bytes(rows, length), available_memory()
        if self.device.type == "cpu" and free is not None and size > free:
            raise ConfigError(
                f"--batch-size {rows}: keys and values of {rows} x {length} tokens take {size >> 20} MiB, but "
                f"{free >> 20} MiB are free; lower --batch-size or --max-new-tokens"
            )

    def step(self, tokens: Tensor) -> Tensor | None:
        """Returns the logits [rows, vocabulary] after one more token per row, `tokens` [rows], on the last stage."""
        logits = self._pass(tokens.unsqueeze(1), self._positions, self.cache)
        self._positions += 1
        return logits

    def _pass(self, tokens: Tensor, positions: Tensor | None, cache: KVCache) -> Tensor | None:
        batch = {"tokens": tokens, "position_ids": positions, "cache": cache, "step": generate_step}
        result = generate_step(self.model, batch) if self.passes is None else self.passes.forward(batch)
        return None if result is None else result[0]

    def take(self, rows: Sequence[int]) -> None:
        """Keeps these rows in this order; a row may occur several times."""
        order = torch.tensor(rows, device=self.device)
        self.cache.take(order)
        self._positions = self._positions[order]

    def decided(self, logits: Tensor | None, decide: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
        """Runs `decide` on one rank that has the logits, and broadcasts its result. Every rank gets a float64 tensor of
        this shape on the host. Raises on all ranks if a logit is not finite, or if `decide` raises."""
        result, error = torch.full(shape, torch.inf, dtype=torch.float64), None
        if self.decides:
            try:
                result = _decision(logits, decide, shape)
            except Exception as caught:  # raised after the broadcast, for which the other ranks wait
                error = caught
        if self.together.size > 1:
            result = broadcast(result.to(self.device), self.together, self._source).cpu()
        if error is not None:
            raise error
        if bool(result.isposinf().any()):
            raise MegatronError(
                f"rank {self.together.ranks[self._source]} chooses the tokens and failed; see its error"
            )
        if bool(result.isnan().any()):
            raise NonFiniteError("the model's logits are not finite; check the model's weights and --dtype")
        return result


def _decision(logits: Tensor | None, decide: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Returns the decision; all NaN if the logits are not finite."""
    assert logits is not None, "the rank that decides has no logits"
    if not bool(logits.isfinite().all()):
        return torch.full(shape, torch.nan, dtype=torch.float64)
    result = decide(logits).to("cpu", torch.float64)
    assert result.shape == shape, f"{tuple(result.shape)}, not {shape}"
    return result
