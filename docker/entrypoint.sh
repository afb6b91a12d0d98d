#!/bin/sh
# Starts `freight serve` as the image of text-generation-inference starts: on every address of the container, port 80
# or $PORT, without a key. Options of the command line come after these, and win.
set -eu
key="${FREIGHT_API_KEY:-}${FREIGHT_API_KEY_FILE:-}"
for option in "$@"; do
  case "$option" in --api-key | --api-key=* | --api-key-file | --api-key-file=*) key=given ;; esac
done
if [ -z "$key" ]; then
  echo "warning: this server has no key: who reaches its port can use it. Give --api-key KEY, or -e FREIGHT_API_KEY=KEY" >&2
fi
exec freight serve --host 0.0.0.0 --port "${PORT:-80}" --insecure "$@"
