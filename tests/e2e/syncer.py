"""A syncer as a process that serves TLS on loopback, where the command would do without."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_diloco.runtime import syncer


def main() -> int:
    run_dir = Path(sys.argv[1])
    listen = "127.0.0.1:0"
    if (run_dir / "join").exists():
        listen = syncer.read_join_file(run_dir / "join").host_port
    syncer.is_loopback = lambda host: False
    options = {"sync_every": 12, "num_fragments": 4, "block_size": 16, "lease_s": 3.0}
    expect = int(sys.argv[2]) if len(sys.argv) > 2 else None
    return syncer.serve(syncer.SyncerOptions(run_dir=run_dir, listen=listen, expect=expect, run_options=options))


if __name__ == "__main__":
    sys.exit(main())
