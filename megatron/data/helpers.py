"""Calls the C functions of csrc/data. Checks their arguments, because a wrong address would crash the process."""

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np

PATH = Path(__file__).resolve().parent / "_helpers.so"
INTERFACE = 3  # version of the functions in csrc/data/helpers.cpp
_TOO_FEW, _OUTSIDE, _OUT_OF_MEMORY = -2, -3, -4
_KEY_WORDS = 624
_FUNCTIONS = {
    "mk_sequence_bytes": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "mk_never_falls": (c_void_p, c_int64, c_int),
    "mk_sample_index": (*(c_void_p, c_int64, c_void_p, c_int, c_int64, c_int64, c_int64, c_void_p, c_int, c_int),),
    "mk_shuffle": (c_void_p, c_int, c_int64, c_void_p, c_int),
    "mk_blend": (c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
}


@cache
def helpers() -> "Helpers":
    """Returns the compiled library. Raises OSError if it is missing or was built for another machine."""
    return Helpers(PATH)


class Helpers:
    """The compiled index builders. Their numpy twins are in index_builders.py and indexed/index_file.py."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.interface = int(self._library.mk_data_interface())
        for name, types in _FUNCTIONS.items():
            function = getattr(self._library, name, None)  # a library of another interface has other functions
            if function is not None:
                function.argtypes, function.restype = types, c_int64

    def sequence_bytes(self, lengths: np.ndarray, offsets: np.ndarray, itemsize: int, *, threads: int) -> int:
        """Bytes that the sequences take, or -1 if the lengths and offsets contradict each other."""
        _require(len(lengths) == len(offsets), "lengths and offsets must have the same number of entries")
        pointers = _input(lengths, np.int32), _input(offsets, np.int64)
        return _checked(self._library.mk_sequence_bytes(*pointers, len(lengths), itemsize, _threads(threads)))

    def never_falls(self, values: np.ndarray, *, threads: int) -> bool:
        """True if no value is smaller than the one before."""
        return bool(_checked(self._library.mk_never_falls(_input(values, np.int64), len(values), _threads(threads))))

    def sample_index(
        self, lengths: np.ndarray, documents: np.ndarray, seq_length: int, out: np.ndarray, *, threads: int
    ) -> None:
        """Fills out[samples + 1, 2]; see `Builders.sample_index`."""
        _require(out.ndim == 2 and out.shape[1] == 2 and len(out) > 0, "out must be [samples + 1, 2]")
        _require(seq_length > 0, "seq_length must be positive")
        code = self._library.mk_sample_index(
            _input(lengths, np.int32),
            len(lengths),
            _input(documents, np.int32, np.int64),
            documents.itemsize,
            len(documents),
            seq_length,
            len(out) - 1,
            _output(out, np.int32, np.int64),
            out.itemsize,
            _threads(threads),
        )
        _checked(code, "the documents have fewer tokens than the samples need")

    def shuffle(self, values: np.ndarray, key: np.ndarray, position: int) -> int:
        """Shuffles the values, advances the key of numpy's MT19937, and returns its new position."""
        _require(
            len(key) == _KEY_WORDS and 0 <= position <= _KEY_WORDS,
            "the key must have 624 words, and the position must be from 0 to 624",
        )
        _require(len(values) <= 1 << 32, "at most 2^32 entries can be shuffled")
        pointer = _output(values, np.int32, np.uint32, np.int64)
        key_pointer = _output(key, np.uint32)
        return _checked(self._library.mk_shuffle(pointer, values.itemsize, len(values), key_pointer, position))

    def blend(self, weights: np.ndarray, limits: np.ndarray | None, datasets: np.ndarray, numbers: np.ndarray) -> None:
        """Fills both outputs; see `Builders.blend`."""
        _require(0 < len(weights) < 1 << 15, "a blend must have 1 to 32767 datasets")
        _require(
            limits is None or len(limits) == len(weights), "limits and weights must have the same number of entries"
        )
        _require(len(datasets) == len(numbers), "outputs differ in length")
        limit_pointer = None if limits is None else _input(limits, np.int64)
        outputs = _output(datasets, np.int16), _output(numbers, np.int64)
        code = self._library.mk_blend(_input(weights, np.float64), len(weights), limit_pointer, *outputs, len(datasets))
        _checked(code, "the datasets have fewer samples than the blend needs")


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _threads(threads: int) -> int:
    _require(1 <= threads <= 256, "the number of threads must be from 1 to 256")
    return threads


def _input(array: np.ndarray, *types: type) -> int:
    """Address of a contiguous array of one of these types. Never copies, because results in a copy would be lost."""
    if array.dtype not in types or not array.flags.c_contiguous:
        names = " or ".join(np.dtype(one).name for one in types)
        raise TypeError(f"a contiguous array of {names} is needed, not {array.dtype} with strides {array.strides}")
    return array.ctypes.data


def _output(array: np.ndarray, *types: type) -> int:
    _require(array.flags.writeable, "the output cannot be written to")
    return _input(array, *types)


def _checked(result: int, too_few: str = "") -> int:
    if result == _TOO_FEW:
        raise IndexError(too_few)
    if result == _OUTSIDE:
        raise IndexError("a document number is outside the dataset")
    if result == _OUT_OF_MEMORY:
        raise MemoryError("the index builders ran out of memory or threads")
    return result
