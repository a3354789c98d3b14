"""
Real servers, started here: the embedded Valkey as production starts it, and plainer ones on Unix sockets and TCP ports.
"""

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cache.embedded import prepare, server_binary, server_command, socket_path

START_S = 20.0
REDIS_SERVER = shutil.which("redis-server")


class Server:
    """A running server; `address` is a socket's path or (host, port)."""

    def __init__(self, command: Sequence[str], address: Path | tuple[str, int]) -> None:
        self.address = address
        self._command = list(command)
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + START_S
        while not self.says_pong():
            if process.poll() is not None or time.monotonic() > deadline_s:
                process.kill()
                raise AssertionError(f"{self._command[0]} does not start: {process.wait()}")
            time.sleep(0.01)
        return process

    def says_pong(self) -> bool:
        try:
            return self.ask("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def ask(self, *words: str) -> bytes:
        """One command over a connection of its own; the raw reply."""
        family = socket.AF_UNIX if isinstance(self.address, Path) else socket.AF_INET
        with socket.socket(family) as link:
            link.settimeout(5)
            link.connect(str(self.address) if isinstance(self.address, Path) else self.address)
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in words]
            link.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())
            return link.recv(1 << 20)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Once more, in the same directory."""
        self._process = self._start()

    def stop(self) -> None:
        if self._process.poll() is None:
            self.thaw()
            self._process.kill()
        self._process.wait()

    @property
    def url(self) -> str:
        if isinstance(self.address, Path):
            return f"unix://{self.address}"
        return f"redis://{self.address[0]}:{self.address[1]}"


@contextlib.contextmanager
def running(command: Sequence[str], address: Path | tuple[str, int]) -> Iterator[Server]:
    server = Server(command, address)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def embedded(directory: Path) -> Iterator[Server]:
    """As production starts it."""
    prepare(directory)
    with running(server_command(directory), socket_path(directory)) as server:
        yield server


@contextlib.contextmanager
def redis(directory: Path) -> Iterator[Server]:
    """Debian's, on a Unix socket."""
    assert REDIS_SERVER is not None
    path = directory / "redis.sock"
    options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory))
    with running((REDIS_SERVER, *options), path) as server:
        yield server


@contextlib.contextmanager
def over_tcp(directory: Path, *options: str, port: int = 0) -> Iterator[Server]:
    """Valkey on a port of the loopback interface."""
    port = port or free_port()
    plain = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(directory))
    with running((str(server_binary()), *plain, *options), ("127.0.0.1", port)) as server:
        yield server


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def cluster(directory: Path, *, nodes: int = 3) -> Iterator[list[Server]]:
    """Nodes that share the slots among them, without replicas."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(nodes):
            home = directory / f"node-{number}"
            home.mkdir()
            port = _cluster_port()
            options = (
                "--cluster-enabled",
                "yes",
                "--cluster-config-file",
                "nodes.conf",
                "--cluster-node-timeout",
                "2000",
            )
            servers.append(stack.enter_context(over_tcp(home, *options, port=port)))
        share = 16384 // nodes
        for number, server in enumerate(servers):
            last = 16383 if number == nodes - 1 else (number + 1) * share - 1
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", str(number * share), str(last)) == b"+OK\r\n"
            assert server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == b"+OK\r\n"
        for server in servers[1:]:
            assert isinstance(server.address, tuple)
            assert servers[0].ask("CLUSTER", "MEET", server.address[0], str(server.address[1])) == b"+OK\r\n"
        deadline_s = time.monotonic() + START_S
        while not all(_whole(server, nodes) for server in servers):
            assert time.monotonic() < deadline_s, "the cluster does not form"
            time.sleep(0.02)
        yield servers


def _cluster_port() -> int:
    """Free, as is that of the bus, 10,000 above; both below those that the system gives to anybody who connects."""
    while True:
        port = random.SystemRandom().randrange(10_000, 22_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


def _whole(server: Server, nodes: int) -> bool:
    info = server.ask("CLUSTER", "INFO").decode()
    return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}" in info


def certificate(directory: Path) -> Path | None:
    """A key and a self-signed certificate for 127.0.0.1 in one file; None without openssl."""
    if shutil.which("openssl") is None:
        return None
    pem = directory / "pem"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    name = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(pem), "-out", f"{pem}.crt")
    subprocess.run(["openssl", "req", *kind, *name, *files], check=True, capture_output=True)
    with pem.open("ab") as both:
        both.write(Path(f"{pem}.crt").read_bytes())
    return pem


@contextlib.contextmanager
def with_tls(directory: Path, pem: Path) -> Iterator[str]:
    """Debian's Redis behind TLS, and its URL; the plain port is for the question whether it is up."""
    assert REDIS_SERVER is not None
    plain, tls = free_port(), free_port()
    options = ("--port", str(plain), "--tls-port", str(tls), "--tls-auth-clients", "no", "--save", "")
    files = ("--tls-cert-file", str(pem), "--tls-key-file", str(pem), "--tls-ca-cert-file", str(pem))
    with running((REDIS_SERVER, "--bind", "127.0.0.1", *options, *files), ("127.0.0.1", plain)):
        yield f"rediss://127.0.0.1:{tls}"
