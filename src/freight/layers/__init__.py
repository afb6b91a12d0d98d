"""The layers of a decoder: frozen values over tensors."""
