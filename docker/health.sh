#!/bin/sh
# The container's HEALTHCHECK: /health of the server, at the address that the entry point wrote down. It fails while the
# model loads, and when the engine has stalled. The certificate is not checked: its name is not 127.0.0.1.
url=$(cat "${TMPDIR:-/tmp}/freight-health" 2>/dev/null) || url="http${FREIGHT_SSL_CERTFILE:+s}://127.0.0.1:${FREIGHT_PORT:-${PORT:-80}}/health"
exec python -c 'import ssl, sys, urllib.request as r
r.urlopen(sys.argv[1], timeout=8, context=ssl._create_unverified_context())' "$url"
