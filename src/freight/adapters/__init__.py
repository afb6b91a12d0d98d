"""Freight under the names of other libraries and launchers; nothing in the core imports it."""
