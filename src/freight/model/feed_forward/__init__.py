"""Feed-forwards: dense ones, mixtures of experts, and how checkpoints store experts."""
