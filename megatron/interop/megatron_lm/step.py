"""A step that Megatron-LM wrote, described as a step of ours: with a manifest that is made from its files, so that
loading, converting and generating read it as they read their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint import paths
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.manifest import Manifest, Slice, TensorRecord
from megatron.checkpoint.member_checks import MemberChecks
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.torch_files import TorchFile, plain_values
from megatron.config import ModelConfig, MoEConfig
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm import classic_tree, optimizer_state
from megatron.interop.megatron_lm.classic_tree import ClassicTree, SliceLocation
from megatron.interop.megatron_lm.megatron_args import settings_from_args, true_vocabulary
from megatron.model.parameters import VOCABULARY_TABLES, WORD_TABLE, Parameter, parameters
from megatron.state.division import Range
from megatron.state.shard import Shard

_MOST_LAYERS = 100_000
"""Layers and experts together; a file that describes more has no tensors for them."""


@dataclass(frozen=True)
class MegatronStep:
    """`manifest` without files and checksums; what it calls slices is read by `reader`."""

    manifest: Manifest
    reader: StepReader
    optimizer_problem: str | None = None
    """Why the optimizer's state, which is there, cannot be read."""

    def with_vocabulary(self, rows: int) -> MegatronStep:
        """Its tables have padding rows, and its args do not say from which row on."""
        tables = {name: self.manifest.model[name] for name in VOCABULARY_TABLES if name in self.manifest.model}
        if any(held_rows(record) < rows for record in tables.values()):
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


def held_rows(record: TensorRecord) -> int:
    """The rows of a vocabulary table with its padding."""
    return sum(piece.shape[0] for piece in record.slices)


def cut_vocabulary(record: TensorRecord, rows: int) -> TensorRecord:
    """The same slices of a table of `rows` true rows: what a rank holds beyond them is padding."""
    slices, start = [], 0
    for piece in record.slices:
        stop = start + piece.shape[0]
        ranges = None if piece.ranges is None else ((min(start, rows), min(stop, rows)),)
        slices.append(replace(piece, ranges=ranges))
        start = stop
    return replace(record, logical_shape=(rows, *record.logical_shape[1:]), slices=tuple(slices))


@dataclass
class ClassicReader(StepReader):
    """Reads the slices out of the ranks' files. `main`: what a file of ours has besides its tensors."""

    directory: Path
    manifest: Manifest
    main: Mapping[str, Any]
    sources: Mapping[tuple[str, tuple[str, ...]], Callable[[], Tensor]] = field(default_factory=dict)
    """By the file and key of a slice."""

    def elements(self, spec: Shard, record: TensorRecord, piece: Slice, held: Range) -> Tensor:
        return self.sources[piece.file, piece.key]().reshape(-1)[held[0] : held[1]]

    def main_name(self) -> str:
        return paths.MODEL_FILE

    def file(self, name: str) -> Mapping[str, Any]:
        return self.main


def is_classic(directory: Path) -> bool:
    """Whether it has the tree of Megatron-LM and no manifest: then it is theirs, or a step of ours that lost it."""
    if not paths.is_plain_directory(directory) or (directory / paths.MANIFEST).exists():
        return False
    return any(entry.name.startswith("mp_rank_") for entry in directory.iterdir())


def open_classic(directory: Path, checks: MemberChecks | None) -> MegatronStep | None:
    """None: a step of ours."""
    tree = classic_tree.open_tree(directory, checks)
    if "has_manifest" in tree.first.content:
        return None
    settings = settings_from_args(tree.args, directory, core=tree.is_core)
    config, moe = model_config(settings["model"]), moe_config(settings)
    check_size(directory, config, moe, tree.layers())
    rows = _table_rows(tree)
    vocabulary = true_vocabulary(tree.args, rows)
    settings["tokenizer"]["vocab_size"] = vocabulary
    wanted = parameters(config, vocabulary, moe)
    sources: dict[tuple[str, tuple[str, ...]], Callable[[], Tensor]] = {}
    records, places = _weights(tree, wanted, moe, sources)
    used = {place for held in places.values() for place in held.values()}
    refuse_unknown_tensors(directory, tree.unknown(used, tied=config.tied))
    if config.tied and tree.pp > 1:
        tree.refuse_another_head()
    optimizer, problem = {}, None
    try:
        optimizer = _optimizer(tree, wanted, records, places, sources)
    except optimizer_state.UnknownOptimizerError as error:
        problem = str(error)
    manifest = foreign_manifest(directory, tree.first.content, tree.args, settings, records, optimizer)
    main = main_content(tree.first, tree.first.content, manifest)
    return MegatronStep(manifest, ClassicReader(directory, manifest, main, sources), problem)


def check_size(directory: Path, config: ModelConfig, moe: MoEConfig, held: int) -> None:
    """Before the names of all parameters are written out."""
    described = len(moe.expert_layers(min(config.num_layers, _MOST_LAYERS))) * (moe.num_experts or 0)
    if config.num_layers != held or config.num_layers + described > _MOST_LAYERS:
        raise CheckpointError(f"{directory}: its args say {config.num_layers} layers, its files have {held}")


