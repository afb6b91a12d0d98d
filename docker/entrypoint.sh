#!/bin/sh
# Starts a server as the image of text-generation-inference starts: on every address of the container, port 80, without
# a key. It is `freight --model-id M …`, which reads the flags and variables of that image: MODEL_ID, KV_CACHE_DTYPE,
# PORT, … A first word without a dash is the MODEL. Options of the command line come after ours, and win.
#
# Started as root, which `docker run` does, it gives root's rights up before the server starts: the server runs as the
# owner of /data. Where that is root, uid 1000 takes over what root owns there. It keeps the groups of the container
# (--group-add) and those of the GPUs' devices, and of root's rights the one to open ports below 1024, which
# `docker run --net host` leaves to root.
set -eu
key="${FREIGHT_API_KEY:-}${FREIGHT_API_KEY_FILE:-}${API_KEY:-}"
port="${FREIGHT_PORT:-${PORT:-}}"
host=
scheme=http${FREIGHT_SSL_CERTFILE:+s}
expects=
for option in "$@"; do
  case "$expects" in port) port="$option" ;; host) host="$option" ;; esac
  expects=
  case "$option" in
    --api-key | --api-key=* | --api-key-file | --api-key-file=*) key=given ;;
    --port | -p) expects=port ;;
    --port=*) port="${option#*=}" ;;
    -p?*) port="${option#-p}" ;;
    --host | --hostname) expects=host ;;
    --host=* | --hostname=*) host="${option#*=}" ;;
    --ssl-certfile | --ssl-certfile=*) scheme=https ;;
  esac
done
if [ -z "$key" ]; then
  echo "warning: this server has no key: who reaches its port can use it. Give --api-key KEY, or -e FREIGHT_API_KEY=KEY" >&2
fi
case "${1:--}" in -*) ;; *) set -- --model-id "$@" ;; esac
if [ -z "${FREIGHT_PORT:-}${PORT:-}" ]; then set -- --port 80 "$@"; fi
set -- freight --host 0.0.0.0 --insecure "$@"

# what the health check asks; it can do without where /tmp is read-only
case "$host" in "" | 0.0.0.0) host=127.0.0.1 ;; ::) host='[::1]' ;; *:*) host="[$host]" ;; esac
{ echo "$scheme://$host:${port:-80}/health" >"${TMPDIR:-/tmp}/freight-health"; } 2>/dev/null || true

[ "$(id -u)" = 0 ] || exec "$@"

data="${HF_HOME:-/data}"
mkdir -p "$data"
data=$data/.  # it may be a link
user=$(stat -c %u "$data")
group=$(stat -c %g "$data")
if [ "$user" = 0 ]; then
  user=1000 group=1000
  find "$data" -xdev -user 0 -exec chown -h 1000:1000 {} + ||
    echo "warning: not all of $data could be given to uid 1000, which the server runs as" >&2
fi
# bits 6 and 7 are CAP_SETGID and CAP_SETUID
if [ $((0x$(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status) >> 6 & 3)) != 3 ]; then
  echo "error: root of this container may not become another user: leave it SETUID and SETGID (--cap-drop), or give --user" >&2
  exit 1
fi
groups=$({ id -G | tr ' ' '\n'; stat -c %g /dev/kfd /dev/dri/render* /dev/nvidia* 2>/dev/null || true; } |
  sort -un | grep -vx 0 | paste -sd, -)
# bit 10 of what this container permits is CAP_NET_BIND_SERVICE; --cap-drop can have taken it
kept=-all
bounds=$(sed -n 's/^CapBnd:[[:space:]]*//p' /proc/self/status)
if [ $((0x$bounds >> 10 & 1)) = 1 ]; then kept=-all,+net_bind_service; fi
if [ -n "$groups" ]; then groups="--groups=$groups"; else groups=--clear-groups; fi
exec setpriv --reuid="$user" --regid="$group" "$groups" --inh-caps="$kept" --ambient-caps="$kept" \
  --bounding-set="$kept" --no-new-privs -- "$@"
