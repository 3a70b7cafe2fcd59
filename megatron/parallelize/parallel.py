"""`parallelize`: builds the model of one rank from the plain model and the layout."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from megatron.config import MoEConfig, ParallelConfig
from megatron.config.stages import StageLayers, stage_layers
from megatron.data_parallel import FullySharded
from megatron.distributed.parallel_state import Axis, ParallelState
from megatron.errors import ConfigError
from megatron.model.factory import ModuleFactory
from megatron.model.gpt import GPT, Stage
from megatron.model.inventory import inventory
from megatron.model.parameters import Parameter, Row, counted_rows
from megatron.model.passes import Batch, ForwardStep, Passes, SinglePass, shape_of
from megatron.model.wgrads import WgradQueue, WgradRoute
from megatron.parallelize.factory import ParallelFactory
from megatron.parallelize.specs import Cut, Held, Part, foreign_specs, held_specs, in_order_of, whole_parts
from megatron.pipeline_parallel.links import Links
from megatron.pipeline_parallel.pass_recorder import PassRecorder
from megatron.pipeline_parallel.pipeline import BoundStage, HiddenLike, Pipeline
from megatron.pipeline_schedules import SCHEDULES, schedule_of
from megatron.state.division import even_ranges
from megatron.state.shard import Shard
from megatron.utils.dtype import default_dtype


@dataclass(frozen=True)
class Parallel:
    """The part of the model that one rank trains, and how it runs."""

    model: nn.Module
    """This rank's part of the model. Parameters keep their names in the whole model."""
    specs: Mapping[str, Shard]
    """The shard of each parameter and of each persistent buffer."""
    passes: Passes
    """Runs micro-batches through the model."""
    wgrads: WgradRoute = field(default_factory=WgradRoute)
    """Receives the factors of the linear layers' weight gradients, to compute the products later or in place; otherwise
    autograd computes these gradients."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Each parameter's row of the parameter table; empty for a foreign model."""
    fields: Set[str] | None = None
    """The fields of a batch that this rank uses, if the batch has them; None: all."""
    divided: FullySharded | None = None
    """The sharded weights under ZeRO 2 and 3; None if each data-parallel rank holds whole weights."""

    def parts(self) -> Iterator[Part]:
        """Yields the stored part of every parameter on this rank."""
        divided, specs = self.divided, self.specs
        if divided is None:
            return whole_parts(self.model, specs)
        shards = (replace(specs[name], division=divided.divisions[name]) for name in divided.all_names)
        return ((shard, divided.weight(shard.name).view(-1), divided.dtype) for shard in shards)


def parallelize(
    model: nn.Module,
    config: ParallelConfig,
    state: ParallelState,
    forward_step: ForwardStep,
    *,
    device: torch.device,
    dtype: torch.dtype,
    made_on: torch.device | None = None,
) -> Parallel:
    """Builds this rank's part of the model.

    A foreign model (any module but the package's GPT) is used unchanged, and so is a GPT whose layout splits nothing.
    Otherwise new modules with uninitialised weights are made on `made_on` (default: `device`). `model` then only
    describes them, and should be on the meta device.
    """
    if not isinstance(model, GPT):
        check_not_split(model, config)
        return Parallel(model, foreign_specs(model), SinglePass(model, forward_step))
    table, layers = model.table(), stage_layers(model.config.num_layers, config)
    held, cut = _held(model.make.moe, layers, state), Cut(state.tp, model.padded_vocab_size, config.splits_sequence)
    specs = held_specs(table, held, cut, state, tied=model.config.tied)
    rows = {name: table[name].row for name in specs}
    if is_plain(state):
        specs = in_order_of(model, specs, all_there=False)
        return Parallel(model, specs, SinglePass(model, forward_step), model.make.wgrads, rows)
    check_unchanged(model, layers)
    queued = state.pp.size > 1 and SCHEDULES[config.schedule].defers_wgrads
    wgrads = WgradQueue() if queued else WgradRoute()
    with default_dtype(dtype), made_on or device:
        make = ParallelFactory(model.make, table, specs, config, state, held.experts, device, wgrads)
        part = _part_of(model, held, make)
    specs, described = in_order_of(part, specs), dict(model.named_parameters())
    for name, parameter in part.named_parameters():
        assert parameter.shape == specs[name].stored, f"{name}: {parameter.shape}, {specs[name].stored}"
        if not described[name].requires_grad:
            parameter.requires_grad_(False)
            specs[name] = replace(specs[name], replica_axes=())
    if state.pp.size == 1:
        return Parallel(part, specs, SinglePass(part, forward_step), wgrads, rows)
    sharing = state.tp.size if config.splits_sequence else 1
    hidden_like = partial(_hidden_like, part, device, dtype, sharing)
    stages = _stages(part, layers, state)
    pipeline = _connected_pipeline(stages, config, state, device, forward_step, hidden_like, wgrads)
    return Parallel(part, specs, pipeline, wgrads, rows, stage_fields(part, state.pp))


