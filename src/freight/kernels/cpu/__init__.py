"""The compiled kernels of csrc/, called through ctypes."""
