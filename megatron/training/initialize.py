"""The parts of a run that come before any data or model: settings, ranks, device, kernels, tokenizer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch

from megatron.config import RunConfig, check_world
from megatron.distributed.collectives import all_gather_object, broadcast_object
from megatron.distributed.cores import pin, set_scheduling, set_threads
from megatron.distributed.device import activate, resolve_backend, resolve_device
from megatron.distributed.launch import LaunchInfo, die_with_parent, init_process_group, keep_products_repeatable
from megatron.distributed.rng import seed_rank
from megatron.distributed.state import ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout, padded_vocab_size
from megatron.ops.select import Kernels, left_to_compiler, resolve
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.training.settings import read_settings
from megatron.utils.cpu import has_bf16_products, set_allocator, set_fp32_products
from megatron.utils.cuda import grow_segments
from megatron.utils.log import RankLog


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the three providers are handed."""

    config: RunConfig
    launch: LaunchInfo
    device: torch.device
    dtype: torch.dtype
    parallel: ParallelState
    kernels: Kernels
    tokenizer: Tokenizer | None  # None with --mock-data or a script's own data, and no tokenizer
    log: RankLog
    run_id: str
    started: float = field(default_factory=time.monotonic)

    @property
    def has_vocabulary(self) -> bool:
        return self.tokenizer is not None or self.config.tokenizer.vocab_size is not None

    @property
    def vocab_size(self) -> int:
        """The true size; padding exists in memory only."""
        if self.tokenizer is not None:
            return self.tokenizer.vocab_size
        if self.config.tokenizer.vocab_size is None:
            raise ConfigError("--vocab-size: not given, and there is no tokenizer; the model needs one of them")
        return self.config.tokenizer.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.model.make_vocab_size_divisible_by, self.parallel.tp.size)

    @property
    def eod_id(self) -> int | None:
        return self.tokenizer.eod_id if self.tokenizer is not None else None

    @property
    def tokenizer_fingerprint(self) -> str | None:
        return self.tokenizer.fingerprint if self.tokenizer is not None else None


def initialize(argv: Sequence[str] | None = None, *, needs_data: bool = True) -> Run:
    """Everything up to a seeded process group. Usage errors come first, before any process waits for another.

    For scripts without the training loop. They leave with `megatron.distributed.launch.shutdown()`.
    """
    return start(read_settings(argv, needs_data=needs_data), needs_data=needs_data)


def start(config: RunConfig, *, needs_data: bool = True) -> Run:
    """The run of these settings; its ranks are connected and its random streams seeded."""
    started = time.monotonic()
    launch = _planned(config, LaunchInfo.detect(config.runtime.local_rank))
    check_world(config, launch.world_size)
    log = RankLog(launch.rank)
    for notice in config.notices:
        log.info(notice)
    device = resolve_device(config.runtime.device, launch.local_rank)
    backend = resolve_backend(config.runtime.distributed_backend, device)
    threads = _prepare_cpu(config, launch, device, log)
    _prepare_accelerator(config, device, log)
    kernels = resolve(config.kernels.spec, device.type, attention=config.kernels.attention, warn=log.warn)
    tokenizer = tokenizer_of(config, required=needs_data)
    layout = config.parallel.layout(launch.world_size)
    _say_slow_choices(config, device, log)
    parallel = (
        ParallelState.plan(layout, launch.rank)
        if config.runtime.dry_run
        else _connect(config, launch, layout, backend, device)
    )
    if not config.runtime.dry_run:
        _check_same_kernels(config.kernels.spec, kernels, parallel)
    seed_rank(config.training.seed, layout.coordinates(launch.rank))
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    verb = "planned for" if config.runtime.dry_run else "running on"
    log.info(
        f"{verb} {launch.world_size} x {device.type} with {threads} CPU threads each, backend {backend}, "
        f"data parallel {parallel.dp.size}"
    )
    log.info(kernels.table())
    if config.kernels.compile and (left := left_to_compiler(kernels)):
        log.info(f"--compile: inside a layer the plain formulas of {', '.join(left)} are fused instead")
    return Run(
        config=config,
        launch=launch,
        device=device,
        dtype=getattr(torch, config.precision.params_dtype),
        parallel=parallel,
        kernels=kernels,
        tokenizer=tokenizer,
        log=log,
        run_id="dry-run" if config.runtime.dry_run else broadcast_object(uuid.uuid4().hex[:12], parallel.world),
        started=started,
    )


