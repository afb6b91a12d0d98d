"""The operands of kernels: tensors with their scales."""
