"""Files that several ranks read whole."""

import errno
from pathlib import Path


def regular(path: Path) -> Path:
    """Returns the path. Raises an OSError for a pipe, which only one rank can read and only once, and for a device,
    which may have no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file; copy its content to a file and name that", str(path))
    return path
