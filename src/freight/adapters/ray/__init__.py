"""Replicas of a server on Ray: the front before them, routing by prefixes, and batches of Ray Data."""
