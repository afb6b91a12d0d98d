"""Functions on tensors: their definitions, and the sets that compute them."""
