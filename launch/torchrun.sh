#!/usr/bin/env bash
# Train on the GPUs of this machine and restart after a crash or a hang:
#   launch/torchrun.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
# Exit status 75: a signal (SIGTERM, Ctrl-C) stopped the run, and the run has saved. Start it again to
# resume.
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
rendezvous=(--standalone --local-addr=127.0.0.1)
if [ "${NNODES:-1}" != 1 ]; then
  # Each machine has its own torchrun agent, and the agents count restarts differently. With one store
  # for all restarts, new ranks would find the addresses of ended ranks and fail ("connectFullMesh failed
  # ... Connection refused"). Each start therefore gets a new store on another port.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  rendezvous=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS")
fi
diffmegatron attempt torchrun "${rendezvous[@]}" --nproc-per-node="${RANKS:-gpu}" --max-restarts="${RESTARTS:-10}" \
  --no-python bash "$here/worker.sh" train "$@" &
agent=$!
trap 'kill -TERM "$agent"' TERM USR1 INT
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
