"""Every entry of every family's map matters: a mistake in one moves the logits of `transformers` by more than the
tolerance of the export's check.

Mistakes are planted in the map, one tensor kind at a time: shifted rows, a transposed matrix, swapped parts of an
entry, swapped tensors of two entries. Weights have std 0.2; logits are compared at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import ModelConfig, MoEConfig
from megatron.interop.hf.check import TOLERANCE
from megatron.interop.hf.exchange import Exchange, TensorLayout
from megatron.interop.hf.families import FAMILIES, by_model_type
from megatron.interop.hf.family import Facts, Family
from megatron.model.parameters import parameters
from tests.equivalence.test_hf_export import GPT2, LLAMA, NEOX, OLMO
from tests.equivalence.test_hf_moe import QWEN, SHAPE

transformers = pytest.importorskip("transformers")

ROWS = 23
SMALL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 32}
UNTIED = {"untie_embeddings_and_output_weights": True}
GROUPS = {"num_query_groups": 2, "kv_channels": 8}
EXPERTS = {"num_experts": 3, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (GPT2 | UNTIED, {}),
    # In turn: of parallel halves both biases are added to one sum, and to exchange them changes nothing.
    "gpt_neox": (NEOX | {"rotary_percent": 0.5, "use_parallel_residual": False}, {}),
    "llama": (LLAMA | {"num_query_groups": 2, "add_bias_linear": True}, {}),
    "mistral": (LLAMA | GROUPS | {"window_size": (5, 0)}, {}),
    "qwen2": (LLAMA | {"num_query_groups": 2, "add_qkv_bias": True}, {}),
    "qwen3": (LLAMA | GROUPS | {"qk_layernorm": True}, {}),
    "olmo2": (OLMO | GROUPS, {}),
    "mixtral": (SHAPE, EXPERTS),
    "qwen3_moe": (QWEN | {"kv_channels": 8}, EXPERTS),
}
Parts = tuple[Tensor, ...]


class Case:
    """A tiny model of one family, and the logits that `transformers` computes with its tensors."""

    def __init__(self, family: Family) -> None:
        settings, experts = MODELS[family.model_type]
        self.family = family
        self.config = ModelConfig(**{**settings, **SMALL, "ffn_hidden_size": 16})
        self.moe = MoEConfig(**experts)
        assert family.unsupported(self.config, self.moe) is None
        draw = torch.Generator().manual_seed(5)
        self.stored = {
            p.name: torch.randn(p.stored_shape, generator=draw) * 0.2 + float(p.name.endswith("layernorm.weight"))
            for p in parameters(self.config, ROWS, self.moe).values()
        }
        values = family.config_json(self.config, self.moe, Facts(ROWS, "float32", 32, {}))
        self._config = transformers.AutoConfig.for_model(**{k: v for k, v in values.items() if k != "torch_dtype"})
        self._class = getattr(transformers, family.architecture)
        self.tokens = torch.randint(0, ROWS, (2, 24), generator=draw)

    def tensors(self, changed: dict[str, TensorLayout] | None = None, kind: str = "") -> dict[str, Tensor]:
        """Tensors as an export writes them. `changed` entries apply only to tensors of `kind`."""
        found: dict[str, Tensor] = {}
        for exchange in self.family.exchanges(self.config, ROWS, self.moe):
            module, _, which = exchange.parameter.row.name.rpartition(".")
            if changed and which == kind and module in changed:
                exchange = replace(exchange, layout=changed[module])
            found |= exchange.to_hf(self.stored[exchange.parameter.name])
        return found

    def logits(self, tensors: dict[str, Tensor]) -> Tensor:
        model = self._class.from_pretrained(
            None, config=self._config, state_dict=tensors, attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            logits: Tensor = model.eval()(self.tokens).logits
        return logits

    def entries(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(our module, kind, stored shape), once for all layers and experts."""
        seen = set()
        for parameter in parameters(self.config, ROWS, self.moe).values():
            module, _, kind = parameter.row.name.rpartition(".")
            if (module, kind) not in seen:
                seen.add((module, kind))
                yield module, kind, parameter.stored_shape


