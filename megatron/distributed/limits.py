"""Raises the limit on open files to what a rank needs: its own files, and a socket for each connection to another
rank."""

import resource

from megatron.errors import ConfigError
from megatron.layout import AXES, Layout

OWN_FILES = 1024
"""Files of data, libraries, logs, and the accelerator's own library."""


def gloo_sockets(layout: Layout, backend: str) -> int:
    """Largest number of sockets that gloo opens: one for each other member of every group, and one to listen. With
    another backend only the world has a gloo group."""
    return sum(layout.size(name) for name in AXES) if backend == "gloo" else layout.world_size


def allow_open_files(layout: Layout, backend: str) -> str | None:
    """Raises this process's limit on open files to what it may need; returns a line for the log, or None.

    Raises ConfigError if the system forbids that, because gloo would otherwise fail while connecting.
    """
    needed = gloo_sockets(layout, backend) + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, needed):
        return None
    if not _allows(hard, needed):
        raise ConfigError(
            f"ulimit -n {hard}: a rank of {layout.world_size} may open {needed} files and connections; allow that many "
            f"on every machine (ulimit -n {needed}, nofile in limits.conf, or LimitNOFILE of the service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return f"this rank may now open {needed} files and connections instead of {soft} (ulimit -n)"


def _allows(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
