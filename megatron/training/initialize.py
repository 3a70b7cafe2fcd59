"""Starts a run: sets up its ranks, device, kernels and tokenizer, before data and model are built."""

import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TextIO

import torch
import torch.distributed as dist

from megatron.checkpoint.step_source import OWN_STEPS, StepSource
from megatron.config import BatchPlan, RunConfig, check_world
from megatron.config.refusals import Refusals
from megatron.distributed.device import resolve_backend, resolve_device
from megatron.distributed.launch import LaunchInfo, die_with_parent
from megatron.distributed.limits import allow_open_files
from megatron.distributed.messages import broadcast_json
from megatron.distributed.parallel_state import ParallelState
from megatron.distributed.rendezvous import init_process_group, open_to_other_machines
from megatron.distributed.rng import seed_rank
from megatron.distributed.start_watch import watched_start
from megatron.errors import ConfigError, printable
from megatron.layout import padded_vocab_size
from megatron.ops.library import Library, library
from megatron.ops.select import Kernels, left_to_compiler, slower_without_kernels, usable_library
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.chat import build_chat_encoder
from megatron.tokenizer_types import TOKENIZERS
from megatron.training.checks import check_parts
from megatron.training.devices import prepare_accelerator, prepare_cpu
from megatron.training.identity import started_with
from megatron.training.kernels import check_same_kernels, resolve_kernels, verified_by_all
from megatron.training.log_lines import LOG_FORMS
from megatron.utils.device_kind import kind_of
from megatron.utils.log import RankLog

if TYPE_CHECKING:
    from megatron.tokenizer.chat.encoder import ChatEncoder


@dataclass(frozen=True, kw_only=True)
class Run:
    """One rank's settings, place among the ranks, device, kernels and tokenizer. A script's providers receive it."""

    config: RunConfig
    launch: LaunchInfo
    device: torch.device
    dtype: torch.dtype
    parallel: ParallelState
    kernels: Kernels
    tokenizer: Tokenizer | None  # None with --mock-data or a script's own data, if no tokenizer is set
    log: RankLog
    run_id: str
    started: float
    """Start on `time.monotonic`'s clock; --exit-duration-in-mins counts from here."""
    store: dist.Store | None = None
    """Store where the ranks meet; None for a single rank, or if the caller joined the process group."""
    source: StepSource = OWN_STEPS
    """Reads other programs' checkpoints; the default rejects them."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.config, self.parallel.dp.size)

    @property
    def has_vocabulary(self) -> bool:
        return self.tokenizer is not None or self.config.tokenizer.vocab_size is not None

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model: the tokenizer's, or a checkpoint's if its table has more rows. Padding rows
        exist only in memory and are not counted."""
        return max(self.data_vocab_size, self.config.tokenizer.vocab_size or 0)

    @property
    def data_vocab_size(self) -> int:
        """Vocabulary size of the data; all token ids are smaller."""
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        if self.config.tokenizer.vocab_size is None:
            raise ConfigError("--vocab-size: not given, and there is no tokenizer; give one of them")
        return self.config.tokenizer.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.model.make_vocab_size_divisible_by, self.parallel.tp.size)

    @property
    def eod_id(self) -> int | None:
        return self.tokenizer.eod_id if self.tokenizer is not None else None

    @property
    def chat(self) -> "ChatEncoder | None":
        """Encoder of conversations, for --sft."""
        return build_chat_encoder(self.config.tokenizer, self.eod_id) if self.config.data.sft else None

    @property
    def tokenizer_fingerprint(self) -> tuple[str, ...] | None:
        """Fingerprints that data of this run's tokenizer may have recorded; None without a tokenizer."""
        return self.tokenizer.fingerprints if self.tokenizer is not None else None


Connect = Callable[[timedelta, Tokenizer | None], dist.Store | None]
"""Joins the process group, given a timeout and this rank's tokenizer; returns the store if there are several ranks."""


