"""
Hosts of one's own: each rank process in a network namespace, and a switch between them that delays every packet.

A process leaves its network for an empty one and opens a TUN device there, which the switch reads and writes.  Nothing
has a name outside: when the process ends, its namespace and its device are gone.  The switch delays, as netem, which is
the kernel's own way, is missing from many; bandwidth is the kernel's token bucket filter, set by `tc`.
"""

import ctypes
import fcntl
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from pathlib import Path

from tests.torch.ranks.processes import Seat

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES_MAX = 1500
PACKETS_MAX = 20_000
SETUP_S = 20.0


def address_of(rank: int) -> str:
    """Of the host of a rank."""
    return f"10.77.0.{rank + 1}"


def leave_for_own_host(seat: Seat, switch: Path) -> str:
    """Move this process to a host of its own, for good.  Returns: why that cannot be; empty: it is there."""
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # not all users have these two in it
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc, of iproute2"
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        return f"no network namespace here: {os.strerror(ctypes.get_errno())}"
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"wire", IFF_TUN | IFF_NO_PI))
    except OSError as error:
        return f"no TUN device here: {error}"
    for command in (
        "ip link set lo up",
        f"ip address add {address_of(seat.rank)}/24 dev wire",
        f"ip link set wire mtu {PACKET_BYTES_MAX} up",
    ):
        subprocess.run(command.split(), check=True, timeout=SETUP_S)
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(SETUP_S)
        line.connect(str(switch))
        socket.send_fds(line, [bytes([seat.rank])], [device])
    os.close(device)
    return ""


def limit_rate(mbit: int) -> str:
    """What this host sends goes at no more than that.  Returns: why that cannot be; empty: it does."""
    command = f"tc qdisc replace dev wire root tbf rate {mbit}mbit burst 10kb latency 2s"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False, timeout=SETUP_S)
    return f"tc: {done.stderr.strip()}" if done.returncode else ""


class Switch:
    """Takes the devices of hosts in, at `path`, and carries their packets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.delay_ns = 0
        self._devices: dict[int, int] = {}
        self._under_way: deque[tuple[int, int, bytes]] = deque()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="switch")
        self._thread.start()

    def close(self) -> None:
        """Carry no more."""
        self._ends.set()
        self._thread.join()
        self._listener.close()
        for device in self._devices.values():
            os.close(device)

    def _carry(self) -> None:
        while not self._ends.is_set():
            left_s = 0.05
            if self._under_way:
                left_s = min(left_s, max(0.0, (self._under_way[0][0] - time.monotonic_ns()) / 1e9))
            doors = [self._listener.fileno(), *self._devices.values()]
            for source in select.select(doors, [], [], left_s)[0]:
                if source == doors[0]:
                    self._take_in()
                else:
                    self._read(source)
            while self._under_way and self._under_way[0][0] <= time.monotonic_ns():
                _, device, packet = self._under_way.popleft()
                _try_write(device, packet)

    def _take_in(self) -> None:
        line, _ = self._listener.accept()
        with line:
            line.settimeout(SETUP_S)
            rank, devices, _, _ = socket.recv_fds(line, 1, 1)
        self._devices[rank[0]] = devices[0]

    def _read(self, source: int) -> None:
        try:
            while len(self._under_way) < PACKETS_MAX:
                packet = os.read(source, PACKET_BYTES_MAX)
                target = self._devices.get(packet[19] - 1) if packet[0] >> 4 == 4 else None
                if target is not None:
                    self._under_way.append((time.monotonic_ns() + self.delay_ns, target, packet))
        except BlockingIOError:
            pass  # That is all for now.
        except OSError:
            # Its host is gone.
            self._devices = {rank: device for rank, device in self._devices.items() if device != source}
            os.close(source)


def _try_write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        pass  # A wire may lose what it likes.
