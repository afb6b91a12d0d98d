"""HTTP: the clients that people have."""
