#!/bin/sh
# Starts a server as the image of text-generation-inference starts: on every address of the container, port 80, without
# a key. It is `freight --model-id M …`, which reads the flags and variables of that image: MODEL_ID, KV_CACHE_DTYPE,
# PORT, … A first word without a dash is the MODEL. Options of the command line come after ours, and win.
set -eu
key="${FREIGHT_API_KEY:-}${FREIGHT_API_KEY_FILE:-}${API_KEY:-}"
for option in "$@"; do
  case "$option" in --api-key | --api-key=* | --api-key-file | --api-key-file=*) key=given ;; esac
done
if [ -z "$key" ]; then
  echo "warning: this server has no key: who reaches its port can use it. Give --api-key KEY, or -e FREIGHT_API_KEY=KEY" >&2
fi
case "${1:--}" in -*) ;; *) set -- --model-id "$@" ;; esac
if [ -z "${FREIGHT_PORT:-}${PORT:-}" ]; then set -- --port 80 "$@"; fi
exec freight --host 0.0.0.0 --insecure "$@"
