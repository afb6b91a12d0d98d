"""An engine in a process of its own: how it is started, watched, asked and ended."""