@cache
def case_of(model_type: str) -> Case:
    return Case(by_model_type(model_type))


def changed(layout: TensorLayout, change: Callable[[Parts], Parts]) -> TensorLayout:
    return replace(layout, split=lambda ours, row: change(layout.split(ours, row)))


def next_rows(parts: Parts) -> Parts:
    return tuple(part.roll(1, 0) for part in parts)


def turned(parts: Parts) -> Parts:
    return tuple(part.t().reshape(part.shape) if part.dim() == 2 else part.flip(0) for part in parts)


def exchanged(parts: Parts) -> Parts:
    """Swaps the first two parts of equal shape."""
    found = list(parts)
    for one in range(len(found)):
        for other in range(one + 1, len(found)):
            if found[one].shape == found[other].shape:
                found[one], found[other] = found[other], found[one]
                return tuple(found)
    return parts


def mistakes(case: Case) -> Iterator[tuple[str, dict[str, TensorLayout], str]]:
    """(what is wrong, the wrong entries, of which kind of tensor)"""
    layouts, entries = case.family.tensors, list(case.entries())
    for number, (module, kind, shape) in enumerate(entries):
        layout = layouts[module]
        for change in (next_rows, turned, *([exchanged] if len(layout.modules) > 1 else [])):
            yield f"{module}.{kind} {change.__name__}", {module: changed(layout, change)}, kind
        for other, its_kind, its_shape in entries[number + 1 :]:
            single = len(layout.modules) == len(layouts[other].modules) == 1
            same_place = ("{expert}" in layout.modules[0]) == ("{expert}" in layouts[other].modules[0])
            layered = ("{layer}" in layout.modules[0]) == ("{layer}" in layouts[other].modules[0])
            if single and same_place and layered and (kind, shape) == (its_kind, its_shape):
                swapped = {
                    module: replace(layout, modules=layouts[other].modules),
                    other: replace(layouts[other], modules=layout.modules),
                }
                yield f"{module}.{kind} for {other}", swapped, kind


@pytest.mark.parametrize("family", [family.model_type for family in FAMILIES])
def test_every_mistake_in_a_map_changes_the_logits(family: str) -> None:
    case = case_of(family)
    right = case.tensors()
    expected = case.logits(right)
    unseen, planted = [], set()
    for what, entries, kind in mistakes(case):
        wrong = case.tensors(entries, kind)
        assert wrong.keys() == right.keys(), what
        if all(torch.equal(wrong[name], tensor) for name, tensor in right.items()):
            continue  # no mistake for these shapes
        planted.add(what.partition(" ")[0])
        difference = float((case.logits(wrong) - expected).abs().max() / expected.abs().max())
        if not difference > TOLERANCE:
            unseen.append(f"{what}: {difference:.1e}")
    assert not unseen, unseen
    assert planted == {f"{module}.{kind}" for module, kind, _ in case.entries()}


def test_every_tensor_of_a_model_comes_from_one_entry_and_goes_back() -> None:
    """Import inverts export for each entry; all numbers differ."""
    for family in FAMILIES:
        case = case_of(family.model_type)
        for exchange in family.exchanges(case.config, ROWS, case.moe):
            assert isinstance(exchange, Exchange)
            stored = torch.arange(torch.Size(exchange.parameter.stored_shape).numel(), dtype=torch.float64)
            stored = stored.view(exchange.parameter.stored_shape)
            theirs = exchange.to_hf(stored)
            assert sorted(torch.cat([t.flatten() for t in theirs.values()]).tolist()) == stored.flatten().tolist()
            assert torch.equal(exchange.from_hf(theirs.__getitem__), stored), exchange.parameter.name
