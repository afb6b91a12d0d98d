"""Several models behind one socket, each with an engine of its own."""
