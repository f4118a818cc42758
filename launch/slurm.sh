#!/usr/bin/env bash
# Train under Slurm, one task per GPU; requeues itself at the time limit, on preemption and after
# a crash or a hang:
#   sbatch --nodes=4 launch/slurm.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
#SBATCH --job-name=diffmegatron
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@600
set -uo pipefail
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) WORLD_SIZE="$SLURM_NTASKS"
# --kill-on-bad-exit: the watchdog of one rank ends the job step, not its own rank alone.
srun --kill-on-bad-exit=1 bash -c \
  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec diffmegatron train "$@"' train "$@"
status=$?
# 0: finished. 2: a mistake in the recipe, or the guard stopped the run: for a person to look at.
# 75: asked to stop, saved. All others are faults; so that one that comes back at every start
# does not go on for ever, they are given ten restarts.
case "$status" in
  0 | 2) exit "$status" ;;
  75) exec scontrol requeue "$SLURM_JOB_ID" ;;
esac
if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
