"""What kernels read and write: tensors with their scales."""
