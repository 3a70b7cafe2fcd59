"""Devices, processes, CPUs, and the actions of the command itself. No value changes the function that is computed."""

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.errors import ConfigError
from megatron.utils.numerals import LARGEST_WORLD, MOST_PROCESSES, size_in_bytes

_DEEPSPEED = Need("--deepspeed", lambda run: run.runtime.deepspeed)
_PRINT_CONFIG = Need("--print-config", lambda run: run.runtime.print_config)
_DEEPSPEED_CONFIG = Need("--deepspeed_config FILE", lambda run: run.runtime.deepspeed_config is not None)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    device: str = flag("auto", "Device name, or auto: the accelerator if there is one, else the CPU.")
    distributed_backend: str | None = flag(
        None, "Backend of the collectives. Unset: depends on the device.", choices=("nccl", "gloo", "hccl", "xccl")
    )
    distributed_timeout_minutes: float = flag(10, "Timeout of a collective, in minutes.", above=0.0, at_most=525_600)
    heartbeat_timeout_seconds: float = flag(
        20,
        "Seconds without a heartbeat after which a rank counts as lost. The run then ends, and the error names it. 0: "
        "no heartbeats.",
        at_least=0.0,
        at_most=86_400,
    )
    local_rank: int | None = flag(
        None, "Local rank, set by torch.distributed.launch. Must agree with LOCAL_RANK.", at_least=0, cli_only=True
    )
    config: str | None = flag(
        None, "YAML file of settings, or the name of one in configs/; flags override it.", cli_only=True
    )
    deepspeed: bool = flag(
        False,
        "Read settings from --deepspeed_config.",
        needs=(_DEEPSPEED_CONFIG,),
        insists=True,
        cli_only=True,
    )
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed configuration file, translated to these settings (docs/from_deepspeed.md). Flags override it.",
        spelling="--deepspeed_config",
        needs=(_DEEPSPEED,),
        insists=True,
        cli_only=True,
    )
    print_config: bool = flag(False, "Check the settings, print each with its origin, and exit.", cli_only=True)
    print_config_changed: bool = flag(
        False,
        "Print only the settings that differ from their defaults.",
        spelling="--changed",
        needs=(_PRINT_CONFIG,),
        insists=True,
        cli_only=True,
    )
    print_config_format: str = flag(
        "table",
        "Format of --print-config. yaml: the settings that were given or changed, as a file for --config; other lines "
        "go to stderr.",
        spelling="--format",
        choices=("table", "yaml"),
        needs=(_PRINT_CONFIG,),
        insists=True,
        cli_only=True,
    )
    dry_run: bool = flag(
        False, "Check the settings, print the plan and exit. One process can plan for many ranks.", cli_only=True
    )
    dry_run_ranks: int | None = flag(
        None,
        "Number of ranks to plan for. Unset: those that were started; for a single process, the layout's minimum.",
        at_least=1,
        at_most=LARGEST_WORLD,
        cli_only=True,
    )
    device_memory: str | None = flag(
        None,
        "Memory of one accelerator, such as 80GB or 80GiB. --dry-run then reports whether the run fits such devices.",
        cli_only=True,
    )

    @property
    def prints_yaml(self) -> bool:
        return self.print_config and self.print_config_format == "yaml"

    @property
    def device_bytes(self) -> int | None:
        if self.device_memory is None:
            return None
        try:
            return size_in_bytes(self.device_memory)
        except ValueError as error:
            raise ConfigError(f"--device-memory {self.device_memory}: {error}") from None

    @property
    def plans(self) -> bool:
        """True if the command only reports: it ends before it connects, allocates or writes."""
        return self.dry_run or self.print_config


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    """CPU settings. No value changes the model, but the last bits of fp32 results depend on the matrix library and on
    the number of threads."""

    cpu_threads: int | None = flag(
        None,
        "Threads of each rank. Unset: the machine's physical cores divided by its ranks.",
        at_least=1,
        at_most=MOST_PROCESSES,
    )
    cpu_pinning: bool = flag(False, "Pin each rank of a machine to separate cores.")
    cpu_scheduling: str = flag(
        "auto",
        "Scheduling policy of the ranks' threads. batch: a waking thread does not preempt a running one; auto: batch "
        "if several ranks train on one machine's CPU.",
        choices=("auto", "batch", "ordinary"),
    )
    cpu_allocator: str = flag(
        "auto",
        "Memory of freed large tensors. keep: reuse it (faster, but the process never shrinks); system: "
        "return it. The value auto is keep when training on a CPU with glibc, except at stages 2 and 3 of ZeRO.",
        choices=("auto", "keep", "system"),
    )
    fp32_products: str = flag(
        "auto",
        "Library that multiplies fp32 matrices on a CPU. auto: onednn on an AMD processor if a check at start finds it "
        "exact, else mkl.",
        choices=("auto", "mkl", "onednn"),
    )
