"""Speed: of kernels, of one batch, of many requests, of a server under load."""
