"""What measures and judges models, caches and checkpoints; nothing in the core imports it."""
