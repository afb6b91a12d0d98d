"""The layers of a decoder: frozen dataclasses over tensors."""