def _check_same_kernels(spec: str, kernels: Kernels, parallel: ParallelState) -> None:
    """A machine on which they were not built would round otherwise: copies of a parameter would drift apart."""
    mine = {choice.op: choice.backend for choice in kernels.choices}, kernels.note
    everyone = all_gather_object(mine, parallel.world)
    first, first_note = everyone[0]
    for rank, (backends, note) in enumerate(everyone):
        for op in (op for op in first if backends[op] != first[op]):
            because = f" ({note or first_note})" if note or first_note else ""
            raise ConfigError(
                f"--kernels {spec}: {op} would be {backends[op]} on rank {rank} and {first[op]} on rank 0{because}; "
                "build the kernels on every machine, or give --kernels ref"
            )


def _prepare_cpu(config: RunConfig, launch: LaunchInfo, device: torch.device, log: RankLog) -> int:
    """The settings of the whole process, before it has anything large. Returns the number of threads.

    Where an accelerator computes, only what was asked for is changed.
    """
    cpu, computes = config.cpu, device.type == "cpu"
    if computes or cpu.cpu_allocator != "auto":
        log.info(set_allocator(cpu.cpu_allocator))
    if computes or cpu.fp32_products != "auto":
        log.info(set_fp32_products(cpu.fp32_products))
    if cpu.cpu_pinning:
        log.info(f"each rank stays on its own cores; rank 0 on {', '.join(map(str, sorted(pin(launch))))}")
    if computes or cpu.cpu_scheduling != "auto":
        log.info(set_scheduling(cpu.cpu_scheduling, launch))
    return set_threads(launch, cpu.cpu_threads)


def _prepare_accelerator(config: RunConfig, device: torch.device, log: RankLog) -> None:
    """Before anything is allocated or multiplied there: the kernels are tried out when they are chosen."""
    if config.runtime.dry_run or device.type == "cpu":
        return
    activate(device)  # else every rank of the machine would try them on the first device
    if device.type != "cuda":
        return
    if config.training.deterministic_mode:
        keep_products_repeatable()
    if not grow_segments():
        log.info("this torch or driver has no expandable segments: more memory may be lost between tensors")


def _planned(config: RunConfig, launch: LaunchInfo) -> LaunchInfo:
    """--dry-run in one process plans for many: none of them has to meet another."""
    runtime, alone = config.runtime, launch.launcher == "python"
    if runtime.dry_run_ranks is not None and not (runtime.dry_run and alone):
        raise ConfigError(
            f"--dry-run-ranks {runtime.dry_run_ranks}: is for one process with --dry-run, without a launcher; remove it"
        )
    if not (runtime.dry_run and alone):
        return launch
    return replace(launch, world_size=runtime.dry_run_ranks or config.parallel.fewest_ranks)


def _connect(
    config: RunConfig, launch: LaunchInfo, layout: Layout, backend: str, device: torch.device
) -> ParallelState:
    die_with_parent(launch)
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    init_process_group(launch, backend, timeout, device)
    return ParallelState.build(layout, launch.rank, timeout)


def tokenizer_of(config: RunConfig, *, required: bool = True) -> Tokenizer | None:
    settings = config.tokenizer
    named = settings.tokenizer_type or settings.vocab_file or settings.tokenizer_model
    if named:
        tokenizer = build_tokenizer(settings)
        if settings.vocab_size is not None and settings.tokenizer_type != "NullTokenizer":
            _check_vocab_size(settings.vocab_size, tokenizer)
        return tokenizer
    if not required or (config.data.mock_data and settings.vocab_size is not None):
        return None
    raise ConfigError(
        "no tokenizer: give --vocab-file and --merge-file (or --tokenizer-type and --tokenizer-model); "
        "with --mock-data --vocab-size N is enough"
    )


def _check_vocab_size(given: int, tokenizer: Tokenizer) -> None:
    if given != tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {given}: the tokenizer has {tokenizer.vocab_size} entries; leave --vocab-size out"
        )


def _say_slow_choices(config: RunConfig, device: torch.device, log: RankLog) -> None:
    if device.type != "cpu":
        return
    if config.precision.fp16:
        log.warn("--fp16 on a CPU computes correctly but slowly; --bf16 is the fast choice here")
    if config.precision.bf16 and not has_bf16_products():
        log.warn("--bf16: this processor has no instructions for it; training is correct, and fp32 may be faster")
