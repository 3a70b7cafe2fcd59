"""Faults that tools/check_layout.py can plant, to show that it finds each: one function per fault, of the same name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel import RingAttention, SharedSequence
from megatron.distributed import collectives
from megatron.distributed.messages import all_gather_json
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.model.attention_mask import Window
from megatron.model.block import Layer
from megatron.model.gpt import GPT
from megatron.model.passes import Batch
from megatron.model.rope import RotaryEmbedding
from megatron.ops.documents import Documents
from megatron.training.assemble import Parts


def no_gradient_reduction(parts: Parts) -> None:
    """Makes data-parallel ranks keep their own gradients."""
    state = parts.engine.parallel
    _needs(state.dp_cp.size > 1, "no-gradient-reduction", "two ranks with different data; give --ranks N")
    axes = {"dp", "cp", "dp_cp", "expert_dp", "shard", "expert_shard", "replicate"}
    for collective in ("start_all_reduce", "start_scatter_sum_in_place"):
        _leave_out(collective, axes)
    collectives.scatter_into = _keep_own_piece  # for ZeRO 2 and 3


def no_replica_sum(parts: Parts) -> None:
    """Skips the sum of replicas' gradients (norms with --sequence-parallel, tied embeddings, shared key heads)."""
    specs = parts.checkpoints.specs.values()
    here = any(parts.engine.parallel.axis(name).size > 1 for spec in specs for name in spec.replica_axes)
    anywhere = any(all_gather_json(here, parts.engine.parallel.world, bool))
    way = (
        "parameters that several ranks of one model hold and whose gradients they sum; try "
        "--tensor-model-parallel-size 2 --sequence-parallel, or --pipeline-model-parallel-size 2 with tied embeddings"
    )
    _needs(anywhere, "no-replica-sum", way)
    parts.trainer.engine.sum_replicas = lambda grads: None


def one_weight_off(parts: Parts) -> None:
    """Makes one weight of the last rank a millionth larger at the start."""
    if not _is_last(parts.engine.parallel):
        return
    with torch.no_grad():
        # Skips rows that only pad a table: these are zero.
        weight = next(p for p in parts.engine.model.parameters() if p.dim() > 1 and p.abs().max() > 0).view(-1)
        weight[weight.abs().argmax()] *= 1 + 1e-6


def lost_token(parts: Parts) -> None:
    """Makes the last rank ignore the loss of one counted token in each batch."""
    if _is_last(parts.engine.parallel):
        _change_batches(parts, "lost-token", "loss_mask", (0, 0), lambda mask: 0 * mask[0, 0])


def last_token(parts: Parts) -> None:
    """Makes the last token of each batch of the last data-parallel rank predict the first token of its sample."""
    dp, pp = parts.engine.parallel.dp, parts.engine.parallel.pp
    if dp.rank == dp.size - 1 and pp.rank == pp.size - 1:  # the other stages have no labels
        _change_batches(parts, "last-token", "labels", (-1, -1), lambda labels: labels[-1, 0])


def _change_batches(
    parts: Parts, fault: str, name: str, place: tuple[int, int], value: Callable[[Tensor], Tensor]
) -> None:
    def changed(batch: Batch) -> Batch:
        if name not in batch:
            raise ConfigError(f"--plant {fault}: the batches of this script have no {name}; plant another fault")
        tensor = batch[name].clone()
        tensor[place] = value(tensor)
        return {**batch, name: tensor}

    parts.trainer.train_batches = map(changed, parts.trainer.train_batches)


def own_chunk_attention(parts: Parts) -> None:
    """Limits context-parallel attention to each token's own chunk of the sequence."""
    _attend_within(parts, "own-chunk-attention", lambda chunk, last: chunk)


def last_chunk(parts: Parts) -> None:
    """Hides the earlier chunks from the last chunk of a sequence in context-parallel attention."""
    _attend_within(parts, "last-chunk", lambda chunk, last: chunk == last)


def _attend_within(parts: Parts, fault: str, group: Callable[[Tensor, int], Tensor]) -> None:
    """Limits attention to tokens of the same group of chunks, as if each group were a document."""
    size = parts.engine.parallel.cp.size
    _needs(size > 1, fault, "--context-parallel-size above 1")
    visible = SharedSequence.visible

    def within(
        self: SharedSequence, shape: torch.Size, *, window: Window, documents: Documents | None, device: torch.device
    ) -> Any:
        batch, tokens = shape
        chunk = torch.arange(tokens * size, device=device) // (tokens // 2)
        groups = group(chunk, 2 * size - 1).int().expand(batch, -1)  # [batch, tokens of the whole sequence]
        ids = groups if documents is None else documents.numbers() * 2 * size + groups
        return visible(self, shape, window=window, documents=Documents.of_ids(ids), device=device)

    SharedSequence.visible = within  # type: ignore[method-assign]


def last_stage(parts: Parts) -> None:
    """Makes the last layer of the last pipeline stage leave its last token of each sequence unchanged."""
    pp = parts.engine.parallel.pp
    _needs(pp.size > 1, "last-stage", "--pipeline-model-parallel-size above 1")
    if pp.rank < pp.size - 1:
        return
    *_, last = (module for module in parts.engine.model.modules() if isinstance(module, Layer))
    last.register_forward_hook(lambda _, given, result: torch.cat([result[:, :-1], given[0][:, -1:]], 1))


def wide_window(parts: Parts) -> None:
    """Lets tokens attend one token further back than --window-size."""
    models = [module for module in parts.engine.model.modules() if isinstance(module, GPT)]
    windows = [model.config.window for model in models]
    _needs(any(window is not None and window[0] >= 0 for window in windows), "wide-window", "--window-size")
    for model in models:
        size = model.config.window_size
        assert size is not None
        model.config = replace(model.config, window_size=(size[0] + 1, size[1]))
    for module in parts.engine.model.modules():
        if isinstance(module, RingAttention) and module.look_back is not None:
            module.look_back += 1


def unscaled_positions(parts: Parts) -> None:
    """Makes the last rank rotate queries and keys by the angles of an unscaled context."""
    rotary = [module for module in parts.engine.model.modules() if isinstance(module, RotaryEmbedding)]
    scaled = [module for module in rotary if module.config.rope_scaling != "none"]
    way = "rotary positions with a scaling, such as --use-rope-scaling"
    _needs(bool(scaled), "unscaled-positions", way)
    if not _is_last(parts.engine.parallel):
        return
    for module in scaled:
        width = 2 * len(module.inverse_frequencies)
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        module.inverse_frequencies, module.factor = 1.0 / (module.config.rotary_base**exponents), 1.0


def _is_last(state: ParallelState) -> bool:
    return state.rank == state.world.size - 1


def _needs(there: bool, fault: str, what: str) -> None:
    if not there:
        raise ConfigError(f"--plant {fault}: this layout has nothing that this fault could break; it needs {what}")


def _leave_out(collective: str, axes: set[str]) -> None:
    """Patches this process, which ends with the check, to skip a collective over `axes`."""
    original = getattr(collectives, collective)

    def broken(tensor: Tensor, axis: Axis, *rest: object) -> object:
        return original(tensor, Axis.single(axis.name) if axis.name in axes else axis, *rest)

    setattr(collectives, collective, broken)


def _keep_own_piece(output: Tensor, tensor: Tensor, axis: Axis, op: Any, *, async_op: bool) -> None:
    """Replaces a reduce-scatter by this rank's own piece."""
    output.copy_(tensor.chunk(axis.size)[axis.rank])
