"""ZeRO 2 and 3: shards the weights of a rank's part of the model over its data-parallel ranks."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from megatron.data_parallel import FullySharded, Unit
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.model.gpt import GPT
from megatron.model.moe import Experts
from megatron.parallelize.parallel import Parallel
from megatron.parallelize.specs import persistent_buffers


def divide_weights(
    built: Parallel, state: ParallelState, stage: int, device: torch.device, *, on_host: bool = False
) -> Parallel:
    """Replaces the part's weights in place by shards, in host memory if `on_host`. The shards of a GPT are not
    initialised yet; those of a foreign model hold the values of its weights."""
    model = built.model
    units = list(_units_of_gpt(model, state) if isinstance(model, GPT) else units_of(model, state.shard))
    divided = FullySharded(units, keep_gathered=stage == 2, device=device, on_host=on_host, replicas=state.replicate)
    if isinstance(model, GPT):
        model.computes_in = divided.dtype
        for name, buffer in persistent_buffers(model).items():
            start = built.rows[name].start
            assert isinstance(start, float), f"{name} is a buffer that starts with random values"
            buffer.fill_(start)
    return replace(built, divided=divided)


def _units_of_gpt(model: GPT, state: ParallelState) -> Iterator[Unit]:
    """Yields the units of a GPT: the embedding (unless this rank's head is tied to it), the experts of each layer (if
    sharded over other ranks than the layer), each layer, and the rest. The rest is the final norm and head.
    It stays gathered, because backward begins there."""
    if model.embedding is not None and (model.final_layernorm is None or model.output_layer is not None):
        yield Unit(model.embedding, state.shard, backward_needs_weights=False)
    for layer in model.layers.values():
        if state.ep.size > 1:
            for module in layer.modules():
                if isinstance(module, Experts):
                    yield Unit(module, state.expert_shard)
        yield Unit(layer, state.shard)
    yield Unit(model, state.shard, stays_gathered=True)


def units_of(model: nn.Module, axis: Axis) -> Iterator[Unit]:
    """Yields the units of a foreign model: the members of its outermost lists of layers, and the rest. Members that
    share parameters with other modules belong to the rest."""
    taken: set[int] = set()
    for member in _members_of_lists(model):
        own = {id(parameter) for parameter in member.parameters()}
        if id(member) not in taken and own.isdisjoint(_parameters_without(model, member)):
            taken.update(map(id, member.modules()))
            yield Unit(member, axis)
    yield Unit(model, axis, stays_gathered=True)


def _parameters_without(model: nn.Module, left_out: nn.Module) -> Iterator[int]:
    """Yields the ids of the parameters that are reachable without passing through `left_out`."""
    heard, coming = {id(left_out)}, [model]
    while coming:
        module = coming.pop()
        if id(module) not in heard:
            heard.add(id(module))
            yield from map(id, module.parameters(recurse=False))
            coming += module.children()


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        is_layer = isinstance(module, nn.ModuleList | nn.Sequential) and is_called(child)
        if not is_layer:
            yield from _members_of_lists(child)
        elif any(True for _ in child.parameters()):
            yield child


def is_called(module: nn.Module) -> bool:
    """True if the module has a forward pass, before which its weights are gathered. ModuleList and ModuleDict have
    none."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward
