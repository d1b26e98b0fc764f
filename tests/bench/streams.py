"""Measures the used share of a far link: `python -m tests.bench.streams`, as root on Linux.

1. Two processes in network namespaces have a link between them (`far_link.py`): 1 Gbit/s in each direction, buffers of
   half a round trip, so that packets are lost, and a round-trip time of 40 or 120 ms.
2. One process has the server of the package, and drops received payloads. The other one has the connection of the
   package. In each direction, two threads send payloads of 64 MB without a break, with TLS. So one payload is in
   transit while the answer to another one returns.
3. The kernel counts the bytes at the end of the link, in both directions at once.
4. Meanwhile, a control message is sent every 50 ms. Its time is measured from the call to the answer.
5. Control: with one stream for each payload, the link is not used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from lightning_diloco.errors import TransportError
from lightning_diloco.transport.address import JoinAddress
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.flight import FlightConnection, FlightServer
from lightning_diloco.transport.portions import Portioned, Received, asked_range, place
from lightning_diloco.transport.streams import NumStreams
from tests.bench import report
from tests.bench.far_link import SYNCER, FarLinks, learner, within

PAYLOAD_BYTES = 64_000_000
AT_ONCE = 2  # payloads in each direction
WARM_S, BEAT_S, DEADLINE_S = 25.0, 0.05, 60.0
MIN_USED, MAX_BEAT_S = 0.85, 1.0


class Keeper:
    """The server's side: records which bytes of payloads have arrived, and sends one payload."""

    def __init__(self) -> None:
        self._payload = memoryview(bytearray(PAYLOAD_BYTES))
        self._received: dict[str, Received] = {}
        self._keeping = threading.Lock()

    def on_put(self, bulk: Bulk) -> Json:
        at, of = place(bulk)
        with self._keeping:
            received = self._received.setdefault(bulk.header["name"], Received(of))
            received.add(at, bulk.payload.nbytes)
            if not received.missing:
                del self._received[bulk.header["name"]]
            return {"missing": received.missing}

    def on_get(self, header: Json) -> Bulk:
        start, stop = asked_range(header, PAYLOAD_BYTES)
        return Bulk({"at": start, "of": PAYLOAD_BYTES}, self._payload[start:stop])

    def on_send(self, session: str, messages: Sequence[Json]) -> Json:
        return {}


def serve(join: Path) -> None:
    """Serve until killed."""
    with FlightServer(Keeper(), "0.0.0.0:7077", token="secret") as server:  # type: ignore[arg-type]
        join.write_text(server.join_address("run", host=FarLinks.address(0)).join_string())
        threading.Event().wait()


def send(join: str, seconds: float, streams: int | None) -> dict[str, Any]:
    """Send and receive, and return what was measured."""
    connection, stopping = Portioned(FlightConnection(JoinAddress.parse(join))), threading.Event()
    payload, beats, names = memoryview(bytearray(PAYLOAD_BYTES)), list[float](), iter(range(1 << 30))
    failed = list[TransportError]()

    def put() -> None:
        connection.put(Bulk({"name": str(next(names))}, payload), deadline_s=DEADLINE_S)

    def get() -> None:
        connection.get({}, deadline_s=DEADLINE_S)

    def beat() -> None:
        began_s = time.monotonic()
        connection.send("session", [])
        beats.append(time.monotonic() - began_s)
        stopping.wait(BEAT_S)

    def again(call: Callable[[], None]) -> None:
        while not stopping.is_set():
            try:
                call()
            except TransportError as error:  # a learner would repeat it, too
                failed.append(error)
                print(error, file=sys.stderr)

    with ExitStack() as stack:
        if streams is not None:
            stack.enter_context(mock.patch.object(NumStreams, "number_for", return_value=streams))
        for call in (put, get) * AT_ONCE + (beat,):
            threading.Thread(target=again, args=(call,), daemon=True).start()
        time.sleep(WARM_S)
        beats.clear()
        before, began_s = _counted(), time.monotonic()
        time.sleep(seconds)
        after, took_s = _counted(), time.monotonic() - began_s
        down, up = (8e-6 * (last - first) / took_s for first, last in zip(before, after, strict=True))
        stopping.set()
        nums = [direction.number_for(PAYLOAD_BYTES) for direction in (connection._up, connection._down)]
    found = sorted(beats)
    return {
        "up [Mbit/s]": up,
        "down [Mbit/s]": down,
        "streams up, down": "{}, {}".format(*nums),
        "failed calls": len(failed),
        "control p50 [ms]": 1e3 * statistics.median(found),
        "control p99 [ms]": 1e3 * found[int(0.99 * len(found))],
    }


