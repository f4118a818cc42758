#!/usr/bin/env bash
# Train on the GPUs of this machine and restart after a crash or a hang:
#   launch/torchrun.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
# Exit status 75: a signal (SIGTERM, Ctrl-C, a closed terminal) stopped the run, and the run has saved.
# Start it again to resume. With nohup, the run continues after the terminal is closed.
# On several machines, set NNODES and RENDEZVOUS (host:port of the first machine) on each of them.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
DIFFMEGATRON_STOPPED="$(mktemp -u)"
export DIFFMEGATRON_STOPPED
# Seconds that torchrun waits after SIGTERM, while the ranks save, before it kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
# On one machine the ranks connect through torchrun's own store. This store listens on its port before
# torchrun tells the ranks the port, so no other program can take it. --local-addr is set because the DNS
# may not resolve the machine's own name.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0
rdzv=(--standalone --local-addr=127.0.0.1)
if [ "${NNODES:-1}" != 1 ]; then
  # Each machine has its own torchrun agent, and the agents count restarts differently. With one store
  # for all restarts, new ranks would find the addresses of ended ranks and fail ("connectFullMesh failed
  # ... Connection refused"). Each start therefore gets a new store on another port.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  rdzv=(--nnodes="$NNODES" --rdzv-backend=c10d
    --rdzv-endpoint="${RENDEZVOUS:?must be host:port of the first machine, because NNODES is $NNODES}")
fi
# A terminal sends SIGINT and SIGHUP to this script and to torchrun. torchrun ignores them and receives one
# SIGTERM from this script instead, because a second signal interrupts its shutdown.
(
  trap '' INT QUIT HUP
  exec diffmegatron attempt torchrun "${rdzv[@]}" --signals-to-handle=SIGTERM \
    --nproc-per-node="${RANKS:-gpu}" --max-restarts="${RESTARTS:-10}" \
    --no-python bash "$here/worker.sh" train "$@"
) &
agent=$!
# Signals within five seconds are one request, as in the ranks.
forwarded=-6
# shellcheck disable=SC2317,SC2329  # trap calls this function
forward() {
  if [ $((SECONDS - forwarded)) -gt 5 ]; then
    forwarded=$SECONDS
    kill -TERM "$agent"
  fi
}
trap forward TERM USR1 INT HUP
wait "$agent"
status=$?
while kill -0 "$agent" 2>/dev/null; do  # a trapped signal interrupts wait
  wait "$agent"
  status=$?
done
if [ -e "$DIFFMEGATRON_STOPPED" ]; then
  rm -f "$DIFFMEGATRON_STOPPED"
  exit 75
fi
exit "$status"
