#!/usr/bin/env bash
# busy.sh COUNT COMMAND...: the command beside COUNT processes that never rest
set -euo pipefail
count=$1
shift
busy=()
trap 'kill "${busy[@]}" 2>/dev/null' EXIT
for ((i = 0; i < count; i++)); do
  while :; do :; done &
  busy+=("$!")
done
"$@"
