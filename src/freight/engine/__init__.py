"""Requests in, deltas out: scheduling, forward passes, sampling."""
