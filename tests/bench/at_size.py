"""One large fragment over the real wire, through a real syncer process: `python -m tests.bench.at_size`.

1. Four peers (threads of this process) join a syncer over TLS, seed a model of one fragment, and contribute to it in
   several rounds. The default size is that of a 12B model in 24 fragments. Peers do not train; all of them send the
   same values.
2. Seconds are measured here: from the return of the last upload to the first commit message that arrives, when the
   record has been fsynced and the update can be fetched. Then all peers fetch it at once.
3. The kernel reports the syncer's memory; its log is measured on disk. "disk alone" is the time that the same disk
   takes to write the log of one round. The machine is shared with the peers, so uploads and downloads are slower than
   between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_diloco.cli.sites.measure import disk_bytes_per_s
from lightning_diloco.core.buffers import bytes_of
from lightning_diloco.core.quantize import encode
from lightning_diloco.manifest import ModelDescription
from lightning_diloco.protocol import messages
from lightning_diloco.transport.address import JoinAddress, read_join_file
from lightning_diloco.transport.base import Bulk
from lightning_diloco.transport.flight import FlightConnection
from lightning_diloco.transport.portions import Portioned
from tests.bench import report
from tests.fuzz.target import Peer
from tests.resident import resident_at_most, resident_now

WIDTH = 1024
STEP_S, TOKENS, STEPS = 2.0, 1000, 24


class Large(Peer):
    """A peer with one large fragment.

    Args:
        address: of the run.
        learner: its id.
        numel: parameters of the model.
        contributors: learners that contribute to every round.
    """

    wait_s = 600.0

    def __init__(self, address: JoinAddress, learner: str, numel: int, contributors: int) -> None:
        super().__init__(Portioned(FlightConnection(address)), learner)
        self.model = ModelDescription({"w": (numel // WIDTH, WIDTH)}, frozenset(), {}, "tokens")
        self.options = {
            **{"num_fragments": 1, "sync_every": STEPS, "max_slice_numel": numel},
            **{"quorum": contributors, "lease_s": 600.0},
        }
        self.tokens = self.version = self.round = 0

    def beat(self) -> None:
        """Report that this peer is stepping, so that rounds wait for it."""
        progress = messages.Progress(self.round * STEPS, self.tokens, (self.version,), ((),), {}, 0)
        self.say(messages.Heartbeat("stepping", progress, STEP_S, TOKENS / STEPS / STEP_S))

    def contribute(self, payload: Tensor) -> float:
        """Announce and upload a contribution; returns when its last byte was received."""
        self.tokens, self.round = self.tokens + TOKENS, self.round + 1
        intent = messages.Intent(0, STEP_S)
        self.say(intent)
        self.hear(messages.Announce, intent)
        ready = messages.Ready(0, self.round, self.version, 0, self.tokens - TOKENS, self.tokens, STEPS)
        self.say(ready)
        header = {"what": "contribution", "session": self.session, "ready": messages.encode(ready)}
        self.connection.put(Bulk(header, bytes_of(payload)), deadline_s=self.wait_s)
        return time.monotonic()

    def committed(self) -> float:
        """Wait for the commit with this contribution; return the time of its arrival."""
        # A round that closed before the bytes were here, as the first one does, is followed by another one.
        again, learners = messages.Intent(0, STEP_S), set[str]()
        while self.learner not in learners:
            commit = self.hear(messages.Commit, again, fragment=0)
            self.version, learners = commit.version, {each.learner for each in commit.contributors}
        return time.monotonic()

    def fetch(self) -> float:
        """Download the update; returns when its last byte was received."""
        header = {"session": self.session, "fragment": 0, "generation": 0, "have": self.version - 1}
        self.connection.get(header, deadline_s=self.wait_s)
        return time.monotonic()


def measure(numel: int, contributors: int, threads: int, *, rounds: int) -> dict[str, Any]:
    """Measure several rounds of one syncer."""
    numel = numel // WIDTH * WIDTH
    # Two in turn: a contribution that equals the one before it is refused.
    payloads = [encode(torch.randn(numel), wire="int8", block_size=256, name="x") for _ in range(2)]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as root, ThreadPoolExecutor(contributors) as together:
        run_dir = Path(root) / "run"
        syncer = started(run_dir, threads)
        try:
            address = read_join_file(run_dir / "join")
            peers = [Large(address, f"l{k}", numel, contributors) for k in range(contributors)]
            for peer in peers:
                peer.join()
            seeded, found = resident_now(syncer.pid), []
            log = run_dir / "syncer" / "log"
            for k in range(rounds):
                for peer in peers:
                    peer.beat()
                logged, began_s = log_size(log), time.monotonic()
                last_byte_s = max(together.map(Large.contribute, peers, [payloads[k % 2]] * contributors))
                commit_s = max(together.map(Large.committed, peers))
                fetched_s = max(together.map(Large.fetch, peers))
                num_logged = log_size(log) - logged
                found.append(
                    {
                        "upload_s": last_byte_s - began_s,
                        "last byte to offer [s]": commit_s - last_byte_s,
                        "download_s": fetched_s - commit_s,
                        "log bytes per parameter": num_logged / numel,
                        "disk alone [s]": num_logged / disk_bytes_per_s(Path(root)),
                    }
                )
            nbytes = contributors * payloads[0].nbytes
            row = {"numel": numel, "M": contributors, "threads": threads, **report.median_of(found[1:])}
            return {
                **row,
                "up [MB/s]": nbytes / row["upload_s"] / 1e6,
                "down [MB/s]": nbytes / row["download_s"] / 1e6,
                "bytes per parameter, seeded": seeded / numel,
                "at most": resident_at_most(syncer.pid) / numel,
            }
        finally:
            syncer.kill()
            syncer.wait()


def started(run_dir: Path, threads: int, *flags: str) -> subprocess.Popen[bytes]:
    """Start a syncer, and wait until it can be joined."""
    command = [sys.executable, "-m", "lightning_diloco.cli.main", "syncer", "--run-dir", str(run_dir), *flags]
    syncer = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, cwd=run_dir.parent)
    while not (run_dir / "join").exists():
        if syncer.poll() is not None:
            raise SystemExit("the syncer did not start, see above")
        time.sleep(0.1)
    return syncer


def log_size(log: Path) -> int:
    """Bytes of all segments; they are removed only after a snapshot."""
    return sum(segment.stat().st_size for segment in log.iterdir())


def main(argv: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=490e6)
    parser.add_argument("--contributors", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted: memory is touched in it")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = [measure(int(args.numel), args.contributors, threads, rounds=args.rounds) for threads in args.threads]
    results = {"circumstances": report.circumstances(), "rows": rows}
    say(json.dumps(results, indent=1) if args.json else report.table(rows))
    report.store(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
