"""Operations on tensors: their definitions, and sets that compute them."""
