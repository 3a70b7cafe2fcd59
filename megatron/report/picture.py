"""A figure of matplotlib, which is optional, as a PNG."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(draw: "Callable[[], Figure]", output: Path) -> None:
    """`draw` imports matplotlib. That it is not installed, or the file not writable, is an error of one line."""
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
