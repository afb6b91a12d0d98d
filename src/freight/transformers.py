"""FP8Cache for transformers' `generate` under its public name; the code is in
`adapters/transformers.py`.
"""

from __future__ import annotations

from freight.adapters.transformers import KV_DTYPES, FP8Cache, FP8Layer, FP8SlidingLayer, Sides

__all__ = ["KV_DTYPES", "FP8Cache", "FP8Layer", "FP8SlidingLayer", "Sides"]
