"""Context parallelism applied to a GPT: the tokens of a pass are a part of the sequence, and attention knows it."""

from __future__ import annotations

from megatron.context_parallel import GatheredAttention, RingAttention, SharedSequence, UlyssesAttention
from megatron.distributed.state import Axis
from megatron.model.attention import CoreAttention, SelfAttention
from megatron.model.gpt import GPT

_ATTENTION: dict[str, type[RingAttention] | type[UlyssesAttention] | type[GatheredAttention]] = {
    "p2p": RingAttention,
    "a2a": UlyssesAttention,
    "allgather": GatheredAttention,
}


def share_sequence(model: GPT, cp: Axis, comm_type: str) -> None:
    """In place. Parameters stay as they are: every rank holds them all."""
    if cp.size == 1:
        return
    attention = _ATTENTION[comm_type]
    model.sequence = SharedSequence(cp, attention)
    for module in model.modules():
        if isinstance(module, SelfAttention):
            core = module.core_attention
            assert isinstance(core, CoreAttention), "the sequence is shared before anything else wraps the attention"
            module.core_attention = attention(core, cp, model.config.window)  # type: ignore[assignment]
