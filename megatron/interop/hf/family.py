"""Base class of the families of `transformers` models. Each family is a subclass in `families/`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError
from megatron.interop.hf.config_types import check_types
from megatron.interop.hf.exchange import Exchange, TensorLayout, gain_less_one
from megatron.model.parameters import parameters
from megatron.tokenizer.for_transformers import is_qwen2

Lacking = list[tuple[str, bool]]
"""List of (setting, True if this model has it), for each setting that a family cannot express."""

# Settings of biases that a family cannot express: an export writes zeros, and config.json keeps the settings for an
# import.
_OWN_KEY = "megatron_settings"
_OWN_SETTINGS = ("add_bias_linear", "add_qkv_bias")


@dataclass(frozen=True)
class Facts:
    """Facts that an export needs besides the model's shape."""

    vocab_size: int
    dtype: str  # "float32", "bfloat16", "float16"
    context: int  # positions that the model was trained for
    token_ids: Mapping[str, Any]
    """Special token ids for config.json: bos_token_id, eos_token_id and others."""


class Family(ABC):
    """Model class of `transformers`: which models it can express, its tensors, and reading and writing its
    config.json."""

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    tensors: ClassVar[Mapping[str, TensorLayout]]
    """Layouts, by the name of our module in the parameter table."""
    buffers: ClassVar[tuple[str, ...]] = ()
    """Name endings of buffers that old versions of transformers saved. They hold no weights."""
    always_biased: ClassVar[bool] = False
    """True if its linear layers have biases regardless of config.json."""
    tied_by_default: ClassVar[bool] = False
    """Value of tie_word_embeddings if config.json lacks it."""
    rebuilds_tokenizer: ClassVar[bool] = False
    """True if `transformers` 5.8 and later rebuild every tokenizer of this type as Qwen2's."""

    # ------------------------------------------------------------ which models

    @abstractmethod
    def lacks(self, c: ModelConfig) -> Lacking:
        """Lists settings of the model, except for its experts, that the family may lack."""

    def lacks_of_experts(self, c: ModelConfig, moe: MoEConfig) -> Lacking:
        return [(f"--num-experts {moe.num_experts}", moe.is_on)]

    def unsupported(self, config: ModelConfig, moe: MoEConfig) -> str | None:
        """Returns a setting of this model that the family cannot express; None if it expresses the model."""
        lacking = self.lacks_of_experts(config, moe) + self.lacks(config)
        return next((setting for setting, present in lacking if present), None)

    def keeps_tokenizer(self, tokenizer: Mapping[str, Any] | None) -> bool:
        """True if every version of `transformers` reads this tokenizer.json unchanged in a folder of this family."""
        return not self.rebuilds_tokenizer or tokenizer is None or is_qwen2(tokenizer)

    # ------------------------------------------------------------ weights

    def exchanges(self, config: ModelConfig, vocab_size: int, moe: MoEConfig | None = None) -> Iterator[Exchange]:
        """Yields the exchanges of all parameters of a model, in the order of the model."""
        for parameter in parameters(config, vocab_size, moe).values():
            module = parameter.row.name.rpartition(".")[0]
            yield Exchange(parameter, self.tensors[module], gain_less_one(config, parameter.name))

    def zero_biases(self, config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
        """Returns zeros for biases that the family has and this model lacks. They do not change the function."""
        if not self.always_biased:
            return {}
        ours = parameters(config, vocab_size)
        biased = self.exchanges(replace(config, add_bias_linear=True), vocab_size)
        missing = [exchange for exchange in biased if exchange.parameter.name not in ours]
        return {
            name: zeros
            for exchange in missing
            for name, zeros in exchange.to_hf(torch.zeros(exchange.parameter.stored_shape)).items()
        }

    def table(self, name: str) -> str:
        """Returns the family's name of one of our vocabulary tables."""
        module, _, kind = name.rpartition(".")
        return f"{self.tensors[module].modules[0]}.{kind}"

    # ------------------------------------------------------------ config.json

    def config_json(self, config: ModelConfig, moe: MoEConfig, facts: Facts) -> dict[str, Any]:
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": facts.vocab_size,
            "torch_dtype": facts.dtype,
            "tie_word_embeddings": config.tied,
            "initializer_range": config.init_method_std,
            "use_cache": True,
            **facts.token_ids,
            **self.model_to_json(config, facts.context),
            **self.experts_to_json(config, moe),
            _OWN_KEY: {
                "add_bias_linear": config.add_bias_linear,
                "add_qkv_bias": config.qkv_bias and not config.linear_bias,
            },
        }

    def read_config(self, values: Mapping[str, Any]) -> tuple[ModelConfig, MoEConfig]:
        """Returns the model that a config.json describes. Rejects unsupported settings."""
        check_types(values)
        if values.get("auto_map"):
            raise ConfigError("config.json: auto_map asks to run the model's own code, which is not supported")
        # No configuration class declares this key, but the attention masks of all models read it.
        refuse_unless(values, is_causal=True)
        try:
            given, moe = self.model_from_json(values), self.experts_from_json(values)
        except KeyError as error:
            raise ConfigError(f"config.json: {error.args[0]} is missing; add the model's") from error
        _check_heads(given)
        own = values.get(_OWN_KEY) or {}
        given |= {name: bool(own[name]) for name in _OWN_SETTINGS if name in own}
        given["untie_embeddings_and_output_weights"] = not values.get("tie_word_embeddings", self.tied_by_default)
        given["init_method_std"] = values.get("initializer_range", 0.02)
        config = ModelConfig(**given)
        _check_rotation(config)
        return config, moe

    @abstractmethod
    def model_to_json(self, config: ModelConfig, context: int) -> dict[str, Any]: ...

    @abstractmethod
    def model_from_json(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments of ModelConfig."""

    def not_taken_over(self, values: Mapping[str, Any]) -> str | None:
        """Returns a notice about a training setting in a config.json that is not imported; None if there is none."""
        return None

    def experts_to_json(self, config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
        return {}

    def experts_from_json(self, values: Mapping[str, Any]) -> MoEConfig:
        """Returns the settings of experts, without the weight of the load-balance loss, which belongs to training."""
        return MoEConfig()


def _check_heads(given: Mapping[str, Any]) -> None:
    heads, groups = given["num_attention_heads"], given.get("num_query_groups") or 1
    if (
        heads % groups
        or given.get("kv_channels") == 0
        or (not given.get("kv_channels") and given["hidden_size"] % heads)
    ):
        raise ConfigError(
            f"config.json: {heads} attention heads are not divisible by {groups} key-value heads, or the hidden size "
            f"{given['hidden_size']} is not divisible by {heads}; use the model's own config.json"
        )


def _check_rotation(config: ModelConfig) -> None:
    turned = int(config.head_dim * config.rotary_percent)
    if config.positions == "rope" and (turned < 2 or turned % 2):
        raise ConfigError(
            f"config.json: RoPE would rotate {config.rotary_percent:g} of the {config.head_dim} channels of a "
            f"head, that is {turned}; the number must be even and at least 2"
        )


def refuse_unless(values: Mapping[str, Any], **expected: Any) -> None:
    """Raises unless each setting is absent, or has the one value that we compute."""
    for name, usual in expected.items():
        if values.get(name, usual) != usual:
            raise ConfigError(f"config.json: {name} {values[name]!r:.60} is not supported; only {usual!r}")


def other_wirings(config: ModelConfig, *, parallel: bool = False, norms: str = "before") -> Lacking:
    """Lists layer wirings that the family lacks. `norms`: its --norm-placement; `parallel`: has parallel residuals."""
    return [
        ("--apply-residual-connection-post-layernorm", config.apply_residual_connection_post_layernorm),
        (f"--norm-placement {config.norm_placement}", config.norm_placement != norms),
        ("--use-parallel-residual", config.use_parallel_residual and not parallel),
    ]


def beyond_plain_layers(config: ModelConfig) -> Lacking:
    """Lists settings that a plain family lacks: it has LayerNorm, an MLP without a gate, a key for each head, and
    attention to the whole sequence."""
    return [
        (f"--normalization {config.normalization}", config.normalization != "LayerNorm"),
        ("--swiglu", config.swiglu),
        (f"--num-query-groups {config.query_groups}", config.query_groups != config.num_attention_heads),
        (f"--kv-channels {config.head_dim}", config.head_dim * config.num_attention_heads != config.hidden_size),
        ("--qk-layernorm", config.qk_layernorm),
        (f"--window-size {config.window}", config.window is not None),
    ]


def positions_flag(config: ModelConfig) -> str:
    kind = {"rope": "rope", "learned": "learned_absolute", "none": "none"}[config.positions]
    return f"--position-embedding-type {kind}"