def _part_of(model: GPT, held: Held, make: ParallelFactory) -> GPT:
    """Makes a GPT with this rank's layers of the whole `model`, from the modules of `make`."""
    return type(model)(
        model.config,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size,
        kernels=model.make.kernels,
        layers=held.layers,
        first=held.first,
        last=held.last,
        make=make,
    )


def _connected_pipeline(
    stages: Sequence[Callable[..., Tensor]],
    config: ParallelConfig,
    state: ParallelState,
    device: torch.device,
    forward_step: ForwardStep,
    hidden_like: HiddenLike,
    wgrads: WgradRoute,
) -> Pipeline:
    """Makes the pipeline over these stages and connects its links to the neighbouring ranks. All ranks of the
    pipeline must call it together."""
    pp = state.pp
    links = Links(pp, state.pp_links)
    links.connect(device)
    return Pipeline(
        stages,
        pp,
        schedule_of(config.schedule, config.micro_batch_group),
        loss_step=forward_step,
        hidden_step=_hidden_step,
        hidden_like=hidden_like,
        wgrad_queue=wgrads if isinstance(wgrads, WgradQueue) else None,
        links=links,
        recorder=None if config.pipeline_trace is None else PassRecorder(),
    )


def stage_fields(part: GPT, pp: Axis) -> Set[str] | None:
    """Returns the fields of a batch that a pipeline rank uses; None: all.

    The last rank, which runs the script's forward step, and a model with a custom forward may use any field. On ranks
    without tokens, `position_ids` give the shape of the batch. Router losses need `loss_mask`, because they count the
    same tokens as the loss.
    """
    if pp.rank == pp.size - 1 or type(part).forward is not GPT.forward:
        return None
    fields = {"position_ids", "document_ids"}
    if pp.rank == 0:
        fields.add("tokens")
    if part.routers is not None and part.routers.has_losses:
        fields.add("loss_mask")
    return fields


def check_can_be_split(model: nn.Module, config: ParallelConfig, state: ParallelState) -> None:
    """Rejects a model that `parallelize` would reject in this layout."""
    if not isinstance(model, GPT):
        check_not_split(model, config)
    elif not is_plain(state):
        check_unchanged(model, stage_layers(model.config.num_layers, config))


def held_parameters(
    model: nn.Module, config: ParallelConfig, state: ParallelState, moe: MoEConfig | None = None
) -> int:
    """Number of parameters that a rank will hold, padding included. It is computed from the rows of the table, without
    building a model. `moe`: the experts of the whole model, if `model` was made with fewer."""
    if not isinstance(model, GPT) or (is_plain(state) and moe is None):
        return sum(parameter.numel() for parameter in model.parameters())
    moe, layers = moe or model.make.moe, stage_layers(model.config.num_layers, config)
    held, cut = _held(moe, layers, state), Cut(state.tp, model.padded_vocab_size, config.splits_sequence)
    rows = counted_rows(model.config, model.vocab_size, moe, held.layers, len(held.experts))
    return sum(
        count * prod(cut.stored_shape(row, cut.spec(Parameter(row))))
        for row, count in rows
        if row.trained and ("{layer}" in row.name or held.has(Parameter(row), tied=model.config.tied))
    )


