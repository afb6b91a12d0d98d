"""Kinds of mixers: a folder each, with its spec, which imports no torch, and its layer."""
