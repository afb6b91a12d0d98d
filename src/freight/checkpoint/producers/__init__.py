"""What the config.json of each producer of quantized checkpoints declares."""
