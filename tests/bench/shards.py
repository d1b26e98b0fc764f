"""A run whose fragments are shared by several processes on one machine: `python -m tests.bench.shards`.

1. Four peers (threads of this process) join a syncer with S shards over TLS, seed a model of four fragments, and
   contribute to all of them in waves. Each process may use one thread. Peers do not train.
2. Seconds are measured here: a wave lasts from the first intent to the last commit message. "last byte to last offer"
   begins when the last upload has returned.
3. The kernel reports the memory of each process; its log is measured on disk. Bytes sent to and received from each
   process are counted here.
4. The digests of all versions must be the same for each S. The control gives one peer another contribution in the last
   wave; its digests must differ.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode
from lightning_diloco.learner.shards import ShardedConnection
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.protocol import messages
from lightning_diloco.storage.tape import read_tape
from lightning_diloco.syncer.shards.layout import directory_of
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Bulk, Json
from lightning_diloco.transport.flight import FlightConnection
from tests.bench import report
from tests.bench.at_size import log_size, started
from tests.fuzz.target import Peer
from tests.resident import resident_at_most

WIDTH = 1024
NUM_FRAGMENTS, NUM_PEERS, NUM_WAVES = 4, 4, 5  # the first wave is not counted: memory is touched in it
STEP_S, TOKENS, STEPS = 2.0, 1000, 24


class Counted(FlightConnection):
    """A connection that counts the payload bytes of the process at its other end."""

    counts: Counter[int]
    port: int

    def put(self, bulk: Bulk, *, deadline_s: float) -> Json:
        self.counts[self.port] += bulk.payload.nbytes
        return super().put(bulk, deadline_s=deadline_s)

    def get(self, header: Json, *, deadline_s: float) -> Bulk:
        bulk = super().get(header, deadline_s=deadline_s)
        self.counts[self.port] += bulk.payload.nbytes
        return bulk


class Several(Peer):
    """A peer that contributes to several fragments at once.

    Args:
        address: of the run.
        learner: its id.
        numel: parameters of each fragment.
        counts: payload bytes, by port.
    """

    wait_s = 600.0

    def __init__(self, address: JoinAddress, learner: str, numel: int, counts: Counter[int]) -> None:
        def connect(to: JoinAddress) -> FlightConnection:
            connection = Counted(to)
            connection.counts, connection.port = counts, to.port
            return connection

        super().__init__(ShardedConnection(connect, address, None), learner)
        shapes = {f"w{p}": (numel // WIDTH, WIDTH) for p in range(NUM_FRAGMENTS)}
        self.model = ModelDescription(shapes, frozenset(), {}, "tokens")
        self.options = {
            **{"num_fragments": NUM_FRAGMENTS, "sync_every": STEPS, "max_slice_numel": numel},
            **{"quorum": NUM_PEERS, "lease_s": 600.0, "guard": "norm"},
        }
        self.wave = 0

    def step(self) -> None:
        """Report the steps of the next wave, so that its rounds wait for this peer."""
        self.wave += 1
        nothing = ((),) * NUM_FRAGMENTS
        landed = (self.wave - 1,) * NUM_FRAGMENTS
        progress = messages.Progress(self.wave * STEPS, self.wave * TOKENS, landed, nothing, {}, 0)
        self.say(messages.Heartbeat("stepping", progress, STEP_S, TOKENS / STEP_S))

    def upload(self, payloads: Sequence[Tensor]) -> float:
        """Announce and upload a contribution to each fragment; returns when the last byte was received."""
        self.say(*(messages.Intent(p, STEP_S) for p in range(NUM_FRAGMENTS)))
        for p, payload in enumerate(payloads):
            start = (self.wave - 1) * TOKENS
            ready = messages.Ready(p, self.wave, self.wave - 1, 0, start, start + TOKENS, STEPS)
            self.say(ready)
            header = {"what": "contribution", "session": self.session, "ready": messages.encode(ready)}
            self.connection.put(Bulk(header, bytes_of(payload)), deadline_s=self.wait_s)
        return time.monotonic()

    def offered(self) -> float:
        """Wait for the commits of all fragments; return the arrival time of the last one."""
        missing, again = set(range(NUM_FRAGMENTS)), time.monotonic() + 2.0
        while missing:
            polled = self.connection.poll(self.session, self._cursor, 0.1)
            self._cursor = polled.cursor
            for told in polled.messages:
                if told["kind"] == "Commit" and told["version"] == self.wave:
                    missing.discard(told["fragment"])
            if missing and time.monotonic() > again:  # a round may have closed before the bytes were here
                again += 2.0
                self.say(*(messages.Intent(p, STEP_S) for p in missing))
        return time.monotonic()

    def fetch(self) -> float:
        """Download all updates; returns when the last byte was received."""
        for p in range(NUM_FRAGMENTS):
            header = {"session": self.session, "fragment": p, "generation": 0, "have": self.wave - 1}
            self.connection.get(header, deadline_s=self.wait_s)
        return time.monotonic()


def contributions(numel: int, wave: int, peer: int, *, odd: bool) -> list[Tensor]:
    """Return a peer's payloads of a wave; `odd` ones differ from all others."""
    generator = torch.Generator().manual_seed(1000 * wave + 10 * peer + odd)
    values = torch.randn(numel, generator=generator)
    return [encode(values * (1 + p), wire="int8", block_size=256, name="x") for p in range(NUM_FRAGMENTS)]


