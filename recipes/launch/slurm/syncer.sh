#!/bin/bash
# The syncer of a run: sbatch syncer.sh
# If its node fails, the job is started elsewhere and restores the run. Learners read the new address in run/join.
#SBATCH --job-name=diloco-syncer
#SBATCH --output=syncer.log --open-mode=append --requeue
#SBATCH --time=7-00:00:00
#SBATCH --cpus-per-task=16  # set: syncer_cores
#SBATCH --mem=64G  # set: syncer_memory
LEARNERS=4  # set: learners

DILOCO_HOST=$(hostname -f)
export DILOCO_HOST
until diloco syncer --run-dir run --listen 0.0.0.0:7654 --expect "$LEARNERS" --data-parts "$LEARNERS"; do
    [ $? -ne 2 ] || exit 2 # wrong options; a restart does not help
    sleep 5
done
