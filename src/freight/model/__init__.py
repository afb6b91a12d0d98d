"""Decoder models: from a checkpoint to layers that run."""
