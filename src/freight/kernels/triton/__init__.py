"""The kernels for GPUs."""
