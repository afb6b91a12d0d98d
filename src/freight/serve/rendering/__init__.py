"""The server's other processes, and the queue of the engine's deltas."""
