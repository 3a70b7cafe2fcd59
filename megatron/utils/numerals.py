"""Parses numbers as users write them: ASCII digits without underscores, within 64 bits. Python's own `int` and `float`
also accept the digits of other scripts, underscores, and infinities."""

import math
import re

LARGEST = 2**63 - 1
"""The largest whole number."""
INT32 = 2**31 - 1
LARGEST_WORLD = 2**18
"""The most ranks, and so the largest size of a parallel axis."""
LAYERS, WIDTH, EXPERTS = 1024, 2**20, 2**14
"""The most layers, the largest width of a matrix, and the most experts. Bounded because a plan lists each of them."""
MOST_PROCESSES = 4096
"""The most processes that one command starts on a machine."""

_WHOLE = re.compile(r"\s*([+-]?)0*(\d+)\s*", re.ASCII)
_REAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_NOT_FINITE = re.compile(r"\s*[+-]?(inf|infinity|nan)\s*", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"([1-9]\d{0,17})\s*(?:([KMGT])(I?)B?|B)", re.ASCII)
_DIGITS = len(str(LARGEST))


def whole_number(text: str) -> int:
    """Returns the number, or raises a ValueError with the reason."""
    match = _WHOLE.fullmatch(text)
    if match is None:
        raise ValueError("not a whole number")
    number = int(match[2]) if len(match[2]) <= _DIGITS else LARGEST + 1
    if number > LARGEST:
        raise ValueError("out of range")
    return -number if match[1] == "-" else number


def real_number(text: str) -> float:
    """Returns the number, or raises a ValueError with the reason."""
    match = _REAL.fullmatch(text)
    if match is None:
        raise ValueError("not a finite number" if _NOT_FINITE.fullmatch(text) else "not a number")
    number = float(text)
    if math.isinf(number) or (number == 0.0 and re.search("[1-9]", match[1])):
        raise ValueError("out of range of a 64-bit number (5e-324 to 1.8e308)")
    return number


_LEAST_BYTES = 1_000_000
"""A smaller number without a unit is more likely a number of gigabytes."""


def size_in_bytes(text: str) -> int:
    """Returns the bytes of 500MB, 2G (thousands), 80GiB (1024s) or 5000000000, or raises a ValueError with the reason
    and fix."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None and _WHOLE.fullmatch(text) and int(text) >= _LEAST_BYTES:
        return int(text)
    if match is None and _WHOLE.fullmatch(text):
        raise ValueError(f"a size without a unit; give a unit, such as {text.strip()}GB")
    if match is None:
        raise ValueError("not a size; give a size such as 80GB")
    return int(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
