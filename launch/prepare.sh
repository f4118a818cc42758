#!/usr/bin/env bash
# Prepare a corpus in parts as a Slurm job array, then merge the parts. Run this on a login node:
#   launch/prepare.sh 64 corpora/web raw/web [more inputs, and options of diffmegatron prepare]
# The same command resumes: unfinished parts continue at their last commit, finished parts are verified.
# To prepare only some parts: sbatch --array=3,7 launch/prepare.sh 64 corpora/web raw/web ...
# Set account, partition etc. with environment variables: SBATCH_ACCOUNT, SBATCH_PARTITION, ...
#SBATCH --job-name=prepare
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@60
set -euo pipefail
if [ $# -lt 3 ] || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/prepare.sh PARTS PREFIX INPUT... [OPTION...]" >&2
  exit 2
fi
parts="$1" prefix="$2"
shift 2
if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
  array="$(sbatch --parsable --array="1-$parts" "$0" "$parts" "$prefix" "$@")"
  merge="$(printf '%q ' diffmegatron data merge "$prefix")"
  sbatch --parsable --job-name=merge --cpus-per-task=2 --kill-on-invalid-dep=yes \
    --dependency="afterok:${array%%;*}" --wrap="$merge"
  exit
fi
# Slurm before 23.02 does not set the two times.
start="${SLURM_JOB_START_TIME:-0}"
seconds=$((${SLURM_JOB_END_TIME:-$((start + 120))} - start))
if [ "$seconds" -lt 120 ]; then
  echo "error: a time limit of $seconds s leaves no time before the requeue at 60 s; give --time=2 or more" >&2
  exit 2
fi
# Near the time limit, requeue this part. It then resumes from its last commit.
trap 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; exit 1' USR1
diffmegatron prepare --output "$prefix" --part "$SLURM_ARRAY_TASK_ID/$parts" \
  --workers "$SLURM_CPUS_PER_TASK" "$@" &
wait $!
