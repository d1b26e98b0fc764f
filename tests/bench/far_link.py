"""Links of limited rate and long delay between network namespaces of this machine; needs root and Linux.

Every link is learner - router - syncer:

1. The router limits the rate in both directions with `tc tbf`. Its buffers are small, so packets are lost.
2. Between router and syncer, this process holds each packet for half of the round-trip time (two TUN devices). So TCP
   itself has the delay. A proxy would end the connection, and TCP would be fast on both of its sides.
3. The syncer has one namespace for all links, and an address on each.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PI, _VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0x1 | 0x2 | 0x4  # checksums and segmentation are left to the receiver, so a read gives up to 64 KiB
_MAX_PACKET = 1 << 17
_MIN_SEGMENTS = 40  # that TCP sends at once, so that this process has fewer packets to carry
SYNCER = "diloco-syncer"


def _carry(names: Sequence[str], delay_s: float) -> None:
    """Carry packets between two TUN devices, each packet after delay_s, until their namespaces are gone."""
    ends = [_tun(name) for name in names]
    for source, target in (ends, ends[::-1]):
        held: deque[tuple[float, bytes]] = deque()
        came = threading.Semaphore(0)
        threading.Thread(target=_read, args=(source, held, came, delay_s), daemon=True).start()
        threading.Thread(target=_write, args=(target, held, came), daemon=True).start()


def _read(source: int, held: deque[tuple[float, bytes]], came: threading.Semaphore, delay_s: float) -> None:
    while True:
        try:
            packet = os.read(source, _MAX_PACKET)
        except OSError:  # the namespace is gone, and the device with it
            return
        held.append((time.monotonic() + delay_s, packet))
        came.release()


def _write(target: int, held: deque[tuple[float, bytes]], came: threading.Semaphore) -> None:
    while True:
        came.acquire()
        due_s, packet = held.popleft()
        if (wait_s := due_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        try:
            os.write(target, packet)
        except OSError:
            return


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN | _NO_PI | _VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
    return device


class FarLinks:
    """Links from `num` learners to one syncer.

    Args:
        num: number of learners.
        mbit_s: rate of each link, in each direction.
        round_trip_s: round-trip time.
        buffer_s: what the router's buffer holds, in seconds of the rate; None: half of the round-trip time.
        congestion: TCP's congestion control on both ends.
    """

    def __init__(
        self, num: int, *, mbit_s: float, round_trip_s: float, buffer_s: float | None = None, congestion: str = "cubic"
    ) -> None:
        self.num = num
        self._shape = _shape(mbit_s, round_trip_s / 2 if buffer_s is None else buffer_s)
        self._round_trip_s = round_trip_s
        self._congestion = congestion

    def __enter__(self) -> FarLinks:
        self.__exit__(None, None, None)
        make(SYNCER)
        for k in range(self.num):
            self._link(k)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in [SYNCER, *(name(k) for k in range(self.num) for name in (learner, _router))]:
            delete(name)

    @staticmethod
    def address(k: int) -> str:
        """The syncer's address for a learner."""
        return f"10.77.{k}.6"

    def _link(self, k: int) -> None:
        near, far, ups, downs = f"tr{k}", f"ts{k}", f"up{k}", f"down{k}"
        names, router = (learner(k), _router(k)), _router(k)
        for name in names:
            make(name)
        _ip(f"link add {ups} netns {learner(k)} type veth peer name {downs} netns {router}")
        _carry((near, far), self._round_trip_s / 2)
        _ip(f"link set {near} netns {router}")
        _ip(f"link set {far} netns {SYNCER}")
        for name, device, address in (
            (learner(k), ups, f"10.77.{k}.1"),
            (router, downs, f"10.77.{k}.2"),
            (router, near, f"10.77.{k}.5"),
            (SYNCER, far, f"10.77.{k}.6"),
        ):
            _ip(f"-n {name} addr add {address}/30 dev {device}")
            _ip(f"-n {name} link set {device} up txqueuelen 10000")
        _ip(f"-n {learner(k)} route add 10.77.{k}.4/30 via 10.77.{k}.2 congctl {self._congestion}")
        _ip(f"-n {SYNCER} route add 10.77.{k}.0/30 via 10.77.{k}.5 congctl {self._congestion}")
        inside(router, ["sysctl", "-qw", "net.ipv4.ip_forward=1"])
        for device in (downs, near):
            inside(router, ["tc", "qdisc", "replace", "dev", device, "root", *self._shape])


def learner(k: int) -> str:
    """Name of a learner's namespace."""
    return f"diloco-l{k}"


def within(name: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs in a namespace."""
    return ["ip", "netns", "exec", name, *command]


def inside(name: str, command: Sequence[str]) -> None:
    """Run a command in a namespace."""
    subprocess.run(within(name, command), check=True)


def _router(k: int) -> str:
    return f"diloco-r{k}"


def _shape(mbit_s: float, buffer_s: float) -> list[str]:
    num_bytes = mbit_s * 1e6 / 8
    burst, limit = max(num_bytes / 250, 3000), num_bytes * buffer_s
    return f"tbf rate {mbit_s}mbit burst {burst:.0f} limit {limit:.0f}".split()


def delete(name: str) -> None:
    """Delete a namespace, if it exists."""
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def make(name: str) -> None:
    """Make a namespace with a loopback device."""
    _ip(f"netns add {name}")
    _ip(f"-n {name} link set lo up")
    inside(name, ["sysctl", "-qw", f"net.ipv4.tcp_min_tso_segs={_MIN_SEGMENTS}"])


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
