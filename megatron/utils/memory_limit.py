"""Memory that the processes of this machine may use together."""

from pathlib import Path

_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int | None:
    """The bytes of memory and swap that this process and its siblings may use. A control group (a container's, Slurm's)
    may allow fewer than the machine has. None if unknown."""
    machine = _meminfo(root / "proc/meminfo")
    limits = [limit for limit in (machine.get("MemTotal"), *_group_limits(root)) if limit is not None]
    return min(limits) + machine.get("SwapTotal", 0) if limits else None


def _meminfo(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[1].isdigit()}


def _group_limits(root: Path) -> list[int]:
    """Returns the limits of this process's control groups and their parents. Version 2 has one tree of groups;
    version 1 has a separate tree for memory. Within a container the group's path may not exist; the limit is then that
    of the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    limits = []
    for line in lines:
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        limits += [_number(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return [limit for limit in limits if limit is not None]


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" and for absent files."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None
