"""Devices, processes, and what the command itself does. No value changes what is computed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    device: str = flag("auto", "auto (the accelerator if there is one, else the CPU), or a device name.")
    distributed_backend: str | None = flag(
        None, "Backend of the collectives. Unset: from the device.", choices=("nccl", "gloo", "hccl", "xccl")
    )
    distributed_timeout_minutes: float = flag(10, "Timeout of a collective.", above=0.0)
    heartbeat_timeout_seconds: float = flag(
        20,
        "End the run, naming the rank, when a rank has sent no heartbeat for this long; 0 turns heartbeats off.",
        at_least=0.0,
    )
    local_rank: int | None = flag(
        None, "Set by torch.distributed.launch; must agree with LOCAL_RANK.", at_least=0, cli_only=True
    )
    config: str | None = flag(None, "YAML file of settings; flags override it.", cli_only=True)
    print_config: bool = flag(False, "Print every value with its origin.", cli_only=True)
    dry_run: bool = flag(
        False, "Check everything, print the plan and exit; one process can plan for many ranks.", cli_only=True
    )
    dry_run_ranks: int | None = flag(
        None,
        "Ranks to plan for. Unset: those that were started, or for a single process the fewest that the layout needs.",
        at_least=1,
        cli_only=True,
    )
