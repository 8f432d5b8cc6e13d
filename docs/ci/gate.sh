#!/bin/sh
# Stops a pipeline at a checkpoint that may not be served.
#
#   gate.sh CHECKPOINT SOURCE            judge it, then check what was written
#   TRUST=key.pub gate.sh CHECKPOINT     only check that a holder of the key has judged these very bytes
#
# Exit code 0: it may be served. 1: it may not. 2: something asked for was wrong. Variables: PROFILE (strict,
# standard, lenient), TRUST (a public key), QINFER (the command), KV_CACHE_DTYPE (what will serve).
set -eu

checkpoint=$1
source=${2:-}
qinfer=${QINFER:-qinfer}
kv=${KV_CACHE_DTYPE:-auto}

if [ -n "$source" ]; then
    "$qinfer" eval "$checkpoint" --against "$source" --profile "${PROFILE:-standard}" --kv-cache-dtype "$kv"
fi
"$qinfer" gate "$checkpoint" --kv-cache-dtype "$kv" ${TRUST:+--trust "$TRUST"}
