"""Files that several ranks read whole."""

import errno
from pathlib import Path


def regular(path: Path) -> Path:
    """Returns the path unless it is a pipe, which can be read once and by one rank, or a device, which may have no
    end; raises an OSError then."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a regular file; copy its content to a file and name that", str(path))
    return path
