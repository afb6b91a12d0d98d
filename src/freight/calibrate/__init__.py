"""The quantizer: a model's weights and KV cache, measured on data and written as a checkpoint."""
