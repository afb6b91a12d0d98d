"""Grouped-query attention."""
