"""HTTP/1.1 itself: connections, heads and bodies within limits, keys, streams."""
