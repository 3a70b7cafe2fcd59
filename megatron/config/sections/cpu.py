"""How a CPU is used. The model is the same with every value; the last bits of fp32 results follow the library that
multiplies and the number of threads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    cpu_threads: int | None = flag(
        None, "Threads of each rank. Unset: the machine's physical cores, shared by its ranks.", at_least=1
    )
    cpu_pinning: bool = flag(False, "Give each rank of a machine cores of its own, which it never leaves.")
    cpu_scheduling: str = flag(
        "auto",
        "When the system interrupts a rank for another of its threads. batch: not before it waits or its share of time "
        "is over, which spares ranks of one machine many pauses when they talk. auto: batch when several ranks train "
        "on the CPU of one machine.",
        choices=("auto", "batch", "ordinary"),
    )
    cpu_allocator: str = flag(
        "auto",
        "What becomes of a large tensor's memory: keep it for the next tensor (faster; a process never shrinks), or "
        "give it back to the system. auto: keep when training on a CPU with glibc.",
        choices=("auto", "keep", "system"),
    )
    fp32_products: str = flag(
        "auto",
        "Which library multiplies fp32 matrices on a CPU. auto: onednn on an AMD processor where it is exact, which "
        "is checked at start, else mkl.",
        choices=("auto", "mkl", "onednn"),
    )
