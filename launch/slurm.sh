#!/usr/bin/env bash
# Train under Slurm, one task per GPU. The job requeues itself at the time limit and after a fault.
#   sbatch --nodes=4 launch/slurm.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
# `diffmegatron launch` replaces the lines from here to run_dir="" by lines of its own (sbatch_file.py).
#SBATCH --job-name=diffmegatron
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@600
container_command=()  # command prefix that runs this package inside a container
srun_options=()
spares=0              # number of nodes without ranks, which replace failed nodes
run_dir=""            # folder of the run, for the case that a mistake in the recipe makes it unreadable
set -uo pipefail
# In a job array SLURM_JOB_ID may be the number of the array, so build the number of this task.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
every_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
needed=$((SLURM_JOB_NUM_NODES - spares))
export SLURM_NTASKS=$((needed * SLURM_NTASKS_PER_NODE))
# Print the time when the job will end, in seconds since 1970, or "none" without a time limit. Ask the
# scheduler, because scontrol can change the time limit while the job runs.
job_end() {
  local end
  end="$(squeue --noheader --jobs="$job" --format=%e)" || return
  case "$end" in
    20??-*T*) date +%s --date="$end" ;;
    *) echo none ;;
  esac
}
# Slurm before 23.02 does not set SLURM_JOB_END_TIME.
if [ -z "${SLURM_JOB_END_TIME:-}" ] && end="$(job_end)" && [ "$end" != none ]; then
  export SLURM_JOB_END_TIME="$end"
fi
# The ranks compare these two times (in seconds) with the measured time of a save.
DIFFMEGATRON_SIGNAL_SECONDS="$(sed -n 's/^#SBATCH --signal=USR1@//p' "$0")"
DIFFMEGATRON_KILL_WAIT="$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\) .*/\1/p')"
export DIFFMEGATRON_SIGNAL_SECONDS DIFFMEGATRON_KILL_WAIT
# Since Slurm 22.05 srun ignores the --cpus-per-task of sbatch.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi
# Slurm does not requeue a job at its time limit, so this script does. A save that is unfinished at that
# time is lost, and the run resumes from the checkpoint before it. A cancelled job is not requeued. Slurm
# repeats SIGTERM; the inner trap ignores it, because it would also end squeue.
trap 'trap "" TERM
if [ "$(squeue --noheader --jobs="$job" --format=%r)" = TimeLimit ]; then
  # The next attempt reads from this file why this one was killed. A requeue may kill this script.
  [ -z "${DIFFMEGATRON_ATTEMPT:-}" ] || : >"$DIFFMEGATRON_ATTEMPT/time_limit"
  scontrol requeue "$job"
fi
exit 1' TERM

# Script of the shell that runs one rank, in the preflight checks and in the training. When a rank ends,
# it writes how it ended to a file rank_NNNNN.json. If it could not, the shell writes its exit status to
# this file. The shell replaces exit status 75 (stopped and saved) by 0, because with another status srun
# would kill the other ranks before they have written their files.
# shellcheck disable=SC2016  # the ranks' shells expand it
rank='
  trap : TERM USR1 INT  # the signals are for the command; the shell waits until it ends
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
  "$@"
  status=$?
  end=$(printf "%s/rank_%05d" "$DIFFMEGATRON_ATTEMPT" "$RANK")
  if [ "$PHASE$status" = preflight0 ]; then
    : >"$end.fit"
  elif [ ! -e "$end.json" ]; then
    # printf reads the clock, because a signal to all processes would end date.
    printf "{\"status\": %d, \"host\": \"%s\", \"time\": %(%s)T}\n" \
      "$status" "$SLURMD_NODENAME" -1 >"$end.tmp" && mv "$end.tmp" "$end.json"
  fi
  [ "$status" -eq 75 ] || exit "$status"'
