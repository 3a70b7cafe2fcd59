"""Finds the network interface that leads to the other machines of a run.

By default gloo uses the address that this machine's host name resolves to. On many systems that is 127.0.1.1, where no
other machine can connect.
"""

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ELSEWHERE = ("198.51.100.1", "2001:db8::1")  # reserved for documentation: nothing is sent, only the route is queried
_SIOCGIFADDR = 0x8915
_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    name: str
    address: str


def interface_towards(host: str) -> Interface | None:
    """Interface by which this machine reaches `host`. If `host` is this machine: the interface of the default route or,
    without a default route, the only interface with an address for other machines. None if unknown."""
    for target in (host, *_ELSEWHERE):
        address = source_address(target)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            name = _interfaces().get(address)
            if name is not None:
                return Interface(name, address)
    return _only_one()


def reachable_port(port: int) -> bool:
    """True if a socket of this machine listens on the port at an address that other machines can reach; False if the
    system does not list its sockets."""
    if all(ipaddress.ip_address(address).is_loopback for address in _interfaces()):
        return False
    for path in _SOCKETS:
        with suppress(OSError):
            for line in path.read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                digits, _, number = local.partition(":")
                if state == _LISTENS and int(number, 16) == port and not _address(digits).is_loopback:
                    return True
    return False


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses an address that the system lists as words of four bytes, each in this machine's byte order."""
    words = bytes.fromhex(digits)
    packed = b"".join(struct.pack(">I", word) for (word,) in struct.iter_unpack("=I", words))
    found = ipaddress.ip_address(packed)
    return getattr(found, "ipv4_mapped", None) or found


def _only_one() -> Interface | None:
    """Returns the only interface with an address that other machines can reach; None if there are several."""
    outward: dict[str, str] = {}
    for address, name in _interfaces().items():
        kind = ipaddress.ip_address(address)
        if not (kind.is_loopback or kind.is_link_local):
            outward.setdefault(name, address)
    return next((Interface(name, address) for name, address in outward.items()), None) if len(outward) == 1 else None


def source_address(host: str) -> str | None:
    """Source address of packets to `host`. Nothing is sent, because connecting a UDP socket has no handshake."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as asking:
                asking.connect(target)
                return str(asking.getsockname()[0]).partition("%")[0]
    return None


def _interfaces() -> dict[str, str]:
    """Interface names by address."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    with suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found
