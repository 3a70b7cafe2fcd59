"""Random values by index: element i of a named tensor depends only on (seed, name, i).

A rank can therefore draw its slice without drawing the whole tensor. The values have the same bits on every processor
and with every number of threads:

- The random bits come from numpy's Philox4x64-10, a counter-based generator whose stream numpy guarantees.
- The rest uses integers and the float64 operations + - * / and square root, whose rounding IEEE 754 defines.
- Logarithm and cosine of a math library and fused multiply-adds are not used.

csrc/random computes the same values several times as fast. numpy is the fallback if the kernels are not built.
"""

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.ops.library import c_library

Run = tuple[int, int]
"""(first element, number of elements) in the whole tensor."""
Words = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]
Make = Callable[[Words], Floats]
"""[n] words -> [n, 2] values."""
Fill = Callable[..., int]
"""(runs, number of runs, values, number of values, key's lower and upper half, scale, normal) -> 0 for success."""

_AT_ONCE = 1 << 15  # elements per batch of a thread, which fit its cache
_PER_BLOCK, _PERIOD = 4, 1 << 256  # words per counter, and number of counters


def normal_values(seed: int, name: str, runs: Sequence[Run], std: float, *, in_numpy: bool = False) -> Tensor:
    """Returns the elements in `runs`, concatenated, in fp32: normally distributed with standard deviation `std`."""
    compiled = None if in_numpy else _compiled()
    if compiled is not None:
        return _draw(compiled, seed, name, runs, std, normal=True)
    return _draw_in_numpy(seed, name, runs, partial(_normal_pairs, std=std))


def uniform_values(seed: int, name: str, runs: Sequence[Run], bound: float, *, in_numpy: bool = False) -> Tensor:
    """Returns the elements in `runs`, concatenated, in fp32: uniformly distributed between -bound and bound."""
    compiled = None if in_numpy else _compiled()
    if compiled is not None:
        return _draw(compiled, seed, name, runs, bound, normal=False)
    return _draw_in_numpy(seed, name, runs, partial(_uniform_pairs, bound=bound))


