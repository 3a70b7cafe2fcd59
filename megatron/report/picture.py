"""Writes a figure of matplotlib, an optional dependency, as a PNG."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(draw: "Callable[[], Figure]", output: Path) -> None:
    """Writes the figure that `draw` makes. A missing matplotlib, or an unwritable file, is a one-line error."""
    try:
        figure = draw()
    except ImportError:
        raise ConfigError(
            f"--output {output}: drawing needs matplotlib, which is not installed for {sys.executable}; "
            f"{sys.executable} -m pip install matplotlib (the extra 'plot')"
        ) from None
    try:
        figure.savefig(output, format="png", dpi=150)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
