#!/usr/bin/env bash
# One rank under torchrun (see torchrun.sh): a run that was asked to stop is no failure that
# torchrun should restart, so its exit status 75 becomes 0 and a file for torchrun.sh to find.
trap : TERM USR1 INT   # for the training alone; the shell waits for what it makes of them
diffmegatron "$@"
status=$?
if [ "$status" -eq 75 ]; then
  touch "$DIFFMEGATRON_STOPPED"
  exit 0
fi
exit "$status"
