"""`megatron.compat.initialize(model=...)`: DeepSpeed's call for any nn.Module, and its flags."""

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from megatron.compat.any_model.engine import ModelEngine
from megatron.compat.any_model.engine_settings import EngineSettings
from megatron.compat.any_model.from_deepspeed import EngineConfig
from megatron.compat.any_model.gradient_hooks import GradientHooks
from megatron.compat.any_model.kept_gradients import GuardedWeights, KeptGradients
from megatron.compat.any_model.loader import EpochLoader
from megatron.compat.any_model.loss_scale_lines import lines_at_start
from megatron.compat.any_model.ranks import RankPlacement, find_place
from megatron.compat.any_model.usage import Usage
from megatron.compat.client_update import ClientUpdate, refuse_whole_matrices
from megatron.compat.on_pieces import differs_on_pieces
from megatron.compat.rule_optimizer import RuleOptimizer
from megatron.config.sections.optimizer import OptimizerConfig
from megatron.data_parallel import broadcast_parameters
from megatron.errors import ConfigError
from megatron.optimizer import Optimizer
from megatron.parallelize import is_called, units_of
from megatron.utils.dtype import cast_floats, refuse_complex
from megatron.utils.log import RankLog

_WITHHELD = (
    "parameter.grad: the engine keeps the gradients, and sums them over the ranks in engine.step(); instead of torch's "
    'clip_grad_norm_ give "gradient_clipping" in the config, and read the norm from engine.get_global_grad_norm()'
)
Client = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="no effect; accepted for DeepSpeed's scripts")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the settings, as DeepSpeed's JSON")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Client = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[..., Any] | None = None,
    dist_init_required: bool | None = None,
    mpu: Any = None,
    mesh_param: Any = None,
    config: Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[ModelEngine, torch.optim.Optimizer, EpochLoader | None, Any]:
    """Returns the engine of `model`, its optimizer, a loader of `training_data` and the scheduler. Loader and scheduler
    may be None. Every rank calls it: in your own process group, under torchrun, or as a single process.

    The `optimizer` is an instance, or a function from the parameters to one; without it, the config names one. The
    `config` has DeepSpeed's settings, as a dict or the path of a JSON file. It can also be given as `config_params`, or
    as the path `args.deepspeed_config`.
    """
    del dist_init_required  # an open group is used, else one is opened for torchrun's ranks
    for name, value in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if value is not None:
            raise ConfigError(
                f"megatron.compat.initialize(): {name} is not supported, because every rank has the whole model; "
                "remove it, or use pretrain_gpt.py for tensor and pipeline parallelism"
            )
    model = _checked_model(model)
    read = EngineConfig(_one_config(args, config, config_params))
    place = find_place(model)
    log = RankLog(place.parallel.rank)
    settings = read.settings(place.parallel.dp.size)
    for line in read.lines(own_optimizer=optimizer is not None, own_scheduler=lr_scheduler is not None):
        log.info(line)
    for line in lines_at_start(settings.precision):
        log.info(line)
    batch = settings.batch
    if batch.accumulation > 1:
        log.info(
            f"train_batch_size {batch.whole} = {batch.micro} samples x {batch.accumulation} accumulation steps x "
            f"{batch.ranks} rank{'s' if batch.ranks > 1 else ''}: engine.step() updates once in "
            f"{batch.accumulation} calls"
        )
    if place.device.type == "cpu":
        if settings.offloads:
            log.info("offload_optimizer: no effect on a CPU, where optimizer state is in host memory anyway")
        if settings.parameters_on_host:
            log.info("offload_param: no effect on a CPU, where parameters are in host memory anyway")
        settings = replace(settings, offloads=False, parameters_on_host=False)
    _prepare_model(model, settings, place)
    torch_optimizer = _make_optimizer(model, optimizer, model_parameters, read)
    scheduler = _make_scheduler(lr_scheduler, torch_optimizer, read)
    engine = build_model_engine(model, settings, place, torch_optimizer, scheduler, log)
    if training_data is not None:
        dp = place.parallel.dp
        engine.training_dataloader = EpochLoader(training_data, settings.batch.micro, dp, collate_fn, place.device)
    return engine, torch_optimizer, engine.training_dataloader, scheduler