def is_plain(state: ParallelState) -> bool:
    """True if every rank trains the plain model: it holds all weights and sees whole sequences."""
    return state.model.size == state.ep.size == state.cp.size == 1


def _held(moe: MoEConfig, layers: StageLayers, state: ParallelState) -> Held:
    ((first, last),) = even_ranges(moe.num_experts or 0, state.ep.size, state.ep.rank)
    mine = tuple(layer for run in layers.of_rank(state.pp.rank) for layer in run)
    return Held(mine, range(first, last), first=state.pp.rank == 0, last=state.pp.rank == state.pp.size - 1)


def _stages(part: GPT, layers: StageLayers, state: ParallelState) -> list[Callable[..., Tensor]]:
    """Returns the stages of this rank, in model order."""
    runs, last = layers.of_rank(state.pp.rank), state.pp.rank == state.pp.size - 1
    if len(runs) == 1:
        return [part]
    stages = [Stage(run, last=last and number == len(runs) - 1) for number, run in enumerate(runs)]
    return [BoundStage(part, stage=stage) for stage in stages]


def _hidden_step(stage: Callable[..., Tensor], batch: Batch, hidden: Tensor | None) -> Tensor:
    """Runs a stage that is not the last: [batch, seq, hidden], or this rank's piece of the sequence."""
    return stage(
        batch.get("tokens"),
        position_ids=batch.get("position_ids"),
        document_ids=batch.get("document_ids"),
        hidden=hidden,
        **({"cache": batch["cache"]} if "cache" in batch else {}),  # a user's model may not accept it
    )


def _hidden_like(
    part: GPT, device: torch.device, dtype: torch.dtype, sharing: int, batch: Batch
) -> tuple[tuple[int, ...], Tensor]:
    """Returns (shape, tensor of the same dtype and device) of the hidden states between stages. The shape is [batch,
    seq / sharing, hidden]; `sharing`: number of ranks that split the sequence."""
    wide = part.config.fp32_residual_connection and dtype != torch.float64
    like = torch.empty(0, dtype=torch.float32 if wide else dtype, device=device)
    samples, tokens = shape_of(batch)
    return (samples, tokens // sharing, part.config.hidden_size), like


def check_not_split(model: nn.Module, config: ParallelConfig) -> None:
    if config.model_parallel_size > 1 or config.expert_model_parallel_size > 1:
        raise ConfigError(
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size and "
            f"--expert-model-parallel-size only split Megatron's GPT, but the model provider returned a "
            f"{type(model).__name__}; set these sizes to 1, to train it with data parallelism"
        )


def check_unchanged(model: GPT, layers: StageLayers) -> None:
    """Rejects a GPT that was changed after construction or customised: a rank's part is a new GPT without changes."""
    now, made = inventory(model), model.as_made
    changed = [name for name in {**made, **now} if now.get(name) != made.get(name)]
    what = f"was changed after it was made ({changed[0]})" if changed else None
    if type(model.make) is not ModuleFactory or "dropout" in vars(model.make):
        what = "has its own module factory"
    if not _takes(type(model).__init__, "layers", "first", "last", "make"):
        what = f"is a {type(model).__name__}, whose constructor does not take the arguments of GPT"
    if layers.chunks > 1 and not _takes(type(model).forward, "stage"):
        what = f"is a {type(model).__name__}, whose forward() does not take the `stage` of an interleaved pipeline"
    if what is not None:
        raise ConfigError(
            f"the model provider's GPT {what}: tensor, pipeline, context and expert parallelism build each rank's part "
            "anew, without this change. Use only data parallelism, or override methods in a subclass of GPT"
        )


def _takes(function: Callable[..., object], *names: str) -> bool:
    parameters = inspect.signature(function).parameters
    any_name = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return any_name or set(names) <= parameters.keys()
