#!/usr/bin/env bash
# Train under Slurm, one task per GPU; requeues itself at the time limit, and after a crash or a hang:
#   sbatch --nodes=4 launch/slurm.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
# diffmegatron launch writes the lines above "set" itself (sbatch_file.py), for the cluster it is given.
#SBATCH --job-name=diffmegatron
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@600
within=()        # a command in front of this package's, which enters a container
srun_options=()
spares=0         # nodes of the job that wait until another one is done without
set -uo pipefail
# Of an array SLURM_JOB_ID may be the number of all of it.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
every_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
needed=$((SLURM_JOB_NUM_NODES - spares))
export SLURM_NTASKS=$((needed * SLURM_NTASKS_PER_NODE))
# Slurm before 23.02 does not tell a job when it ends; without a limit it has no date for it.
end_date="$(squeue --noheader --jobs="$job" --format=%e)"
if [ -z "${SLURM_JOB_END_TIME:-}" ] && [[ "$end_date" == 20??-*T* ]]; then
  SLURM_JOB_END_TIME="$(date +%s --date="$end_date")"
  export SLURM_JOB_END_TIME
fi
# For the ranks, who know how long a save takes.
DIFFMEGATRON_SIGNAL_SECONDS="$(sed -n 's/^#SBATCH --signal=USR1@//p' "$0")"
DIFFMEGATRON_KILL_WAIT="$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\) .*/\1/p')"
export DIFFMEGATRON_SIGNAL_SECONDS DIFFMEGATRON_KILL_WAIT
# srun does not take over --cpus-per-task by itself since 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# At the time limit Slurm requeues nothing, and a save that has not ended by then is lost; the run
# is not. A job that somebody cancels ends.
trap 'if [ -n "${SLURM_JOB_END_TIME:-}" ] && [ "$(date +%s)" -ge "$SLURM_JOB_END_TIME" ]; then
  scontrol requeue "$job"
fi
exit 1' TERM

# One rank, in the checks and then in the training. It ends with 0 where it has saved (75), else srun
# ends the others in the middle of their last words; what counts is what each has written. For one
# that could not write any more its shell does.
# shellcheck disable=SC2016  # the ranks' shells shall expand it
rank='
  trap : TERM USR1 INT  # for the command alone; the shell waits for what it makes of them
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  "$@"
  status=$?
  end=$(printf "%s/rank_%05d.json" "$DIFFMEGATRON_ATTEMPT" "$RANK")
  if [ ! -e "$end" ] && [ "$PHASE$status" != preflight0 ]; then
    printf "{\"status\": %d, \"host\": \"%s\", \"time\": %d}\n" \
      "$status" "$SLURMD_NODENAME" "$(date +%s)" >"$end.tmp" && mv "$end.tmp" "$end"
  fi
  [ "$status" -eq 75 ] || exit "$status"'
# All that the ranks say is in ranks.log, with the rank in front; here what rank 0 and srun do.
# --kill-on-bad-exit: what ends one rank ends the job step, not its own rank alone.
others='/^[ 0]*[1-9][0-9]*: /d; s/^[ 0]*0: //'
ranks() {
  PHASE="$1" srun --nodes="$needed" --nodelist="$nodes" --kill-on-bad-exit=1 --label \
    "${srun_options[@]}" \
    bash -c "$rank" rank "${within[@]}" diffmegatron "$@" 2>&1 |
    tee -a "$DIFFMEGATRON_ATTEMPT/ranks.log" | sed --unbuffered "$others" &
  wait $!
}
described='^(CUDA|DIFFMEGATRON|FI|GLOO|MASTER|NCCL|OMP|PATH|PYTHONPATH|SLURM|TORCH|UCX|WORLD)'
status=69 bad=""
while [ "$status" -eq 69 ]; do  # after a fault in the middle of training: again, without a requeue
  every_node="$(grep -vxF "$(tr , '\n' <<<"$bad")" <<<"$every_node")"
  nodes="$(head -n "$needed" <<<"$every_node" | paste -sd,)"
  # Exit status 2, a mistake in the recipe, ends the job here.
  settings="$("${within[@]}" diffmegatron attempt begin --nodes="$nodes" "$@")" || exit
  eval "$settings"
  env | grep -E "$described" | sort >"$DIFFMEGATRON_ATTEMPT/environment"
  ranks preflight "$@"
  compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.json" >/dev/null || ranks train "$@"
  bad="$("${within[@]}" diffmegatron attempt end "$DIFFMEGATRON_ATTEMPT" \
    --spares=$(($(wc -l <<<"$every_node") - needed)))"
  status=$?
done
if [ "$status" -ne 75 ]; then
  exit "$status"
fi
# The nodes to do without can be named once the job is pending again, and a requeue ends this
# script with a SIGTERM. So many nodes must be left that the job can start.
trap '' TERM
scontrol requeue "$job" || exit
if [ -n "$bad" ]; then
  already="$(squeue --noheader --jobs="$job" --format=%x)"
  without="$(scontrol show hostnames "$bad${already:+,$already}" | sort -u)"
  left="$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" \
    --states=idle,allocated,mixed,completing --format=%N | sort -u | grep -cvxF "$without")"
  if [ "$left" -ge "$SLURM_JOB_NUM_NODES" ]; then
    scontrol update JobId="$job" ExcNodeList="$(paste -sd, <<<"$without")"
  else
    echo "cannot do without $bad: $left nodes would be left of the partition" >&2
  fi
fi
