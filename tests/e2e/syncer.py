"""A syncer process with options that the command does not have."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from lightning_diloco.protocol.syncer import roster, rounds
from lightning_diloco.syncer import process as syncer
from lightning_diloco.syncer.standby.invitation import Invitation


def main() -> int:
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(levelname)s %(message)s")
    run_dir = Path(sys.argv[1])
    listen = os.environ.get("LISTEN", "127.0.0.1:0")
    if (run_dir / "join").exists():
        listen = syncer.read_join_file(run_dir / "join").host_port
    options = {"sync_every": 12, "num_fragments": 4, "block_size": 16, "lease_s": 3.0}
    given = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    if given.pop("waits_for_all", False):  # for learners that compile instead of stepping or sending
        roster.SILENT_HEARTBEATS, rounds.TRANSFER_FLOOR_S = 1000, rounds.TRANSFER_CAP_S
    own = {
        name: given.pop(name)
        for name in ("expect", "reseed", "record_contributions", "num_shards", "shards_elsewhere")
        if name in given
    }
    if (primary := given.pop("standby_of", None)) is not None:
        own["standby_of"] = Invitation.parse(primary)
    return syncer.serve(syncer.SyncerOptions(run_dir=run_dir, listen=listen, run_options={**options, **given}, **own))


if __name__ == "__main__":
    sys.exit(main())