def _checked_model(model: Any) -> nn.Module:
    if model is None:
        raise ConfigError(
            "megatron.compat.initialize(): no model; give model=, an nn.Module (for the settings of pretrain_gpt.py, "
            "use megatron.pretrain.setup)"
        )
    if isinstance(model, type) or not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"megatron.compat.initialize(): model is {what}; give an instance of nn.Module")
    if isinstance(model, ModelEngine):
        raise ConfigError("megatron.compat.initialize(): model is an engine already; use that engine")
    if any(hasattr(one, "device_mesh") for one in model.parameters()):  # a DTensor, whose import takes long
        raise ConfigError(
            "megatron.compat.initialize(): the model's parameters are sharded already, by an earlier engine or by "
            "fully_shard; give a model with whole parameters"
        )
    lazy = [name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter) or one.is_meta]
    if lazy:
        raise ConfigError(
            f"megatron.compat.initialize(): {lazy[0]} has no values yet; run a lazy module once on a batch, or, on "
            "the meta device, call model.to_empty(device=...) and initialise the model"
        )
    refuse_complex(model, "megatron.compat.initialize()")
    for (first, (_, end)), (second, (start, _)) in itertools.pairwise(_places(model)):
        if start < end:
            raise ConfigError(
                f"megatron.compat.initialize(): {first} and {second} are two parameters that share memory, which "
                "the engine would separate; use one parameter in both places (F.linear(x, other.weight.t())), or give "
                f"{second} its own memory with clone()"
            )
    return model


def _places(model: nn.Module) -> list[tuple[str, tuple[int, int]]]:
    """Returns (name, (address of the first byte, address after the last byte)) of each parameter, ascending."""
    places = []
    for name, one in model.named_parameters():
        last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        if one.numel():
            places.append((name, (one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size())))
    return sorted(places, key=lambda place: place[1])


def build_model_engine(
    model: nn.Module,
    settings: EngineSettings,
    place: RankPlacement,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    log: RankLog,
) -> ModelEngine:
    """Builds the engine of `model`, which has its training device and dtype."""
    dp = place.parallel.dp
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "megatron.compat.initialize(): LBFGS recomputes the loss within its step, but the engine only receives "
            "losses; use another optimizer"
        )
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    trained = [(name, one) for name, one in model.named_parameters() if id(one) in held]
    _check_held(held, trained)
    divided = settings.zero_stage > 0 and (dp.size > 1 or settings.parameters_on_host)
    if divided:
        refuse_whole_matrices(optimizer)
    if divided and dp.size > 1:
        _check_on_pieces(optimizer, settings, log)
    names = {id(one): name for name, one in trained if one.requires_grad}
    grads: GuardedWeights | KeptGradients
    hooks = GradientHooks(trained, dp)
    if divided and settings.zero_stage > 1:
        hooks.refuse_those_after(settings.zero_stage)
        grads = _divide_weights(model, settings, place, names)
    else:
        grads = KeptGradients(trained, dp, overlap=settings.overlap, divided=divided, withheld=_WITHHELD)
    usage = Usage(grads, model, dp)
    core = Optimizer(
        grads,
        OptimizerConfig(clip_grad=settings.clip_grad),
        settings.precision,
        norm_axes=[(dp,)] if divided else (),
        client=ClientUpdate(
            grads,
            optimizer,
            usage.absent,
            names=names,
            on_host=settings.offloads and not settings.parameters_on_host,
        ),
    )
    return ModelEngine(model, settings, place, grads, core, usage, hooks, optimizer, scheduler, log=log)


def _check_on_pieces(optimizer: torch.optim.Optimizer, settings: EngineSettings, log: RankLog) -> None:
    """Tests a user's own optimizer on pieces of small tensors, because ranks update pieces with ZeRO."""
    differs = None if isinstance(optimizer, RuleOptimizer) else differs_on_pieces(optimizer)
    if differs is None:
        return
    found = (
        f"{type(optimizer).__name__} {differs}, but with zero_optimization.stage 1 and higher each rank updates pieces"
    )
    if not settings.given.get("zero_allow_untested_optimizer"):
        raise ConfigError(f"{found}; use stage 0, or set zero_allow_untested_optimizer to true to train with it anyway")
    log.info(
        f"zero_allow_untested_optimizer true: {found}; training may differ from stage 0, and may "
        "depend on the number of ranks"
    )


def _divide_weights(
    model: nn.Module, settings: EngineSettings, place: RankPlacement, names: Mapping[int, str]
) -> GuardedWeights:
    """Shards the weights in place: the model's parameters are new objects afterwards."""
    apart = [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in names]
    if apart:
        raise ConfigError(
            f"zero_optimization.stage {settings.zero_stage}: the optimizer lacks {', '.join(apart[:4])}; give it all "
            "parameters that are trained, freeze the others with requires_grad_(False), or use stage 1"
        )
    if not is_called(model):
        raise ConfigError(
            f"zero_optimization.stage {settings.zero_stage}: the model is a {type(model).__name__} without its own "
            "forward(), before which weights would be gathered; call its parts from a module's forward(), or use "
            "stage 1"
        )
    scalars = [name for name, one in model.named_parameters() if one.dim() == 0]
    if scalars:
        raise ConfigError(
            f"zero_optimization.stage {settings.zero_stage}: {scalars[0]} has no dimension that could be divided; make "
            "it a parameter of shape (1,), or use stage 1"
        )
    units = list(units_of(model, place.parallel.dp))
    return GuardedWeights(
        units,
        keep_gathered=settings.zero_stage == 2,
        device=place.device,
        on_host=settings.parameters_on_host,
        withheld=_WITHHELD,
        compared_over=place.parallel.dp,
    )


