"""The Triton kernels for NVIDIA and AMD GPUs."""
