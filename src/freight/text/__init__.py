"""Text: token ids, what they say, and conversations as models read them."""
