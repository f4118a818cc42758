#!/usr/bin/env bash
# Run one rank under torchrun (see torchrun.sh). torchrun must not restart a run that a signal stopped.
# Therefore exit status 75 becomes 0, and the file $DIFFMEGATRON_STOPPED tells torchrun.sh of the stop.
trap : TERM USR1 INT   # the signals are for the training; the shell waits until the training ends
diffmegatron "$@"
status=$?
if [ "$status" -eq 75 ]; then
  touch "$DIFFMEGATRON_STOPPED"
  exit 0
fi
exit "$status"
