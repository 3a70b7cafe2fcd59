"""Contents of Megatron 23.06's `model_optim_rng.pt`; `model.parameters.classic_path` gives a parameter's place in it.

The model is nested three levels deep with a flat `encoder`, layer numbers restart on each pipeline stage, and `args` is
read by attribute. Megatron and the converter that transformers 4 shipped can read it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from megatron.config import ModelConfig
from megatron.layout import padded_vocab_size

CHECKPOINT_VERSION = 3.0


def nest(tensors: Mapping[tuple[str, ...], Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, tensor in tensors.items():
        branch = tree
        for part in key[:-1]:
            branch = branch.setdefault(part, {})
        branch[key[-1]] = tensor
    return tree


def lookup(tree: Any, key: Iterable[str]) -> Any:
    """The value at a path of the nested dict, or None."""
    for part in key:
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def attribute_dict(values: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Returns `args` that the weights-only loader accepts. Each value is also an attribute, as in
    `args.hidden_size`."""
    arguments: OrderedDict[str, Any] = OrderedDict((key, plain(value)) for key, value in values.items())
    arguments.__dict__.update(arguments)
    return arguments


def model_arguments(config: ModelConfig, vocab_size: int, tp: int) -> dict[str, Any]:
    """Returns the values of `args` that old converters read, under the names that these use."""
    tanh = config.activation == "gelu_tanh"
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "padded_vocab_size": padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, tp),
        "bias_gelu_fusion": tanh,  # converters take it for "GELU in its tanh form"
        "openai_gelu": tanh,
        "layernorm_epsilon": config.norm_epsilon,
        "untie_embeddings_and_output_weights": not config.tied,
        "swiglu": config.swiglu,
        "position_embedding_type": "rope" if config.positions == "rope" else "learned_absolute",
    }


def plain(value: Any) -> Any:
    """Converts a value to types that the weights-only loader accepts and JSON can represent. A value of any other type
    is a bug."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"a checkpoint holds plain values, not {type(value).__name__}")
