"""Devices, processes, CPUs, and what the command itself does. No value changes what is computed."""

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.utils.numerals import LARGEST_WORLD, MOST_PROCESSES

_DEEPSPEED = Need("--deepspeed", lambda run: run.runtime.deepspeed)
_DEEPSPEED_CONFIG = Need("--deepspeed_config FILE", lambda run: run.runtime.deepspeed_config is not None)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    device: str = flag("auto", "auto (the accelerator if there is one, else the CPU), or a device name.")
    distributed_backend: str | None = flag(
        None, "Backend of the collectives. Unset: from the device.", choices=("nccl", "gloo", "hccl", "xccl")
    )
    distributed_timeout_minutes: float = flag(10, "Timeout of a collective.", above=0.0, at_most=525_600)
    heartbeat_timeout_seconds: float = flag(
        20,
        "End the run, naming the rank, when a rank has sent no heartbeat for this long; 0 turns heartbeats off.",
        at_least=0.0,
        at_most=86_400,
    )
    local_rank: int | None = flag(
        None, "Set by torch.distributed.launch; must agree with LOCAL_RANK.", at_least=0, cli_only=True
    )
    config: str | None = flag(
        None, "YAML file of settings, or the name of one in configs/; flags override it.", cli_only=True
    )
    deepspeed: bool = flag(
        False,
        "Take the settings of a DeepSpeed configuration.",
        needs=(_DEEPSPEED_CONFIG,),
        insists=True,
        cli_only=True,
    )
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON file, whose keys become these settings (docs/from_deepspeed.md); flags override it.",
        spelling="--deepspeed_config",
        needs=(_DEEPSPEED,),
        insists=True,
        cli_only=True,
    )
    print_config: bool = flag(False, "Check everything, print every value with its origin, and exit.", cli_only=True)
    dry_run: bool = flag(
        False, "Check everything, print the plan and exit; one process can plan for many ranks.", cli_only=True
    )
    dry_run_ranks: int | None = flag(
        None,
        "Ranks to plan for. Unset: those that were started, or for a single process the fewest that the layout needs.",
        at_least=1,
        at_most=LARGEST_WORLD,
        cli_only=True,
    )

    @property
    def plans(self) -> bool:
        """Whether the command ends before anything is connected, allocated or written."""
        return self.dry_run or self.print_config


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    """How a CPU is used. No value changes the model, but the last bits of fp32 results depend on the library of the
    matrix products and on the number of threads."""

    cpu_threads: int | None = flag(
        None,
        "Threads of each rank. Unset: the machine's physical cores divided by its ranks.",
        at_least=1,
        at_most=MOST_PROCESSES,
    )
    cpu_pinning: bool = flag(False, "Pin each rank of a machine to cores of its own.")
    cpu_scheduling: str = flag(
        "auto",
        "Scheduling policy of the ranks' threads. batch: a thread that wakes up does not preempt a running one, which "
        "saves ranks of one machine many interruptions when they communicate. auto: batch when several ranks train on "
        "the CPU of one machine.",
        choices=("auto", "batch", "ordinary"),
    )
    cpu_allocator: str = flag(
        "auto",
        "What happens to the memory of a freed large tensor: keep reuses it for the next tensor (faster, but the "
        "process never shrinks), system returns it. auto: keep when training on a CPU with glibc, "
        "but system at stages 2 and 3 of ZeRO.",
        choices=("auto", "keep", "system"),
    )
    fp32_products: str = flag(
        "auto",
        "Which library multiplies fp32 matrices on a CPU. auto: onednn on an AMD processor where it is exact, which "
        "is checked at start, else mkl.",
        choices=("auto", "mkl", "onednn"),
    )
