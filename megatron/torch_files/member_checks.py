"""Verifies the CRC-32 checksum that torch.save writes for each member of its zip files, when the member is first used.
(torch.load ignores it.)"""

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megatron.errors import CheckpointError
from megatron.torch_files.mapped_bytes import Bytes

Say = Callable[[str], object]
_PIECE = 16 * 2**20  # bytes that a thread hashes at a time
_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest bit is the coefficient of 1
_ONE, _X = 1 << 31, 1 << 30


class DamagedMemberError(CheckpointError):
    """A member of a zip file does not have its recorded checksum."""


class MemberChecks:
    """Compares each member's checksum once. The first file without checksums is reported, through `say`."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._told = False
        self._compared: set[tuple[Path, int]] = set()  # files, and positions in them

    def compare(self, member: Bytes, recorded: int, what: Callable[[], str]) -> None:
        """Raises if the checksum of a member is not `recorded`; 0 means that torch wrote none. `what` returns the name
        of the member for the message."""
        place = (member.path, member.start)
        if not member.length or place in self._compared:
            return
        if recorded == 0:
            self.lacks(member.path, "was written without the checksums that torch.save adds")
        elif (found := crc32(member.view(), torch.get_num_threads())) != recorded:
            raise DamagedMemberError(
                f"{member.path}: {what()} is damaged (its CRC-32 is {found:08x}, but {recorded:08x} was written); copy "
                "or download the file again, or use another checkpoint. If you changed the file on purpose, write it "
                "again with torch.save"
            )
        self._compared.add(place)

    def lacks(self, path: Path, why: str) -> None:
        if not self._told:
            self._say(f"{path} {why}; damage to this file, and to other files without checksums, is not detected")
        self._told = True


def crc32(data: memoryview, threads: int, piece: int = _PIECE) -> int:
    """Returns the CRC-32 of all bytes; each thread computes a piece."""
    if threads < 2 or len(data) <= piece:
        return zlib.crc32(data)
    pieces = [data[start : start + piece] for start in range(0, len(data), piece)]
    with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
        first, *rest = pool.map(zlib.crc32, pieces)  # releases the interpreter's lock
    shift = _power_of_x(8 * piece)
    for each, found in zip(pieces[1:], rest, strict=True):
        first = _times(shift if len(each) == piece else _power_of_x(8 * len(each)), first) ^ found
    return first


def _power_of_x(exponent: int) -> int:
    """Returns x to this power, modulo the polynomial. Multiplying a checksum by it shifts it by `exponent` bits."""
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _times(square, result)
        square, exponent = _times(square, square), exponent >> 1
    return result


def _times(one: int, other: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC-32's polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
