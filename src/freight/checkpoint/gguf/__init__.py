"""GGUF files: llama.cpp's format of checkpoints."""
