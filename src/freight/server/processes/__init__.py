"""The server's other processes, and what comes of the engine's."""
