"""A proxy between us and a server, over real sockets, that delays replies, or holds them or a request back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class Proxy:
    """`delay_s` lies between a reply's arrival here and its way on; `passing` keeps all of them until it is set."""

    def __init__(self, target: Path, path: Path) -> None:
        self.path = path
        self.delay_s = 0.0
        self.connections = 0
        """Ever."""
        self.open = 0
        """Now, as far as we are concerned."""
        self.passing = asyncio.Event()
        self.passing.set()
        self._detained: asyncio.Event | None = None
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    def detain(self) -> asyncio.Event:
        """The next request waits for this, as in a network that is slow for some; also when its sender has gone."""
        self._detained = asyncio.Event()
        return self._detained

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._target)
        back = asyncio.create_task(self._pump(upstream_reader, writer, slow=True))
        self._tasks.add(back)
        back.add_done_callback(self._tasks.discard)
        await self._pump(reader, upstream_writer, slow=False)
        self.open -= 1

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, slow: bool) -> None:
        try:
            while data := await reader.read(65536):
                if slow:
                    await asyncio.sleep(self.delay_s)
                    await self.passing.wait()
                elif self._detained is not None:
                    detained, self._detained = self._detained, None
                    await detained.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # one side has gone, which is what the tests are about
        finally:
            writer.close()

    async def close(self) -> None:
        self.passing.set()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


@contextlib.asynccontextmanager
async def proxying(target: Path, path: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(target, path)
    server = await asyncio.start_unix_server(proxy.serve, path)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
