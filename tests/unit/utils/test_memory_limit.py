"""Memory that a machine or its control groups allow, from copies of such machines' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.utils.memory_limit import memory_limit

GIB = 2**30
MACHINE = "MemTotal: 67108864 kB\nMemFree: 1 kB\nHugePages_Total: 0\nSwapTotal: 0 kB\n"
GROUPS: dict[str, tuple[dict[str, str], int]] = {
    "the machine": ({}, 64 * GIB),
    "swap counts": ({"proc/meminfo": MACHINE.replace("SwapTotal: 0", "SwapTotal: 1048576")}, 65 * GIB),
    "a container, version 2": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{24 * GIB}\n"}, 24 * GIB),
    "no limit, version 2": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 64 * GIB),
    "the group around it": (
        {
            "proc/self/cgroup": "0::/slurm/job/step\n",
            "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
            "sys/fs/cgroup/slurm/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/slurm/memory.max": f"{16 * GIB}\n",
        },
        8 * GIB,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "9:name=systemd:/x\n5:cpu,memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",  # the group's own path is the host's
        },
        4 * GIB,
    ),
    "no limit, version 1": (
        {"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        64 * GIB,
    ),
    "nonsense": ({"proc/self/cgroup": "\n:\n0:\n", "sys/fs/cgroup/memory.max": "many\n"}, 64 * GIB),
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", GROUPS)
def test_the_least_of_what_is_allowed(name: str, tmp_path: Path) -> None:
    files, limit = GROUPS[name]
    assert memory_limit(tree(tmp_path, {"proc/meminfo": MACHINE, **files})) == limit


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_this_machine() -> None:
    assert (memory_limit() or GIB) >= GIB // 4
