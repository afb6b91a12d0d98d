"""What an FP8 cache costs: perplexity, divergence, retrieval, tasks."""
