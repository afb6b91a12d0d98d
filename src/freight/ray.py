"""Freight on Ray under its public name: Ray Serve and Ray Data; the code is in `adapters/ray/`.

    serve run freight.ray:app model=demo num_replicas=2

`app` and `build` are the same function, of a dictionary of options (`adapters/ray/options.py`). `BatchLLM` is a
class for `Dataset.map_batches`. All are loaded at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freight.adapters.ray.batch import BatchLLM
    from freight.adapters.ray.deployment import build

    app = build

__all__ = ["BatchLLM", "app", "build"]

if not TYPE_CHECKING:  # Ray Data needs no Ray Serve, and the tests of what knows no Ray need no Ray

    def __getattr__(name: str) -> object:
        if name == "BatchLLM":
            from freight.adapters.ray.batch import BatchLLM

            return BatchLLM
        if name in ("app", "build"):
            from freight.adapters.ray.deployment import build

            return build
        raise AttributeError(f"module 'freight.ray' has no attribute {name!r}")
