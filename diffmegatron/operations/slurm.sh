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
nodes="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"
# Exit status 2, a mistake in the recipe, ends the job here.
settings="$(diffmegatron attempt begin --nodes="$nodes" "$@")" || exit
eval "$settings"
# Slurm before 23.02 does not tell a job when it ends.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
  SLURM_JOB_END_TIME="$(date +%s -d "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e)")" &&
    export SLURM_JOB_END_TIME
fi
# srun does not take over --cpus-per-task by itself since 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# One rank. A rank that asks for nothing more (it has saved, 75) ends with 0, else srun ends the
# others in the middle of their last words; what counts is what each has written. For one that
# could not write any more its shell does.
# shellcheck disable=SC2016  # the ranks' shells shall expand it
rank='
  trap : TERM USR1 INT  # for the training alone; the shell waits for what it makes of them
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  diffmegatron train "$@"
  status=$?
  end=$(printf "%s/rank_%05d.json" "$DIFFMEGATRON_ATTEMPT" "$RANK")
  if [ ! -e "$end" ]; then
    printf "{\"status\": %d, \"host\": \"%s\", \"time\": %d}\n" \
      "$status" "$SLURMD_NODENAME" "$(date +%s)" >"$end.tmp" && mv "$end.tmp" "$end"
  fi
  [ "$status" -eq 75 ] || exit "$status"'
# --kill-on-bad-exit: what ends one rank ends the job step, not its own rank alone.
srun --kill-on-bad-exit=1 bash -c "$rank" rank "$@" &
wait $!

diffmegatron attempt end "$DIFFMEGATRON_ATTEMPT"
status=$?
if [ "$status" -eq 75 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
