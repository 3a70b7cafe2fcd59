"""Makes a manifest for a checkpoint that Megatron-LM wrote, so that loading, converting and generating read it like a
native step."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.reader import StepReader
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm import classic_tree, optimizer_state
from megatron.interop.megatron_lm.advice import NOT_A_GPT, SAVE_AGAIN
from megatron.interop.megatron_lm.classic_tree import ClassicTree, SliceLocation
from megatron.interop.megatron_lm.megatron_args import settings_from_args, true_vocabulary
from megatron.interop.megatron_lm.optimizer_state import UnknownOptimizerError
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, Parameter, parameters
from megatron.state.division import Range
from megatron.state.shard import Shard
from megatron.torch_files.member_checks import MemberChecks
from megatron.torch_files.torch_file import TorchFile, plain_values

Sources = dict[tuple[str, tuple[str, ...]], Callable[[], Tensor]]
"""Function that reads a slice, by the slice's file and key."""
_MOST_LAYERS = 100_000
"""Largest accepted number of layers plus experts. It is checked before the names of all tensors are generated."""


@dataclass(frozen=True)
class MegatronStep:
    """A step of Megatron-LM. Its `manifest` lists no files and checksums; `reader` reads the slices."""

    manifest: Manifest
    reader: StepReader
    optimizer_problem: str | None = None
    """Reason why the optimizer's state cannot be read; None if it can, or if there is none."""

    def with_vocabulary(self, rows: int) -> "MegatronStep":
        """Keeps `rows` rows of the vocabulary tables, without padding. (The checkpoint's args may lack this number.)"""
        tables = {name: self.manifest.model[name] for name in VOCABULARY_TABLES if name in self.manifest.model}
        if any(sum(piece.shape[0] for piece in record.slices) < rows for record in tables.values()):  # with padding
            return self

        def cut(name: str, record: TensorRecord) -> TensorRecord:
            return cut_vocabulary(record, rows) if name in VOCABULARY_TABLES else record

        model = {name: cut(name, record) for name, record in self.manifest.model.items()}
        optimizer = {
            name: {kind: cut(name, record) for kind, record in kinds.items()}
            for name, kinds in self.manifest.optimizer.items()
        }
        config = {**self.manifest.config, "tokenizer": {"vocab_size": rows}}
        manifest = replace(self.manifest, model=model, optimizer=optimizer, config=config)
        self.reader.manifest = manifest
        return replace(self, manifest=manifest)


def cut_vocabulary(record: TensorRecord, rows: int) -> TensorRecord:
    """Returns the record of a table of `rows` true rows, in the same slices; a rank's rows beyond them are padding."""
    slices, start = [], 0
    for piece in record.slices:
        stop = start + piece.shape[0]
        ranges = None if piece.ranges is None else ((min(start, rows), min(stop, rows)),)
        slices.append(replace(piece, ranges=ranges))
        start = stop
    return replace(record, logical_shape=(rows, *record.logical_shape[1:]), slices=tuple(slices))


@dataclass
class ClassicReader(StepReader):
    """Reads the slices from the ranks' files. `main` has what a native file holds besides tensors."""

    directory: Path
    manifest: Manifest
    main: Mapping[str, Any]
    sources: Sources

    def elements(self, spec: Shard, record: TensorRecord, piece: Slice, held: Range) -> Tensor:
        return self.sources[piece.file, piece.key]().reshape(-1)[held[0] : held[1]]

    def main_name(self) -> str:
        return paths.MODEL_FILE

    def file(self, name: str) -> Mapping[str, Any]:
        return self.main


def is_classic(directory: Path) -> bool:
    """Returns True for a tree without a manifest: a step of Megatron-LM, or a native step whose manifest is lost."""
    if not paths.is_plain_directory(directory) or (directory / paths.MANIFEST).exists():
        return False
    return any(entry.name.startswith("mp_rank_") for entry in directory.iterdir())


def open_classic(directory: Path, checks: MemberChecks | None) -> MegatronStep | None:
    """Opens a step of Megatron-LM; None for a native step."""
    tree = classic_tree.open_tree(directory, checks)
    if "has_manifest" in tree.first.content:
        return None
    model = described_model(directory, tree.args, tree.layers(), lambda: _table_rows(tree), core=tree.is_core)
    sources: Sources = {}
    records, places = _weights(tree, model, sources)
    used = {place for held in places.values() for place in held.values()}
    refuse_unknown_tensors(directory, tree.unknown(used, tied=model.config.tied))
    if model.config.tied and tree.pp > 1:
        tree.refuse_another_head()
    return opened_step(
        directory,
        tree.first,
        tree.first.content,
        tree.args,
        model,
        records,
        lambda: _optimizer(tree, model.wanted, records, places, sources),
        sources,
    )


@dataclass(frozen=True)
class DescribedModel:
    """Model that a checkpoint's args describe: its settings, as in a manifest, and its parameters."""

    settings: dict[str, dict[str, Any]]
    config: ModelConfig
    moe: MoEConfig
    wanted: Mapping[str, Parameter]


def described_model(
    directory: Path, args: Mapping[str, Any], layers: int, rows: Callable[[], int], *, core: bool
) -> DescribedModel:
    """Builds the model from the args. Files have `layers` layers, and `rows` padded rows of the token embedding."""
    settings = settings_from_args(args, directory, core=core)
    config, moe = model_config(settings["model"]), moe_config(settings)
    experts = len(moe.expert_layers(min(config.num_layers, _MOST_LAYERS))) * (moe.num_experts or 0)
    if config.num_layers != layers:
        raise CheckpointError(
            f"{directory}: its args have {config.num_layers} layers, but its files have {layers}; {SAVE_AGAIN}"
        )
    if layers + experts > _MOST_LAYERS:  # before generating all names
        raise CheckpointError(
            f"{directory}: its args have {layers} layers and {experts} experts in all; at most {_MOST_LAYERS} together "
            "can be read"
        )
    vocabulary = true_vocabulary(args, rows())
    settings["tokenizer"]["vocab_size"] = vocabulary
    return DescribedModel(settings, config, moe, parameters(config, vocabulary, moe))


