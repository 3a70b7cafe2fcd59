"""Log lines about a dynamic loss scale that starts too high: the number of lost updates, and the key that lowers it."""

import math
from collections.abc import Iterator

from megatron.config.sections.precision import PrecisionConfig

_FITS = 16
"""Power of 2 at which most models' gradients fit in fp16: DeepSpeed's default start. A largest element of 1, which
gradients of a mean loss rarely exceed, just overflows there (fp16 ends at 65504)."""
SEVERAL = 3
"""Number of skipped updates in a row after which a line is printed."""


def lines_at_start(precision: PrecisionConfig) -> Iterator[str]:
    power = math.log2(precision.initial_loss_scale)
    if not precision.fp16 or precision.loss_scale is not None or power - _FITS <= SEVERAL:
        return
    skipped = _more_halvings(precision.initial_loss_scale) + precision.hysteresis - 1
    yield (
        f"fp16: the loss scale begins at {_shown(precision.initial_loss_scale)}; about {skipped} updates are skipped "
        f"until it is 2^{_FITS}, where gradients usually fit; to begin there, set "
        f'"initial_scale_power": {_FITS} in fp16'
    )


def line_after_skips(scale: float, precision: PrecisionConfig) -> str:
    """Returns the line after `SEVERAL` skipped updates in a row. `scale`: loss scale of the next update."""
    said = f"{SEVERAL} updates in a row were skipped: the loss scale is {_shown(scale)}"
    more = _more_halvings(scale)
    if more:
        return (
            f"{said}; about {more} more halvings are likely, one per skipped update, until it is 2^{_FITS}, where "
            f'gradients usually fit; to begin there, set "initial_scale_power": {_FITS} in fp16'
        )
    most = max(0, math.ceil(math.log2(scale / precision.min_loss_scale)))
    return (
        f"{said}; at most {most} more halvings follow (min_loss_scale {precision.min_loss_scale:g}); if that is "
        f"not enough, lower the learning rate; to begin at this scale, set "
        f'"initial_scale_power": {max(0, math.floor(math.log2(scale)))} in fp16'
    )


def _more_halvings(scale: float) -> int:
    return max(0, math.ceil(math.log2(scale) - _FITS))


def _shown(scale: float) -> str:
    power = math.log2(scale)
    return f"2^{power:.0f}" if power == int(power) else f"{scale:g}"
