"""Parser of --split."""

import math
import re

from megatron.errors import ConfigError
from megatron.utils.numerals import real_number

Shares = tuple[float, float, float]
"""Shares of training, validation and test, which add up to one."""


def parse_split(text: str) -> Shares:
    """Parses '969, 30, 1', '98/2/0' or a single number. Surrounding quotes are ignored."""
    way_out = "give up to three numbers of 0 or more that are not all 0, as in --split 969,30,1"
    try:
        shares = [real_number(part) for part in re.split("[,/]", text.strip("'\""))]
    except ValueError:
        raise ConfigError(f"--split {text}: not a list of numbers; {way_out}") from None
    if len(shares) > 3:
        raise ConfigError(f"--split {text}: {len(shares)} numbers; {way_out}")
    if any(share < 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ConfigError(f"--split {text}: not valid proportions; {way_out}")
    shares += [0.0] * (3 - len(shares))
    total = 0.0
    for share in shares:  # not sum(): Python 3.12 changed its rounding, but the split must not change
        total += share
    return (shares[0] / total, shares[1] / total, shares[2] / total)
