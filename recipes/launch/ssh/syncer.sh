#!/bin/bash
# The syncer of a run, on this machine: ./syncer.sh
# systemd starts it again whenever it dies, and it restores the run.
LEARNERS=4  # set: learners

mkdir -p run
exec systemd-run --user --unit=diloco-syncer --same-dir --collect \
    -p Restart=on-failure -p RestartSec=5 -p RestartPreventExitStatus=2 \
    -E DILOCO_HOST="${DILOCO_HOST:-$(hostname -f)}" \
    diloco syncer --run-dir run --listen 0.0.0.0:7654 --expect "$LEARNERS" --data-parts "$LEARNERS"
