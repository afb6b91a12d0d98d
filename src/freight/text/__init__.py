"""Text: tokenizing, detokenizing, and conversations in the form that models read."""
