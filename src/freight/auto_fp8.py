"""AutoFP8's interface under its public name; the code is in `adapters/auto_fp8.py`."""

from __future__ import annotations

from freight.adapters.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig

__all__ = ["AutoFP8ForCausalLM", "BaseQuantizeConfig"]