def refuse_unknown_tensors(directory: Path, names: Iterable[str]) -> None:
    """Rejects tensors that belong to no parameter of the model."""
    unknown = sorted(set(names))
    if bias := next((name for name in unknown if name.endswith(".mlp.router.bias")), None):
        raise CheckpointError(
            f"{directory}: its routers have a bias, {bias}, which is not supported; choose another model"
        )
    if unknown:
        raise CheckpointError(
            f"{directory} has tensors that its args do not describe: {', '.join(unknown[:6])}; {SAVE_AGAIN}"
        )


def _table_rows(tree: ClassicTree) -> int:
    rows = 0
    for tp in range(tree.tp):
        at = classic_tree.ModelRank(tp, 0, 0)
        table = tree.chunks[at][0].tensors.get(WORD_TABLE)
        if table is None:
            raise CheckpointError(f"{tree.directory} has no {WORD_TABLE} on its first stage; {NOT_A_GPT}")
        rows += tree.files[at].shape(table)[0]
    return rows


def _weights(
    tree: ClassicTree, model: DescribedModel, sources: Sources
) -> tuple[dict[str, TensorRecord], dict[str, dict[Slice, SliceLocation]]]:
    records: dict[str, TensorRecord] = {}
    places: dict[str, dict[Slice, SliceLocation]] = {}
    for name, parameter in model.wanted.items():
        records[name], places[name] = tree.record(parameter, model.moe.num_experts or 1)
        for piece, place in places[name].items():
            chunk = next(chunk for chunk in tree.chunks[place.at] if chunk.key == place.chunk)
            read = partial(tree.files[place.at].tensor, chunk.tensors[place.name])
            sources[piece.file, piece.key] = _source(tree, parameter, read)
    return records, places


def _source(tree: ClassicTree, parameter: Parameter, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: tree.ours(parameter, read())


def _optimizer(
    tree: ClassicTree,
    wanted: Mapping[str, Parameter],
    records: Mapping[str, TensorRecord],
    places: Mapping[str, Mapping[Slice, SliceLocation]],
    sources: Sources,
) -> dict[str, dict[str, TensorRecord]]:
    """Returns the records of the optimizer's tensors, each split like its weight."""
    entries = {at: optimizer_state.of_rank(tree, at) for at in tree.files}
    if not any(entries.values()):
        return {}
    found: dict[str, dict[str, TensorRecord]] = {}
    for name, parameter in wanted.items():
        if not parameter.row.trained:
            continue
        held = {piece: entries[place.at].get((place.chunk, place.name), {}) for piece, place in places[name].items()}
        kinds = set.intersection(*(set(each) for each in held.values()))
        if not {"exp_avg", "exp_avg_sq"} <= kinds:
            raise UnknownOptimizerError(f"{tree.directory} has no optimizer state of {name}; {SAVE_AGAIN}")
        for kind in sorted(kinds):
            slices = []
            for piece in places[name]:
                entry, key = held[piece][kind], (*piece.key, kind)
                sources[piece.file, key] = _source(tree, parameter, entry.tensor)
                slices.append(replace(piece, key=key))
            dtype = str(next(iter(held.values()))[kind].dtype)
            found.setdefault(name, {})[kind] = replace(records[name], dtype=dtype, slices=tuple(slices))
    return found


def opened_step(
    directory: Path,
    file: TorchFile,
    content: Mapping[str, Any],
    args: Mapping[str, Any],
    model: DescribedModel,
    records: Mapping[str, TensorRecord],
    read_optimizer: Callable[[], Mapping[str, Mapping[str, TensorRecord]]],
    sources: Sources,
) -> MegatronStep:
    """Builds the step. `content` has what is not a tensor; `read_optimizer` adds tensors to `sources`."""
    optimizer: Mapping[str, Mapping[str, TensorRecord]] = {}
    problem = None
    try:
        optimizer = read_optimizer()
    except UnknownOptimizerError as error:
        problem = str(error)
    step = content.get("iteration", 0)
    step = step if type(step) is int and step >= 0 else paths.step_of(directory.name) or 0
    batch = _count(args, "global_batch_size")
    manifest = Manifest(
        step=step,
        consumed_train_samples=_count(args, "consumed_train_samples", step * batch),  # not in the oldest
        consumed_valid_samples=_count(args, "consumed_valid_samples"),
        run_id="megatron-lm",
        layout={},
        versions={},
        fingerprint={},
        data={},
        config=model.settings,
        args=args,
        files={},
        model=records,
        optimizer=optimizer,
        holds=("optimizer",) if optimizer else (),
    )
    scheduler = plain_values(content.get("opt_param_scheduler") or content.get("lr_scheduler")) or {}
    main = {  # what a native file has besides tensors
        "optimizer": {"extra": optimizer_state.extra_state(content.get("optimizer"), manifest.step, file)},
        "opt_param_scheduler": {"num_steps": manifest.consumed_train_samples, **scheduler},
    }
    return MegatronStep(manifest, ClassicReader(directory, manifest, main, sources), problem)


def _count(args: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and value >= 0 else otherwise
