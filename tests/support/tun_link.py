"""A network between two network namespaces with delay, loss and an end that can be pulled.

Packets go from a TUN device here to one in the other namespace through this process, so no
part of the kernel but TUN is needed, and the link is gone when this process is.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import struct
import subprocess
from contextlib import suppress

HERE, THERE = "192.0.2.1", "192.0.2.2"  # of the range that is kept free for examples
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PACKET = 1 << 16


class TunLink:
    """Joins this namespace (HERE) and that of process `pid` (THERE). Needs CAP_NET_ADMIN."""

    def __init__(self, pid: int, delay_s: float, loss: float) -> None:
        self._pid = pid
        self._delay_s = delay_s  # one way
        self._loss = loss  # share of the packets
        self._random = random.Random(1)
        self._ends: list[int] = []
        self.up = True
        self.num_packets = 0
        self.num_lost = 0

    def open(self) -> None:
        """Makes both ends and begins to forward; call it on the loop."""
        self._ends = [_tun("hw-here"), _tun("hw-there")]
        _ip("link", "set", "hw-there", "netns", str(self._pid))
        inside = ("nsenter", f"--net=/proc/{self._pid}/ns/net")
        for where, name, own, other in (
            ((), "hw-here", HERE, THERE), (inside, "hw-there", THERE, HERE),
        ):  # fmt: skip
            _ip("link", "set", "lo", "up", where=where)
            _ip("address", "add", own, "peer", other, "dev", name, where=where)
            _ip("link", "set", name, "up", where=where)
        loop = asyncio.get_running_loop()
        for source, sink in (self._ends, reversed(self._ends)):
            loop.add_reader(source, self._forward, source, sink)

    def close(self) -> None:
        """Ends the link and both devices."""
        loop = asyncio.get_running_loop()
        ends, self._ends = self._ends, []
        for end in ends:
            loop.remove_reader(end)
            os.close(end)

    def _forward(self, source: int, sink: int) -> None:
        packet = os.read(source, _PACKET)
        self.num_packets += 1
        if not self.up or self._random.random() < self._loss:
            self.num_lost += 1
            return
        asyncio.get_running_loop().call_later(self._delay_s, self._write, sink, packet)

    def _write(self, sink: int, packet: bytes) -> None:
        if self._ends:
            with suppress(BlockingIOError):  # a full queue loses packets, as on any network
                os.write(sink, packet)


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _ip(*command: str, where: tuple[str, ...] = ()) -> None:
    subprocess.run((*where, "ip", *command), check=True)
