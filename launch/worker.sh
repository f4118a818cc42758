#!/usr/bin/env bash
# Run one rank under torchrun (see torchrun.sh). torchrun must not restart a run that a signal stopped,
# so exit status 75 becomes 0, and a file passes it on to torchrun.sh.
trap : TERM USR1 INT   # the signals are for the training; the shell waits until it ends
diffmegatron "$@"
status=$?
if [ "$status" -eq 75 ]; then
  touch "$DIFFMEGATRON_STOPPED"
  exit 0
fi
exit "$status"
