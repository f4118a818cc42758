#!/usr/bin/env bash
# Train on the GPUs of this machine, restarting after a crash or a hang:
#   launch/torchrun.sh configs/diff_3b_350b.yaml [KEY=VALUE ...]
# Exit status 75: asked to stop (SIGTERM, Ctrl-C), saved; start it again to go on.
# Several machines: set NNODES and RENDEZVOUS (host:port of the first) on each.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
DIFFMEGATRON_STOPPED="$(mktemp -u)"
export DIFFMEGATRON_STOPPED
# How long a rank may take to save after SIGTERM before torchrun kills it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
# On one machine the ranks meet in torchrun's own store, which listens before it hands its port on,
# so that no other program can take that port. A machine's own name may be in no DNS.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0
rendezvous=(--standalone --local-addr=127.0.0.1)
if [ "${NNODES:-1}" != 1 ]; then
  # The agents of several machines count restarts differently, so that new ranks would find the
  # addresses of the old ones in that store: "connectFullMesh failed ... Connection refused". Each
  # attempt gets a store of its own instead, on another port.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  rendezvous=(--nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS")
fi
diffmegatron attempt torchrun "${rendezvous[@]}" --nproc-per-node="${RANKS:-gpu}" --max-restarts="${RESTARTS:-10}" \
  --no-python bash "$here/worker.sh" train "$@" &
agent=$!
trap 'kill -TERM "$agent"' TERM USR1 INT
wait "$agent"
status=$?
while kill -0 "$agent" 2>/dev/null; do  # a trapped signal ends the first wait
  wait "$agent"
  status=$?
done
if [ -e "$DIFFMEGATRON_STOPPED" ]; then
  rm -f "$DIFFMEGATRON_STOPPED"
  exit 75
fi
exit "$status"