def words_of(seed: int, name: str, runs: Sequence[Run]) -> Iterator[Words]:
    """Yields the 64 random bits of each pair of elements, one array per entry of `runs`, which counts in pairs."""
    key = _key(seed, name)
    generator, here = np.random.Philox(key=key, counter=0), 0  # `here`: the generator's counter
    for start, count in runs:
        block, before = divmod(start, _PER_BLOCK)
        generator.advance((block - here) % _PERIOD)  # drops buffered words of the current counter
        yield generator.random_raw(before + count)[before:]
        here = block + -(-(before + count) // _PER_BLOCK)


def _key(seed: int, name: str) -> int:
    """Philox's 128-bit key."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


def _draw(compiled: Fill, seed: int, name: str, runs: Sequence[Run], scale: float, *, normal: bool) -> Tensor:
    numbers = np.array(runs, dtype=np.int64).reshape(-1, 2)
    values = np.empty(numbers[:, 1].sum(), dtype=np.float32)
    high, low = divmod(_key(seed, name), 1 << 64)
    if compiled(numbers.ctypes.data, len(numbers), values.ctypes.data, len(values), low, high, scale, normal) != 0:
        raise MemoryError(f"cannot compute the initial values of {name}: out of memory or threads")
    return torch.from_numpy(values)


@cache
def _compiled() -> Fill | None:
    """Returns csrc/random's function, which fills the memory at an address; None if the kernels are not built."""
    kernels = c_library()
    if kernels is None:
        return None
    function = kernels.mk_random_values
    memory, word = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64
    function.argtypes = (*memory, *memory, word, word, ctypes.c_double, ctypes.c_int)
    return function


def _draw_in_numpy(seed: int, name: str, runs: Sequence[Run], make: Make) -> Tensor:
    values = np.empty(sum(count for _, count in runs), dtype=np.float32)

    def fill(batch: list[tuple[int, Run]]) -> None:
        words = list(words_of(seed, name, [(first // 2, _pairs(first, count)) for _, (first, count) in batch]))
        made = make(np.concatenate(words)).reshape(-1)
        position = 0
        for place, (first, count) in batch:
            odd = first % 2
            values[place : place + count] = made[position + odd : position + odd + count]
            position += 2 * _pairs(first, count)

    if len(values) <= _AT_ONCE:  # starting a thread takes longer than the values of a small tensor
        for batch in _batches(runs):
            fill(batch)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(fill, _batches(runs)))
    return torch.from_numpy(values)


def _pairs(first: int, count: int) -> int:
    """Number of element pairs that contain these elements."""
    return (first + count + 1) // 2 - first // 2


def _batches(runs: Iterable[Run]) -> Iterator[list[tuple[int, Run]]]:
    """Yields batches of about equal size: pieces of the runs, each with its place in the result."""
    batch: list[tuple[int, Run]] = []
    place = held = 0
    for first, count in runs:
        while count:
            taken = min(count, _AT_ONCE - held)
            batch.append((place, (first, taken)))
            place, first, count, held = place + taken, first + taken, count - taken, held + taken
            if held == _AT_ONCE:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


_LOW, _LOW_30, _SIGN = np.uint64(0xFFFFFFFF), np.uint64((1 << 30) - 1), np.uint64(1 << 63)
_TWO_52 = np.uint64(0x4330000000000000)  # the bits of 2^52 as a float64
_BELOW_SQRT_HALF = np.int64(0x3FE6A09E00000000)  # the bits of 0.70710...
_EXPONENT = np.int64(-1 << 52)
_LOG_2 = 0.6931471805599453


def _uniform_pairs(words: Words, bound: float) -> Floats:
    """Maps each half of a word to the middle of one of 2^32 equal parts of (-bound, bound), lower half first."""
    pairs = np.empty((len(words), 2), dtype=np.float32)
    for column, half in enumerate((words & _LOW, words >> np.uint64(32))):
        value = _as_double(half)
        value += 0.5 - 2.0**31
        value *= bound * 2.0**-31
        pairs[:, column] = value
    return pairs


def _normal_pairs(words: Words, std: float) -> Floats:
    """Applies Box-Muller. A word's lower half gives the distance from the origin; its upper half gives two signs and 30
    bits of an angle in the first quadrant."""
    distance = _as_double(words & _LOW)
    distance += 0.5
    distance *= 2.0**-32
    distance = _log(distance)  # the argument is in (0, 1)
    np.negative(distance, out=distance)
    np.sqrt(distance, out=distance)  # a factor of sqrt(2) too small
    distance *= std
    words >>= np.uint64(32)
    angle = _as_double(words & _LOW_30)
    angle += 0.5 - 2.0**29
    angle *= math.pi / 2 * 2.0**-30  # 45 degrees less: from -45 to 45
    cosine, sine = _cos_sin(angle)
    pairs = np.empty((len(words), 2), dtype=np.float32)
    # Cosine and sine of the angle 45 degrees further, both a factor of sqrt(2) too large.
    for column, turned in enumerate((np.subtract(cosine, sine, out=angle), np.add(cosine, sine, out=cosine))):
        turned *= distance
        bits = turned.view(np.uint64)
        bits ^= (words << np.uint64(32 + column)) & _SIGN
        pairs[:, column] = turned
    return pairs


def _as_double(integers: Words) -> Doubles:
    """Converts to float64, exactly for integers below 2^52."""
    integers |= _TWO_52
    values = integers.view(np.float64)
    values -= 2.0**52
    return values


def _log(x: Doubles) -> Doubles:
    """Natural logarithm to 7 digits: splits off a power of two and applies the series of the inverse hyperbolic tangent
    to the factor between sqrt(1/2) and sqrt(2)."""
    bits = x.view(np.int64)
    exponent = (bits - _BELOW_SQRT_HALF) & _EXPONENT
    factor = (bits - exponent).view(np.float64)
    exponent >>= np.int64(52)
    s = factor - 1.0
    factor += 1.0
    s /= factor
    square = np.multiply(s, s, out=factor)
    series = _polynomial(square, (2 / 7, 2 / 5, 2 / 3, 2.0))
    series *= s
    series += np.multiply(exponent, _LOG_2, out=s, casting="unsafe")
    return series


def _cos_sin(x: Doubles) -> tuple[Doubles, Doubles]:
    """Taylor series of cosine and sine, to 7 digits for angles up to 45 degrees."""
    square = x * x
    cosine = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in (4, 3, 2, 1, 0)])
    sine = _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in (4, 3, 2, 1, 0)])
    sine *= x
    return cosine, sine


def _polynomial(x: Doubles, coefficients: Sequence[float]) -> Doubles:
    """Evaluates a polynomial by Horner's rule. The coefficient of the highest power comes first."""
    value = x * coefficients[0]
    value += coefficients[1]
    for coefficient in coefficients[2:]:
        value *= x
        value += coefficient
    return value
