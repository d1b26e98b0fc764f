"""Simulate a bad network with a TCP proxy that delays, throttles, cuts, freezes and counts traffic.

1. The proxy does not interpret the data, so it works in front of TLS. Its byte counters count the same bytes as a
   network card.
2. All settings can change while connections are open. A method returns after its change has taken effect.
3. Rate and delay apply to each direction separately. All connections share the rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType

from lightning_diloco.errors import LocalError
from lightning_diloco.transport.address import join_host_port, split_host_port

_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS_IN_FLIGHT = 1024
_TURNS_TO_HAND_OVER = 5
_InFlight = asyncio.Queue[tuple[float, bytes]]


class FaultProxy:
    """Listens on its own address and forwards all connections to the target.

    Args:
        target: `host:port`.
        listen: `host:port`; port 0 for any free port.
        delay_s: delay in each direction; may be set at any time.
        rate_bps: bits per second in each direction; None: no limit; may be set at any time.
        reset_probability: probability that a chunk of up to 64 KiB resets its connection; may be set at any time.
        seed: seed of the resets.

    Attributes:
        bytes_up: bytes sent to the target so far.
        bytes_down: bytes sent back so far.
        num_connections: connections accepted so far.
    """

    def __init__(
        self,
        target: str,
        listen: str = "127.0.0.1:0",
        *,
        delay_s: float = 0.0,
        rate_bps: float | None = None,
        reset_probability: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.delay_s = delay_s
        self.rate_bps = rate_bps
        self.reset_probability = reset_probability
        self.bytes_up = 0
        self.bytes_down = 0
        self.num_connections = 0
        self._target = split_host_port(target)
        self._host, self._port = split_host_port(listen)
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._flowing = _flowing()  # of new connections; an open connection keeps its event
        self._held = asyncio.Event()
        self._links: set[asyncio.Task[None]] = set()
        self._free_at_s = {"up": 0.0, "down": 0.0}

    @property
    def address(self) -> str:
        """`host:port` to connect to instead of the target."""
        return join_host_port(self._host, self._port)

    def start(self) -> FaultProxy:
        """Start to listen; return self."""
        self._thread.start()
        self._run(self._listen)
        return self

    def stop(self) -> None:
        """Reset all connections and end the thread; idempotent."""
        if not self._thread.is_alive():
            return
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Reset open connections and refuse new ones, until `heal`."""
        self._run(self._cut)

    def freeze(self) -> None:
        """Accept connections but forward and close nothing, until `heal`, like a frozen peer."""
        self._run(self._set_flowing, False)

    def hold(self) -> None:
        """Freeze the open connections, but not new connections. After `heal`, old data arrives after newer data."""
        self._run(self._hold)

    def heal(self) -> None:
        """End `cut`, `freeze` and `hold`; frozen connections continue."""
        self._run(self._set_flowing, True)
        self._run(self._listen)

    def __enter__(self) -> FaultProxy:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self, step: Callable[..., object], *args: object) -> None:
        """Run a step, or a coroutine function, in the loop's thread and wait for it."""
        if not self._thread.is_alive():
            raise LocalError("the proxy does not run; call start() first")

        async def call() -> None:
            result = step(*args)
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_CHUNK_BYTES)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            # When a server closes, asyncio loses connections that are accepted but not handed over yet.
            for listening in self._server.sockets:
                self._loop.remove_reader(listening.fileno())
            for _ in range(_TURNS_TO_HAND_OVER):
                await asyncio.sleep(0)
            self._server.close()
            self._server = None
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def _set_flowing(self, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
            self._held.set()
        else:
            self._flowing.clear()

    def _hold(self) -> None:
        """Hold the open connections; connections of an earlier hold continue, for simplicity."""
        self._held.set()
        self._held, self._flowing = self._flowing, _flowing()
        self._held.clear()

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Serve one connection until it is reset or closed."""
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        self.num_connections += 1
        flowing = self._flowing
        writers = [back]
        steps: list[asyncio.Task[None]] = []
        # A reset, a close by either side and cut() end the connection here. asyncio must not report them as errors.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                if self._server is None:
                    raise ConnectionResetError
                await flowing.wait()
                far, forth = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
                writers.append(forth)
                for way, reader, writer in (("up", near, forth), ("down", far, back)):
                    in_flight: _InFlight = asyncio.Queue(_MAX_CHUNKS_IN_FLIGHT)
                    steps.append(asyncio.create_task(self._depart(way, reader, in_flight, flowing)))
                    steps.append(asyncio.create_task(self._arrive(way, in_flight, writer, flowing)))
                await asyncio.gather(*steps)
            except BaseException:
                for writer in writers:
                    _reset_on_close(writer)
                raise
            finally:
                for step in steps:
                    step.cancel()
                for writer in writers:
                    writer.close()
                self._links.discard(task)

    async def _depart(
        self, way: str, reader: asyncio.StreamReader, in_flight: _InFlight, flowing: asyncio.Event
    ) -> None:
        """Put received chunks on the link at its rate; an empty chunk marks the end of the stream."""
        data = b" "
        while data:
            data = await reader.read(_CHUNK_BYTES)
            await flowing.wait()
            if self.reset_probability and self._random.random() < self.reset_probability:
                raise ConnectionResetError
            await self._transmit(way, len(data))
            await in_flight.put((self._loop.time() + self.delay_s, data))

    async def _arrive(
        self, way: str, in_flight: _InFlight, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        """Send each chunk after its delay."""
        while True:
            due_s, data = await in_flight.get()
            await asyncio.sleep(due_s - self._loop.time())
            await flowing.wait()
            if not data:
                writer.write_eof()
                return
            # Counted first, so that bytes are counted when the receiver has them.
            if way == "up":
                self.bytes_up += len(data)
            else:
                self.bytes_down += len(data)
            writer.write(data)
            await writer.drain()

    async def _transmit(self, way: str, num_bytes: int) -> None:
        """Wait until the link has sent all earlier bytes and these `num_bytes`."""
        if self.rate_bps is None:
            return
        now_s = self._loop.time()
        self._free_at_s[way] = max(now_s, self._free_at_s[way]) + 8 * num_bytes / self.rate_bps
        await asyncio.sleep(self._free_at_s[way] - now_s)


def _flowing() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Make closing send a reset and drop buffered data; otherwise the peer sees a normal end."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
