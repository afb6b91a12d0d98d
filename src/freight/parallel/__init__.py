"""Ranks: what several processes that compute one model need of each other."""