def start(
    config: RunConfig, *, needs_data: bool = True, stream: TextIO | None = None, source: StepSource = OWN_STEPS
) -> Run:
    """Builds the run on the ranks that the launcher started. `stream`: for the log; default: stdout. `source`: reads
    other programs' checkpoints."""
    started = time.monotonic()
    launch = _for_dry_run(config, LaunchInfo.detect(config.runtime.local_rank))
    refusals = Refusals()
    check_world(config, launch.world_size, refusals)
    log = RankLog(launch.rank, stream or sys.stdout, stamped=LOG_FORMS[config.logging.log_format].stamped)
    log.info(*slower_without_kernels(config.kernels.spec), *map(printable, config.notices))
    device, backend = None, "gloo"
    with refusals.of_checking():
        device = resolve_device(config.runtime.device, launch.local_rank)
    if device is None:
        refusals.end()  # further checks depend on the device
    assert device is not None
    with refusals.of_checking():
        backend = resolve_backend(_planned_backend(config, device, log), device)
    threads = prepare_cpu(config, launch, device, log)
    prepare_accelerator(config, device, log, launch.allocator)

    def connect(timeout: timedelta, tokenizer: Tokenizer | None) -> dist.Store | None:
        die_with_parent(launch)
        if (raised := allow_open_files(config.parallel.layout(launch.world_size), backend)) is not None:
            log.info(raised)
        if (exposed := open_to_other_machines(launch)) is not None:
            log.warn(exposed)
        compared = None
        if launch.world_size > 1:  # hashing the whole package takes time
            compared = started_with(config, launch, tokenizer)
        longest = timeout_of_collectives(config, device)
        connection = init_process_group(launch, backend, timeout, device, compared, met, longest)
        if connection is None:
            return None
        if connection.network is not None:
            log.info(connection.network)
        return connection.store

    with watched_start(launch, config.runtime.heartbeat_timeout_seconds) as met:
        run = build_run(
            config,
            launch,
            device=device,
            log=log,
            needs_data=needs_data,
            connect=connect,
            started=started,
            refusals=refusals,
            source=source,
        )
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    log.info(_devices_line(run, threads, backend))
    log.info(*_kernel_lines(config, run.kernels))
    return run


def _devices_line(run: Run, threads: int, backend: str) -> str:
    runtime, launch = run.config.runtime, run.launch
    verb, size = "planned for" if runtime.plans else "running on", runtime.device_memory
    memory = "" if size is None else f"; memory is planned for an accelerator of {size} in each rank"
    return (
        f"{verb} {launch.world_size} x {run.device.type} with {threads} CPU threads each, backend {backend}, "
        f"data parallel {run.parallel.dp.size}{memory}"
    )


def _kernel_lines(config: RunConfig, kernels: Kernels) -> list[str]:
    """Log lines about the selected implementations."""
    lines = kernels.table().split("\n") if config.logging.log_kernels else [kernels.summary()]
    if config.kernels.compile and (left := left_to_compiler(kernels)):
        lines.append(
            f"--compile: in layers, torch fuses the formulas of {', '.join(left)} instead of calling their kernels"
        )
    return lines


def _planned_backend(config: RunConfig, device: torch.device, log: RankLog) -> str | None:
    """Returns --distributed-backend. A plan made on a machine without an accelerator ignores an accelerator's backend
    and logs that; `--device cpu` contradicts such a backend on every machine."""
    runtime = config.runtime
    if runtime.distributed_backend in (None, "gloo") or not runtime.plans or device.type != "cpu":
        return runtime.distributed_backend
    if runtime.device != "auto":
        return runtime.distributed_backend
    log.info(
        f"--distributed-backend {runtime.distributed_backend}: this machine has no accelerator, so the plan is for "
        "CPUs with gloo; to run, use an accelerator, or give --distributed-backend gloo"
    )
    return None


def build_run(
    config: RunConfig,
    launch: LaunchInfo,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    log: RankLog | None = None,
    needs_data: bool = True,
    connect: Connect = lambda timeout, tokenizer: None,
    started: float | None = None,
    refusals: Refusals | None = None,
    source: StepSource = OWN_STEPS,
) -> Run:
    """Builds the run of these settings on one rank, with process groups and seeded random streams.

    The function `connect` joins the process group and returns the ranks' store. It is called after all checks that may
    fail on a single rank; by default the caller has already joined. `dtype` overrides the settings, which do not offer
    fp64. Rejections found here are reported together with the earlier ones of this launch, `refusals`.
    """
    log = log or RankLog(launch.rank)
    native = library() if config.runtime.plans else usable_library(config.kernels.spec, device, log.info)
    kernels, tokenizer = _checked_parts(config, launch, device, native, needs_data, refusals or Refusals(), log)
    layout, run_id, store = config.parallel.layout(launch.world_size), "dry-run", None
    if config.runtime.plans:
        parallel = ParallelState.plan(layout, launch.rank)
    else:
        timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
        store = connect(timeout, tokenizer)
        parallel = ParallelState.build(layout, launch.rank, timeout_of_collectives(config, device))
        if kind_of(device.type).verified_kernels:
            kernels = resolve_kernels(config.kernels, device, verified_by_all(native, parallel), log)
        check_same_kernels(config.kernels.spec, kernels, parallel)
        run_id = broadcast_json(uuid.uuid4().hex[:12], parallel.world, str)
    seed_rank(config.training.seed, layout.coordinates(launch.rank))
    return Run(
        config=config,
        launch=launch,
        device=device,
        dtype=dtype or getattr(torch, config.precision.params_dtype),
        parallel=parallel,
        kernels=kernels,
        tokenizer=tokenizer,
        log=log,
        run_id=run_id,
        store=store,
        started=time.monotonic() if started is None else started,
        source=source,
    )


