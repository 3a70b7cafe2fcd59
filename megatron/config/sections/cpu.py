"""How a CPU is used. No value changes the model, but the last bits of fp32 results depend on the library of the matrix
products and on the number of threads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class CpuConfig:
    cpu_threads: int | None = flag(
        None, "Threads of each rank. Unset: the machine's physical cores divided by its ranks.", at_least=1
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
        "process never shrinks), system returns it. auto: keep when training on a CPU with glibc.",
        choices=("auto", "keep", "system"),
    )
    fp32_products: str = flag(
        "auto",
        "Which library multiplies fp32 matrices on a CPU. auto: onednn on an AMD processor where it is exact, which "
        "is checked at start, else mkl.",
        choices=("auto", "mkl", "onednn"),
    )
