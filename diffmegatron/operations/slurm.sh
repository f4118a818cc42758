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
run_dir=""       # of the job, known also where a mistake in the recipe hides it
set -uo pipefail
# Of an array SLURM_JOB_ID may be the number of all of it.
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
every_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
needed=$((SLURM_JOB_NUM_NODES - spares))
export SLURM_NTASKS=$((needed * SLURM_NTASKS_PER_NODE))
# When the job ends, in seconds since 1970; "none" without a time limit. Only the scheduler can say:
# scontrol moves the end while the job runs.
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
# For the ranks, who know how long a save takes.
DIFFMEGATRON_SIGNAL_SECONDS="$(sed -n 's/^#SBATCH --signal=USR1@//p' "$0")"
DIFFMEGATRON_KILL_WAIT="$(scontrol show config | sed -n 's/^KillWait *= *\([0-9]*\) .*/\1/p')"
export DIFFMEGATRON_SIGNAL_SECONDS DIFFMEGATRON_KILL_WAIT
# srun does not take over --cpus-per-task by itself since 22.05.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# At the time limit Slurm requeues nothing, and a save that has not ended by then is lost; the run
# is not. A job that somebody cancels ends. Slurm repeats SIGTERM, which would end squeue as well.
trap 'trap "" TERM
if [ "$(squeue --noheader --jobs="$job" --format=%r)" = TimeLimit ]; then
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
  end=$(printf "%s/rank_%05d" "$DIFFMEGATRON_ATTEMPT" "$RANK")
  if [ "$PHASE$status" = preflight0 ]; then
    : >"$end.fit"
  elif [ ! -e "$end.json" ]; then
    # bash reads the clock itself: a signal to all processes would end date.
    printf "{\"status\": %d, \"host\": \"%s\", \"time\": %(%s)T}\n" \
      "$status" "$SLURMD_NODENAME" -1 >"$end.tmp" && mv "$end.tmp" "$end.json"
  fi
  [ "$status" -eq 75 ] || exit "$status"'
# Write the end of the job where the ranks read it, if it has moved.
note_job_end() {
  local end noted="$DIFFMEGATRON_ATTEMPT/job_end"
  end="$(job_end)" || return
  [ "$end" = "$(cat "$noted" 2>/dev/null)" ] ||
    { echo "$end" >"$noted.tmp" && mv "$noted.tmp" "$noted"; }
}
# The files by which the ranks of a phase say that they are done with it, one per rank.
ends() {
  compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.json"
  [ "$1" != preflight ] || compgen -G "$DIFFMEGATRON_ATTEMPT/rank_*.fit"
}
# What this script does while the ranks of a phase run under an srun, in a process that is killed when
# srun has ended. Without its slurmstepd a node never tells srun that its ranks have ended, and srun
# waits without a limit.
watch() {
  local second all_ended=0
  for ((second = 0; ; second++)); do
    kill -0 $$ 2>/dev/null || return  # this script has ended
    [ $((second % 30)) -ne 0 ] || note_job_end
    [ $((second % 5)) -ne 0 ] || [ "$(ends "$1" | wc -l)" -lt "$SLURM_NTASKS" ] ||
      all_ended=$((all_ended + 1))
    if [ "$all_ended" -eq 3 ]; then  # for ten seconds
      echo "all ranks have ended, and srun waits for a node without slurmstepd: ending srun" >&2
      kill -TERM "$2"
      return
    fi
    sleep 1
  done
}
# All that the ranks say is in ranks.log, with the rank in front; here what rank 0 and srun do.
# --kill-on-bad-exit: what ends one rank ends the job step, not its own rank alone. --overlap: Slurm
# counts a step that lost a slurmstepd as running until the job ends, and the next one needs its place.
others='/^[ 0]*[1-9][0-9]*: /d; s/^[ 0]*0: //'
ranks() {
  PHASE="$1" srun --nodes="$needed" --nodelist="$nodes" --kill-on-bad-exit=1 --overlap --label \
    "${srun_options[@]}" \
    bash -c "$rank" rank "${within[@]}" diffmegatron "$@" 2>&1 |
    tee -a "$DIFFMEGATRON_ATTEMPT/ranks.log" | sed --unbuffered "$others" &
  local said=$! srun watching
  srun="$(jobs -p %%)"  # the first process of the pipeline
  watch "$1" "$srun" &
  watching=$!
  wait "$said"
  { kill "$watching"; wait "$watching"; } 2>/dev/null  # it may have ended; else it is "Terminated"
}
described='^(CUDA|DIFFMEGATRON|FI|GLOO|MASTER|NCCL|OMP|PATH|PYTHONPATH|SLURM|TORCH|UCX|WORLD)'
status=69 bad=""
while [ "$status" -eq 69 ]; do  # after a fault in the middle of training: again, without a requeue
  every_node="$(grep -vxF "$(tr , '\n' <<<"$bad")" <<<"$every_node")"
  nodes="$(head -n "$needed" <<<"$every_node" | paste -sd,)"
  # Exit status 2, a mistake in the recipe, ends the job here.
  settings="$("${within[@]}" diffmegatron attempt begin --nodes="$nodes" \
    ${run_dir:+"--run-dir=$run_dir"} "$@")" || exit
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
