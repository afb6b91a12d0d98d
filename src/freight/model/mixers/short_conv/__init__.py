"""Short convolutions (LFM2)."""