def _one_config(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | Path:
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        raise ConfigError(
            'megatron.compat.initialize(): no config; give config={"train_batch_size": 16, ...} or a path'
        )
    if len(named) > 1:
        raise ConfigError(f"megatron.compat.initialize(): {' and '.join(named)} are both given; give one")
    name, value = next(iter(named.items()))
    if not isinstance(value, (Mapping, str, Path)):
        raise ConfigError(
            f"megatron.compat.initialize(): {name} is a {type(value).__name__}; give a dict or the path of a file"
        )
    return value


def _prepare_model(model: nn.Module, settings: EngineSettings, place: RankPlacement) -> None:
    """Moves and casts the model in place, so the user's optimizer keeps its parameters. Broadcasts rank 0's values."""
    dtype = getattr(torch, settings.precision.params_dtype)
    # The accelerator's memory may be too small for the whole model.
    device = torch.device("cpu") if settings.parameters_on_host else place.device
    if dtype != torch.float32:
        cast_floats(model, dtype)
    model.to(device)
    for one in model.parameters():
        # Gradients and state are contiguous, and fused kernels follow the order in memory.
        one.data = one.data.contiguous()
    for group in (model.named_parameters(), model.named_buffers()):
        broadcast_parameters(group, place.parallel.dp, through=place.device)


def _make_optimizer(
    model: nn.Module, client: Any, parameters: Iterable[Any] | None, read: EngineConfig
) -> torch.optim.Optimizer:
    if isinstance(client, torch.optim.Optimizer):
        return client
    groups = list(parameters) if parameters is not None else [one for one in model.parameters() if one.requires_grad]
    if isinstance(client, type) and issubclass(client, torch.optim.Optimizer):
        raise ConfigError(
            f"megatron.compat.initialize(): optimizer is the class {client.__name__}; give an instance, "
            f"{client.__name__}(model.parameters(), lr=...)"
        )
    if client is not None:
        made = client(groups) if callable(client) else client
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"megatron.compat.initialize(): optimizer is, or returned, a {type(made).__name__}; give a torch.optim "
                "optimizer, or a function from parameters to one"
            )
        return made
    if read.optimizer_key is None:
        raise ConfigError(
            "megatron.compat.initialize(): no optimizer; give optimizer=torch.optim.AdamW(model.parameters(), lr=...), "
            "or the "
            'config\'s {"optimizer": {"type": "AdamW", "params": {"lr": ...}}}'
        )
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    settings = read.run.optimizer
    if not groups:
        raise _nothing_is_trained()
    rule = read.rule(device)
    try:
        return RuleOptimizer(groups, rule, lr=read.lr, weight_decay=settings.weight_decay)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"megatron.compat.initialize(): model_parameters is not a list of parameters or groups of them ({error}); "
            "give model.parameters(), or remove it"
        ) from None


def _nothing_is_trained() -> ConfigError:
    return ConfigError(
        "megatron.compat.initialize(): nothing is trained: the model has no parameters, or none that requires a "
        "gradient; call model.requires_grad_(True), or give model_parameters"
    )


def _make_scheduler(given: Any, optimizer: torch.optim.Optimizer, read: EngineConfig) -> Any:
    """Returns the scheduler: a given instance, the result of a function of the optimizer, or the config's."""
    if given is None:
        return read.scheduler(optimizer)
    if isinstance(given, type):
        raise ConfigError(
            f"megatron.compat.initialize(): lr_scheduler is the class {given.__name__}; give an instance made from the "
            f"optimizer, or a function: lr_scheduler=lambda optimizer: {given.__name__}(optimizer, ...)"
        )
    made = given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if not callable(getattr(made, "step", None)):
        raise ConfigError(
            f"megatron.compat.initialize(): lr_scheduler is a {type(made).__name__} without step(); give a scheduler, "
            "or a function from the optimizer to one"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            "megatron.compat.initialize(): lr_scheduler belongs to another optimizer; make it from the optimizer that "
            "you give, or give a function: lr_scheduler=lambda optimizer: ..."
        )
    return made


def _check_held(held: set[int], trained: list[tuple[str, nn.Parameter]]) -> None:
    if trained and not any(one.requires_grad for _, one in trained):
        raise _nothing_is_trained()
    if not trained or len(held) != len(trained):
        raise ConfigError(
            f"megatron.compat.initialize(): {len(held) - len(trained)} of the optimizer's {len(held)} parameters are "
            "not parameters of the model; make the optimizer from model.parameters() of the same model"
        )
