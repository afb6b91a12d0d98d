"""The KV cache: pages and states, who holds which block, and what a prefix hit needs."""