def refuse_unknown_tensors(directory: Path, names: Iterable[str]) -> None:
    """Tensors that belong to no parameter of ours."""
    unknown = sorted(set(names))
    if bias := next((name for name in unknown if name.endswith(".mlp.router.bias")), None):
        raise CheckpointError(f"{directory}: its routers have a bias, {bias}, which is not supported")
    if unknown:
        raise CheckpointError(
            f"{directory} has tensors that the model of its args does not have: {', '.join(unknown[:6])}"
        )


def _table_rows(tree: ClassicTree) -> int:
    rows = 0
    for tp in range(tree.tp):
        at = classic_tree.ModelRank(tp, 0, 0)
        table = tree.chunks[at][0].tensors.get(WORD_TABLE)
        if table is None:
            raise CheckpointError(f"{tree.directory} has no {WORD_TABLE} on its first stage")
        rows += tree.files[at].shape(table)[0]
    return rows


def _weights(
    tree: ClassicTree,
    wanted: Mapping[str, Parameter],
    moe: MoEConfig,
    sources: dict[tuple[str, tuple[str, ...]], Callable[[], Tensor]],
) -> tuple[dict[str, TensorRecord], dict[str, dict[Slice, SliceLocation]]]:
    records: dict[str, TensorRecord] = {}
    places: dict[str, dict[Slice, SliceLocation]] = {}
    for name, parameter in wanted.items():
        records[name], places[name] = tree.record(parameter, moe.num_experts or 1)
        for piece, place in places[name].items():
            stored = classic_chunk(tree, place).tensors[place.name]
            sources[piece.file, piece.key] = _source(tree, parameter, place, stored)
    return records, places


def classic_chunk(tree: ClassicTree, place: SliceLocation) -> classic_tree.ModelChunk:
    return next(chunk for chunk in tree.chunks[place.at] if chunk.key == place.chunk)


def _source(tree: ClassicTree, parameter: Parameter, place: SliceLocation, stored: Any) -> Callable[[], Tensor]:
    return lambda: tree.ours(parameter, tree.files[place.at].tensor(stored))


def _optimizer(
    tree: ClassicTree,
    wanted: Mapping[str, Parameter],
    records: Mapping[str, TensorRecord],
    places: Mapping[str, Mapping[Slice, SliceLocation]],
    sources: dict[tuple[str, tuple[str, ...]], Callable[[], Tensor]],
) -> dict[str, dict[str, TensorRecord]]:
    """Records of the optimizer's tensors, each split as its weight is."""
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
            raise optimizer_state.UnknownOptimizerError(
                f"{tree.directory} has no optimizer state of {name}; give --no-load-optim to go on without, or "
                "--finetune to take the weights alone"
            )
        for kind in sorted(kinds):
            slices = []
            for piece in places[name]:
                entry, key = held[piece][kind], (*piece.key, kind)
                sources[piece.file, key] = _entry_source(tree, parameter, entry)
                slices.append(replace(piece, key=key))
            dtype = str(next(iter(held.values()))[kind].dtype)
            found.setdefault(name, {})[kind] = replace(records[name], dtype=dtype, slices=tuple(slices))
    return found


def _entry_source(tree: ClassicTree, parameter: Parameter, entry: optimizer_state.StoredTensor) -> Callable[[], Tensor]:
    return lambda: tree.ours(parameter, entry.tensor())


def foreign_manifest(
    directory: Path,
    content: Mapping[str, Any],
    args: Mapping[str, Any],
    settings: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    optimizer: Mapping[str, Mapping[str, TensorRecord]],
) -> Manifest:
    step = content.get("iteration", 0)
    step = step if type(step) is int and step >= 0 else paths.step_of(directory.name) or 0
    batch = _count(args, "global_batch_size")
    return Manifest(
        step=step,
        consumed_train_samples=_count(args, "consumed_train_samples", step * batch),  # the oldest do not count them
        consumed_valid_samples=_count(args, "consumed_valid_samples"),
        run_id="megatron-lm",
        layout={},
        versions={},
        fingerprint={},
        data={},
        config=settings,
        args=args,
        files={},
        model=records,
        optimizer=optimizer,
        holds=("optimizer",) if optimizer else (),
    )


def _count(args: Mapping[str, Any], name: str, otherwise: int = 0) -> int:
    value = args.get(name)
    return value if isinstance(value, int) and value >= 0 else otherwise


def main_content(file: TorchFile, content: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """What a file of ours has besides its tensors."""
    scheduler = plain_values(content.get("opt_param_scheduler") or content.get("lr_scheduler")) or {}
    return {
        "optimizer": {"extra": optimizer_state.extra_state(content.get("optimizer"), manifest.step, file)},
        "opt_param_scheduler": {"num_steps": manifest.consumed_train_samples, **scheduler},
    }