# If the time when the job will end has changed, write it to a file that the ranks read.
note_job_end() {
  local end noted="$DIFFMEGATRON_ATTEMPT/job_end"
  end="$(job_end)" || return
  [ "$end" = "$(cat "$noted" 2>/dev/null)" ] ||
    { echo "$end" >"$noted.tmp" && mv "$noted.tmp" "$noted"; }
}
# List the files of the ranks that have ended phase $1, one file per rank.
ended_ranks() {
  compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.json"
  [ "$1" != preflight ] || compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.fit"
}
# Watch the ranks of phase $1, which the srun with process id $2 runs. This function runs in the
# background until srun has ended. If the slurmstepd of a node was killed, srun never notices that the
# ranks on this node have ended, and waits forever; this function then ends srun.
watch() {
  local second all_ended=0
  for ((second = 0; ; second++)); do
    kill -0 $$ 2>/dev/null || return  # this script has ended
    [ $((second % 30)) -ne 0 ] || note_job_end
    [ $((second % 5)) -ne 0 ] || [ "$(ended_ranks "$1" | wc -l)" -lt "$SLURM_NTASKS" ] ||
      all_ended=$((all_ended + 1))
    if [ "$all_ended" -eq 3 ]; then  # all ranks ended ten seconds ago
      echo "all ranks have ended, but srun waits for a node without slurmstepd: ending srun" >&2
      kill -TERM "$2"
      return
    fi
    sleep 1
  done
}
# Run phase $1 (preflight or train) on all ranks. Their output goes to ranks.log, each line with the
# number of its rank; the output of rank 0 and of srun also goes to the log of the job.
# --kill-on-bad-exit ends the job step if one rank fails. --overlap is needed because a phase that lost a
# slurmstepd counts as running until the job ends; without it the next phase could not start.
drop_other_ranks='/^[ 0]*[1-9][0-9]*: /d; s/^[ 0]*0: //'
run_ranks() {
  PHASE="$1" srun --nodes="$needed" --nodelist="$nodes" --kill-on-bad-exit=1 --overlap --label \
    "${srun_options[@]}" \
    bash -c "$rank" rank "${container_command[@]}" diffmegatron "$@" 2>&1 |
    tee -a "$DIFFMEGATRON_ATTEMPT/ranks.log" | sed --unbuffered "$drop_other_ranks" &
  local pipeline=$! srun watching
  srun="$(jobs -p %%)"  # the first process of the pipeline
  watch "$1" "$srun" &
  watching=$!
  wait "$pipeline"
  # The watcher may have ended already; otherwise bash would print "Terminated".
  { kill "$watching"; wait "$watching"; } 2>/dev/null
}
# Print the variables of the libraries that compute and communicate, without secrets such as SLURM_JWT.
# With null characters between variables, a line within a value is never taken for a variable.
recorded_environment() {
  local libraries='(CUDA|DIFFMEGATRON|FI|GLOO|MASTER|NCCL|OMP|PATH|PYTHONPATH|SLURMD?|TORCH[A-Z]*|UCX|WORLD)'
  env -0 | grep -zE "^${libraries}(_[A-Z0-9_]*)?=" | grep -zvE '^[^=]*(TOKEN|SECRET|PASSW|CREDENTIAL|JWT|_KEY)' |
    sort -z | tr '\0' '\n'
}
status=69 bad=""
while [ "$status" -eq 69 ]; do  # 69: a fault; the next attempt begins without a requeue
  every_node="$(grep -vxF "$(tr , '\n' <<<"$bad")" <<<"$every_node")"
  nodes="$(head -n "$needed" <<<"$every_node" | paste -sd,)"
  # A mistake in the recipe (exit status 2) ends the job here.
  settings="$("${container_command[@]}" diffmegatron attempt begin --nodes="$nodes" \
    ${run_dir:+"--run-dir=$run_dir"} "$@")" || exit
  eval "$settings"
  recorded_environment >"$DIFFMEGATRON_ATTEMPT/environment"
  run_ranks preflight "$@"
  compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.json" >/dev/null || run_ranks train "$@"
  bad="$("${container_command[@]}" diffmegatron attempt end "$DIFFMEGATRON_ATTEMPT" \
    --spares=$(($(wc -l <<<"$every_node") - needed)))"
  status=$?
done
if [ "$status" -ne 75 ]; then
  exit "$status"
fi
# Nodes can be excluded only while the job is pending, so requeue it first. Ignore SIGTERM, which the
# requeue sends to this script. Exclude the bad nodes only if enough nodes remain to start the job.
trap '' TERM
scontrol requeue "$job" || exit
if [ -n "$bad" ]; then
  already="$(squeue --noheader --jobs="$job" --format=%x)"
  excluded="$(scontrol show hostnames "$bad${already:+,$already}" | sort -u)"
  left="$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" \
    --states=idle,allocated,mixed,completing --format=%N | sort -u | grep -cvxF "$excluded")"
  if [ "$left" -ge "$SLURM_JOB_NUM_NODES" ]; then
    scontrol update JobId="$job" ExcNodeList="$(paste -sd, <<<"$excluded")"
  else
    echo "cannot exclude $bad: the partition would have only $left nodes left" >&2
  fi
fi