def measure(numel: int, num_shards: int, *, waves: int = NUM_WAVES, is_control: bool = False) -> dict[str, Any]:
    """Measure several waves of one syncer with this number of shards."""
    numel, counts, found = numel // WIDTH * WIDTH, Counter[int](), list[dict[str, float]]()
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as root, ThreadPoolExecutor(NUM_PEERS) as together:
        run_dir = Path(root) / "run"
        syncer = started(run_dir, 1, "--shards", str(num_shards))
        try:
            address = read_join_file(run_dir / "join")
            peers = [Several(address, f"l{k}", numel, counts) for k in range(NUM_PEERS)]
            for peer in peers:
                peer.join()
            counts.clear()
            for wave in range(waves):
                odd = is_control and wave == waves - 1
                sent = [contributions(numel, wave, k, odd=odd and k == 1) for k in range(NUM_PEERS)]
                for peer in peers:
                    peer.step()
                began_s = time.monotonic()
                uploaded_s = max(together.map(Several.upload, peers, sent))
                offered_s = max(together.map(Several.offered, peers))
                fetched_s = max(together.map(Several.fetch, peers))
                found.append(
                    {
                        "wave [s]": offered_s - began_s,
                        "last byte to last offer [s]": offered_s - uploaded_s,
                        "download [s]": fetched_s - offered_s,
                    }
                )
            processes = [syncer.pid, *(child.pid for child in psutil.Process(syncer.pid).children())]
            ports = [
                address.port,
                *(read_join_file(directory_of(run_dir, k) / "join").port for k in range(1, num_shards)),
            ]
            logs = [run_dir / "syncer" / "log", *(directory_of(run_dir, k) / "log" for k in range(1, num_shards))]
            size = numel * NUM_FRAGMENTS
            tape = run_dir / "tape" / "events.jsonl"
            return {
                "shards": num_shards,
                "parameters": size,
                **report.median_of(found[1:]),
                "memory of a process [GB]": _each(resident_at_most(pid) / 1e9 for pid in processes),
                "its log [bytes per parameter and wave]": _each(log_size(log) / size / waves for log in logs),
                "its payloads [bytes per parameter and wave]": _each(counts[port] / size / waves for port in ports),
                "digests": [line["digest"] for line in sorted(_commits(tape), key=_key)],
            }
        finally:
            syncer.kill()
            syncer.wait()


def _each(values: Any) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _commits(tape: Path) -> list[Json]:
    return [line for line in read_tape(tape) if line["event"] == "commit"]


def _key(commit: Json) -> tuple[int, int]:
    return commit["fragment"], commit["version"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and whether all runs gave the same bits; return 1 if they did not."""
    parser = report.options(__doc__)
    parser.add_argument("--numel", type=float, default=64e6, help="parameters of each of the four fragments")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args(argv)
    rows = [measure(int(args.numel), num_shards) for num_shards in args.shards]
    control = measure(1 << 20, 2, is_control=True).pop("digests") != measure(1 << 20, 2).pop("digests")
    bits = [row.pop("digests") for row in rows]
    checks = {
        f"the same {len(bits[0])} versions to the last bit, whatever the number of shards": all(
            each == bits[0] for each in bits
        ),
        "control: another contribution gives other bits": control,
    }
    return report.conclude(args.out, rows, checks)


if __name__ == "__main__":
    sys.exit(main())
