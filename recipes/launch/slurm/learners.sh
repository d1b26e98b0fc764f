#!/bin/bash
# The learners of a run, one job each: sbatch learners.sh, in the same folder as the syncer, on a disk that nodes share
# A preempted job, and one that reaches its time limit, leaves in good order and is queued again.
#SBATCH --job-name=diloco
#SBATCH --output=learner-%a.log --open-mode=append --requeue
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --nodes=1
#SBATCH --array=0-3  # set: last
#SBATCH --gpus-per-node=1  # set: devices
RECIPE=llama/1b  # set: recipe

export DILOCO_LEARNER=l$SLURM_ARRAY_TASK_ID DILOCO_RUN_DIR=$PWD/run DILOCO_SITE=$SLURM_CLUSTER_NAME
trap 'kill -TERM $learner 2>/dev/null' TERM
while true; do
    DILOCO_JOIN=$(cat run/join) diloco fit "$RECIPE" &
    learner=$!
    wait $learner
    code=$?
    while kill -0 $learner 2>/dev/null; do # the signal ended `wait`, not the learner
        wait $learner
        code=$?
    done
    case $code in
    0 | 2) exit $code ;; # finished, or a restart does not help
    143) exec scontrol requeue "$SLURM_JOB_ID" ;;
    esac
    sleep 5
done
