"""Freight as a model of lm-eval under its public name; the code is in `adapters/lm_eval.py`.

`python -m freight.lm_eval` is lm-eval's command, and importing this module registers the model.
"""

from __future__ import annotations

from freight.errors import ConfigError

try:
    from freight.adapters.lm_eval import (
        AT_ONCE,
        COMMAND_DEVICE,
        SCORED,
        SEED,
        FreightLM,
        check_generation_kwargs,
        main,
        sampling_options,
    )
except ConfigError as error:  # lm-eval is not installed
    if __name__ == "__main__":
        raise SystemExit(f"error: {error}") from None
    raise

__all__ = [
    "AT_ONCE",
    "COMMAND_DEVICE",
    "SCORED",
    "SEED",
    "FreightLM",
    "check_generation_kwargs",
    "main",
    "sampling_options",
]

if __name__ == "__main__":
    main()
