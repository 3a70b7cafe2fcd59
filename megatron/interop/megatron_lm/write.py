"""Writes a step for Megatron-LM's own loaders: its tree, names and order of parameters, for any TP and PP.

The files hold tensors, plain values and one `argparse.Namespace`, which the loaders require. Memory holds one tensor at
a time.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import classic, paths
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.found_step import FoundStep
from megatron.checkpoint.manifest import TensorRecord
from megatron.checkpoint.reader import StepReader
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError
from megatron.interop.conversion import Reading, Show, no_progress, written_aside
from megatron.interop.megatron_lm.megatron_args import their_args
from megatron.interop.megatron_lm.names import HEAD_COPY, Generation, their_name
from megatron.layout import nearest_divisors, padded_vocab_size
from megatron.model.parameters import HEAD_TABLE, VOCABULARY_TABLES, WORD_TABLE, Parameter, parameters
from megatron.state.division import Range, even_ranges
from megatron.state.shard import Shard, split_size, splits_columns
from megatron.torch_files.writer import write_torch_file
from megatron.utils import durable

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NOT_AT_23_06: Mapping[str, Callable[[ModelConfig, MoEConfig], bool]] = {
    "RMSNorm": lambda config, moe: config.normalization == "RMSNorm",
    "grouped-query attention": lambda config, moe: config.query_groups != config.num_attention_heads,
    "norms of queries and keys": lambda config, moe: config.qk_layernorm,
    "experts": lambda config, moe: moe.is_on,
    "YaRN": lambda config, moe: config.rope_scaling == "yarn",
    "RoPE base other than 10000": lambda config, moe: config.positions == "rope" and config.rotary_base != 10000,
    "attention within a window": lambda config, moe: config.window_size is not None,
    "bias of only queries, keys and values": lambda config, moe: config.add_qkv_bias and not config.linear_bias,
}
_NOT_IN_CORE: Mapping[str, Callable[[ModelConfig, MoEConfig], bool]] = {
    "residual connection after the norm": lambda config, moe: config.apply_residual_connection_post_layernorm,
    "tanh form of GELU without a bias": lambda config, moe: config.activation == "gelu_tanh" and not config.linear_bias,
}
_NOWHERE_THERE: Mapping[str, Callable[[ModelConfig], bool]] = {
    "parallel residual": lambda config: config.use_parallel_residual,
    "YaRN for a part of the head": lambda config: config.rope_scaling == "yarn" and config.rotary_percent != 1.0,
    "norm over all heads of queries": lambda config: config.qk_layernorm and config.qk_layernorm_scope != "head",
    "scaling of Llama 3 with other numbers than 1, 4 and 8192": lambda config: (
        config.rope_scaling == "llama3"
        and (config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_original_max_position)
        != (1.0, 4.0, 8192)
    ),
}
_NO_ROUTER_BIAS = (
    "note: Megatron-LM 0.16 expects a bias of each router if linear layers have biases; to load these weights "
    "there, add zeros as mlp.router.bias to each layer with experts. Megatron-LM 0.14 expects none and loads them "
    "unchanged"
)
_OF_LAYER_IN_CORE = ("input_layernorm", "self_attention.dense", "self_attention.query_key_value")
_OF_LAYER_IN_TE = ("self_attention.dense", "input_layernorm", "self_attention.query_key_value")


@dataclass(frozen=True)
class TargetLayout:
    tp: int = 1
    pp: int = 1
    names: Generation = "classic"

    def name_of(self, parameter: Parameter, layer: int, config: ModelConfig, moe: MoEConfig) -> str:
        """Returns Megatron-LM's name of a layer's parameter. `layer`: the layer's number on its stage."""
        with_experts = parameter.layer in moe.expert_layers(config.num_layers)
        their, in_core = (
            their_name(parameter.name, names, layer, parameter.expert, with_experts=with_experts)
            for names in (self.names, "core")
        )
        if their is None:
            raise ConfigError(
                f"--to megatron: Megatron-LM has no name for {parameter.name} among its {self.names} names; "
                f"give {'--to hf' if in_core is None else '--megatron-names core, or --to hf'}"
            )
        return their

    def check(self, config: ModelConfig, moe: MoEConfig, vocab_size: int) -> None:
        """Rejects a layout or names that this model cannot be written in."""
        divided = (config.query_groups, config.ffn_size, moe.moe_ffn_hidden_size or 0)
        for flag, size, parts, of in (
            ("--target-pipeline-parallel-size", self.pp, config.num_layers, "layers"),
            ("--target-tensor-parallel-size", self.tp, divided[0], "groups of heads"),
            ("--target-tensor-parallel-size", self.tp, divided[1], "columns of the MLP"),
            ("--target-tensor-parallel-size", self.tp, divided[2], "columns of an expert"),
        ):
            if parts % size:
                common = parts if flag.endswith("pipeline-parallel-size") else gcd(*divided)
                raise ConfigError(
                    f"{flag} {size}: does not divide the model's {parts} {of}; give "
                    f"{' or '.join(map(str, nearest_divisors(common, size)))}"
                )
        for parameter in parameters(config, vocab_size, moe).values():
            if parameter.layer is not None:
                self.name_of(parameter, parameter.layer, config, moe)