def _checked_parts(
    config: RunConfig,
    launch: LaunchInfo,
    device: torch.device,
    native: Library,
    needs_data: bool,
    refusals: Refusals,
    log: RankLog,
) -> tuple[Kernels, Tokenizer | None]:
    """Returns the kernels and the tokenizer of the run. Raises all rejections together."""
    kernels, tokenizer, has_tokenizer = None, None, False
    with refusals.of_checking():
        kernels = resolve_kernels(config.kernels, device, native, log)
    with refusals.of_checking():
        tokenizer, has_tokenizer = tokenizer_of(config, required=needs_data), True
    check_parts(
        config,
        launch=launch,
        device=device,
        kernels=kernels,
        tokenizer=tokenizer,
        needs_data=needs_data and has_tokenizer,
        refusals=refusals,
    )
    refusals.end()
    assert kernels is not None
    return kernels, tokenizer


def timeout_of_collectives(config: RunConfig, device: torch.device) -> timedelta:
    """Time after which torch ends a collective. On an accelerator torch's watchdog aborts without naming the stuck
    rank. Heartbeats name that rank at --distributed-timeout-minutes, so torch then waits somewhat longer."""
    runtime = config.runtime
    later = 0.0 if device.type == "cpu" else 3 * runtime.heartbeat_timeout_seconds
    return timedelta(minutes=runtime.distributed_timeout_minutes, seconds=later)


def _for_dry_run(config: RunConfig, launch: LaunchInfo) -> LaunchInfo:
    """Returns the launch to describe under --dry-run or --print-config, where one process stands for all ranks."""
    runtime, alone = config.runtime, launch.launcher == "python"
    if runtime.dry_run_ranks is not None and not (runtime.plans and alone):
        raise ConfigError(
            f"--dry-run-ranks {runtime.dry_run_ranks}: requires one process with --dry-run and no launcher; remove it"
        )
    if runtime.device_memory is not None and not runtime.plans:
        raise ConfigError(f"--device-memory {runtime.device_memory}: has no effect without --dry-run; add --dry-run")
    if not (runtime.plans and alone):
        return launch
    return replace(launch, world_size=runtime.dry_run_ranks or config.parallel.fewest_ranks)


def tokenizer_of(config: RunConfig, *, required: bool = True) -> Tokenizer | None:
    settings = config.tokenizer
    if settings.tokenizer_type or settings.vocab_file or settings.tokenizer_model:
        if TOKENIZERS[settings.kind].sized_by_settings:
            return build_tokenizer(settings)
        tokenizer = build_tokenizer(replace(settings, vocab_size=None))
        _check_vocabulary(settings.vocab_size, tokenizer.vocab_size, loads=config.checkpoint.load is not None)
        return tokenizer
    if not required or (config.data.mock_data and settings.vocab_size is not None):
        return None
    raise ConfigError(
        "no tokenizer: give --vocab-file and --merge-file (or --tokenizer-type and --tokenizer-model); "
        "with --mock-data, --vocab-size N is enough"
    )


def _check_vocabulary(given: int | None, own: int, *, loads: bool) -> None:
    """Checks --vocab-size, which with --load may exceed the tokenizer's: a checkpoint's table can have more rows."""
    if given is None or given == own or (loads and given > own):
        return
    if loads:
        raise ConfigError(
            f"--vocab-size {given}: the tokenizer has {own} entries, more than the token embedding has rows; give the "
            "checkpoint's tokenizer"
        )
    raise ConfigError(
        f"--vocab-size {given}: the tokenizer has {own} entries; remove --vocab-size (a larger one requires --load of "
        "a checkpoint whose token embedding has that many rows)"
    )
