"""Readers of the declarations in config.json, one per producer of quantized checkpoints."""
