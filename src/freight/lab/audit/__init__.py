"""What other engines do with a checkpoint's KV scales."""