def _counted() -> tuple[int, int]:
    """Return the bytes received and sent by the device of this namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    (counts,) = (line.split(":")[1].split() for line in lines if not line.strip().startswith("lo:"))
    return int(counts[0]), int(counts[8])


def measure(streams: int | None, *, mbit_s: float, round_trip_s: float, congestion: str, seconds: float) -> report.Row:
    """Measure one link; `streams` is a fixed number, or None if the package chooses."""
    links = FarLinks(1, mbit_s=mbit_s, round_trip_s=round_trip_s, congestion=congestion)
    with tempfile.TemporaryDirectory() as root, links:
        join = Path(root) / "join"
        server = subprocess.Popen(within(SYNCER, _command(["--serve", str(join)])))
        try:
            while not (join.exists() and join.read_text()):
                time.sleep(0.1)
                assert server.poll() is None
            fixed = [] if streams is None else ["--fixed", str(streams)]
            asked = _command(["--send", join.read_text(), "--seconds", str(seconds), *fixed])
            told = subprocess.run(within(learner(0), asked), check=True, text=True, stdout=subprocess.PIPE)
        finally:
            server.kill()
            server.wait()
    row = {"round trip [ms]": round(1e3 * round_trip_s), "congestion": congestion, "streams": streams or "measured"}
    found = json.loads(told.stdout)
    return {**row, **found, "used": min(found["up [Mbit/s]"], found["down [Mbit/s]"]) / mbit_s}


def _command(asked: Iterable[str]) -> list[str]:
    return [sys.executable, "-m", "tests.bench.streams", *asked]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and whether the bounds hold."""
    parser = report.options(__doc__)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--round-trips", type=float, nargs="+", default=[0.04, 0.12], help="seconds")
    parser.add_argument("--congestion", nargs="+", default=["cubic", "bbr"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, nargs="+", help="numbers of streams; default: measured, and 1")
    for name in ("serve", "send", "fixed"):
        parser.add_argument(f"--{name}", type=int if name == "fixed" else str, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        serve(Path(args.serve))
    if args.send:
        print(json.dumps(send(args.send, args.seconds, args.fixed)), flush=True)
        os._exit(0)  # transfers still run
    about = {"mbit_s": args.mbit, "seconds": args.seconds}
    rows = [
        measure(streams, round_trip_s=round_trip_s, congestion=congestion, **about)
        for congestion in args.congestion
        for round_trip_s in args.round_trips
        for streams in (args.streams or [None, 1])
    ]
    mine = [row for row in rows if row["streams"] == "measured"]
    alone = [row for row in rows if row["streams"] == 1]
    if not mine or not alone:  # numbers were given
        return report.conclude(args.out, rows, {})
    used, beat_ms = min(row["used"] for row in mine), max(row["control p99 [ms]"] for row in rows)
    one = min(row["used"] for row in alone)
    checks = {
        f"{used:.0%} of the link is used in both directions, at least {MIN_USED:.0%}": used >= MIN_USED,
        f"a control message takes {beat_ms:.0f} ms (p99), at most {1e3 * MAX_BEAT_S:.0f}": beat_ms <= 1e3 * MAX_BEAT_S,
        f"control: one stream uses {one:.0%} of the longest link": one < MIN_USED,
    }
    return report.conclude(args.out, rows, checks)


if __name__ == "__main__":
    sys.exit(main())