@dataclass(frozen=True)
class _Writer:
    found: FoundStep
    reader: StepReader
    config: ModelConfig
    moe: MoEConfig
    wanted: Mapping[str, Parameter]
    target: TargetLayout
    with_optimizer: bool
    reading: Reading

    @property
    def vocab_size(self) -> int:
        return self.wanted[WORD_TABLE].shape[0]

    @property
    def padded_rows(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.make_vocab_size_divisible_by, self.target.tp)

    def names(self, pp: int) -> Iterator[tuple[str, str]]:
        """Yields (our name, flat name there) of a stage's parameters, in the order of its modules."""
        each = self.config.num_layers // self.target.pp
        here = range(pp * each, (pp + 1) * each)
        first, last = pp == 0, pp == self.target.pp - 1
        ordered = sorted(self.wanted.values(), key=self._position)
        for parameter in ordered:
            name, layer = parameter.name, parameter.layer
            if layer is not None and layer in here:
                yield name, self.target.name_of(parameter, layer - here.start, self.config, self.moe)
            elif layer is None and (first if name.startswith("embedding.") else last):
                yield name, name
        if last and self.config.tied and self.target.pp > 1:
            yield WORD_TABLE, HEAD_COPY if self.target.names == "classic" else HEAD_TABLE

    def _position(self, parameter: Parameter) -> tuple[int, int]:
        """Position in Megatron-LM's order. Its later models create an output projection before the input projection."""
        order = {"classic": (), "core": _OF_LAYER_IN_CORE, "te": _OF_LAYER_IN_TE}[self.target.names]
        if parameter.layer is None:
            return (-1 if parameter.name.startswith("embedding.") else self.config.num_layers), 0
        module = parameter.name.split(".", 2)[2].rpartition(".")[0]
        return parameter.layer, order.index(module) if module in order else len(order) if order else 0

    def tensor(self, name: str, record: TensorRecord, tp: int) -> Tensor:
        """Returns a rank's slice in Megatron-LM's layout. The data is read only while the file is written."""
        row = self.wanted[name].row
        ranges: tuple[Range, ...] | None = None
        shape = row.stored_shape
        if name in VOCABULARY_TABLES:
            rows = self.padded_rows // self.target.tp
            ranges = ((min(tp * rows, self.vocab_size), min((tp + 1) * rows, self.vocab_size)),)
            shape = (rows, *shape[1:])
        elif row.split_dim is not None and self.target.tp > 1:
            whole = Shard(name, row.shape, row.split_dim, fold=row.fold)
            ranges = even_ranges(split_size(whole), self.target.tp, tp)
            at = len(shape) - 1 if splits_columns(whole, shape[0]) else 0
            shape = tuple(size // self.target.tp if dim == at else size for dim, size in enumerate(shape))
        spec = Shard(name, row.shape, row.split_dim or 0, ranges, fold=row.fold)
        dtype = getattr(torch, record.dtype.removeprefix("torch."))

        def read() -> Tensor:
            found = torch.zeros(shape, dtype=dtype)
            self.reader.fill(spec, found, record)
            return found

        return self.reading.tensor(name, shape, dtype, read)

    def content(self, tp: int, pp: int) -> dict[str, Any]:
        manifest, main = self.found.manifest, self.reader.main_file()
        names = list(self.names(pp))
        flat = {their: self.tensor(name, manifest.model[name], tp) for name, their in names}
        release = self.found.release or not self.with_optimizer
        step = 0 if release else manifest.step
        samples = {
            "iteration": step,
            "consumed_train_samples": 0 if release else manifest.consumed_train_samples,
            "consumed_valid_samples": 0 if release else manifest.consumed_valid_samples,
        }
        args = their_args(
            self.config, self.moe, self.vocab_size, tp=self.target.tp, pp=self.target.pp, others=manifest.args
        )
        if self.target.names != "classic":  # core models use the tanh form of GELU only if it is fused
            args |= {"bias_gelu_fusion": self.config.bias_gelu_fusion or self.config.activation == "gelu_tanh"}
        content = {
            "args": Namespace(**{name: classic.plain(value) for name, value in (args | samples).items()}),
            "checkpoint_version": classic.CHECKPOINT_VERSION,
            "iteration": step,
            "model": self._nested(flat),
        }
        if self.with_optimizer:
            content["optimizer"] = self._optimizer(names, flat, tp)
            content["opt_param_scheduler"] = classic.plain(main["opt_param_scheduler"])
        return content

    def _nested(self, flat: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.target.names != "classic":
            outside = ("embedding.", "output_layer.")
            return {name if name.startswith(outside) else f"decoder.{name}": tensor for name, tensor in flat.items()}
        tree: dict[tuple[str, ...], Tensor] = {}
        for name, tensor in flat.items():
            if name.startswith(("embedding.", "output_layer.")):
                tree["language_model", *name.split(".")] = tensor
            elif name == HEAD_COPY:
                tree[tuple(name.split("."))] = tensor
            else:
                tree["language_model", "encoder", name] = tensor
        return classic.nest(tree)

    def _optimizer(self, names: list[tuple[str, str]], flat: Mapping[str, Tensor], tp: int) -> dict[str, Any]:
        """Returns the state dict of a torch optimizer: numbered parameters, those with weight decay first."""
        records, extra = self.found.manifest.optimizer, self.reader.main_file()["optimizer"]["extra"]
        state: dict[int, dict[str, Tensor]] = {}
        groups: list[dict[str, Any]] = []
        masters: list[list[Tensor]] = []
        for decays in (True, False):
            chosen = [
                (name, their)
                for name, their in names
                if self.wanted[name].row.trained and (flat[their].dim() > 1 and not their.endswith(".bias")) == decays
            ]
            numbers = list(range(len(state), len(state) + len(chosen)))
            for number, (name, _) in zip(numbers, chosen, strict=True):
                state[number] = {kind: self.tensor(name, records[name][kind], tp) for kind in _MOMENTS}
            copies = [self.tensor(n, records[n]["master"], tp) for n, _ in chosen if "master" in records[n]]
            masters += [copies] if copies else []
            groups.append({**self._group(decays, int(extra["step"])), "params": numbers})
        inner = {"state": state, "param_groups": groups}
        if not masters:
            return inner
        scaler = dict(extra.get("loss_scaler") or {})
        return {"optimizer": inner, **({"grad_scaler": scaler} if scaler else {}), "fp32_from_fp16_params": masters}

    def _group(self, decays: bool, step: int) -> dict[str, Any]:
        """Returns a parameter group with all options, because torch's load replaces the whole group."""
        settings = self.found.manifest.config.get("optimizer", {})
        curves = self.reader.main_file()["opt_param_scheduler"]
        rate = float(curves.get("max_lr", 0.0))
        return {
            "lr": rate,
            "max_lr": rate,
            "min_lr": float(curves.get("min_lr", 0.0)),
            "betas": (float(settings.get("adam_beta1", 0.9)), float(settings.get("adam_beta2", 0.999))),
            "eps": float(settings.get("adam_eps", 1e-8)),
            "weight_decay": float(curves.get("end_wd", 0.01)) if decays else 0.0,
            "wd_mult": 1.0 if decays else 0.0,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "step": step,
        }


def to_megatron(
    found: FoundStep, save: Path, target: TargetLayout, show: Show = no_progress, log: Callable[[str], object] = print
) -> Path:
    """Writes to a temporary directory and renames it, so a directory named `save` is always complete."""
    writer = _plan(found, target, Reading(show), log)
    name = paths.step_name(found.manifest.step) if writer.with_optimizer else paths.RELEASE
    contents = {}
    for tp in range(target.tp):
        for pp in range(target.pp):
            rank = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if target.pp > 1 else "")
            contents[rank] = writer.content(tp, pp)
    with written_aside(save, "writing for Megatron-LM") as temporary:
        for rank, content in contents.items():
            durable.make_directory(temporary / name / rank)
            with open(temporary / name / rank / paths.MODEL_FILE, "xb") as file:
                write_torch_file(content, file)
        paths.write_tracker(temporary, str(found.manifest.step) if writer.with_optimizer else paths.RELEASE)
    return save / name


def _plan(found: FoundStep, target: TargetLayout, reading: Reading, log: Callable[[str], object]) -> _Writer:
    manifest = found.manifest
    if "model" not in manifest.config or WORD_TABLE not in manifest.model:
        raise ConfigError(
            f"--to megatron: {found.directory} holds no GPT of this project; give a native checkpoint of a GPT"
        )
    config, moe = model_config(manifest.config["model"]), moe_config(manifest.config)
    vocab_size = manifest.model[WORD_TABLE].logical_shape[0]
    target.check(config, moe, vocab_size)
    wanted = parameters(config, vocab_size, moe)
    lacking = [what for what, has in _NOT_AT_23_06.items() if target.names == "classic" and has(config, moe)]
    if lacking:
        log(f"note: Megatron-LM 23.06 has no {', '.join(lacking)}; for its later models give --megatron-names core")
    nowhere = [what for what, has in _NOWHERE_THERE.items() if has(config)]
    nowhere += [what for what, has in _NOT_IN_CORE.items() if target.names != "classic" and has(config, moe)]
    if nowhere:
        log(f"note: Megatron-LM has no {', no '.join(nowhere)}; with these weights it would compute other results")
    if moe.is_on and config.linear_bias:
        log(_NO_ROUTER_BIAS)
    trained = [name for name, parameter in wanted.items() if parameter.row.trained]
    adam = all(set(_MOMENTS) <= set(manifest.optimizer.get(name, {})) for name in trained)
    if not adam:
        what = "is not Adam's" if manifest.optimizer else "is not in this checkpoint"
        log(f"note: the optimizer's state {what}; only the weights are written, as a release")
    return _Writer(found, found.reader(), config, moe, wanted, target, adam and not found.release, reading)
