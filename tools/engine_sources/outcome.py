"""The forms of names that are asked about, and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# How a scale is named after `model.layers.0.`; {side} is k or v.
FORMS: Mapping[str, str] = {
    "plain": "self_attn.{side}_scale",
    "inside": "self_attn.attn.{side}_scale",
    "modelopt": "self_attn.{side}_proj.{side}_scale",
    "output": "self_attn.{side}_proj.output_scale",
    "fused": "self_attn.qkv_proj.{side}_scale",
    "cache": "self_attn.{side}_cache.scale",
    "both": "self_attn.kv_scale",
    "mixer": "mixer.{side}_proj.{side}_scale",
}


@dataclass(frozen=True)
class Outcome:
    """`effect` is 'uses', 'drops', 'unknown' or 'stops: ERROR'; `file` and `line` are where that
    was decided.

    `why` says of 'unknown' what could not be followed.
    """

    effect: str
    file: str = ""
    line: int = 0
    why: str = ""


def undecided(why: str) -> Outcome:
    return Outcome("unknown", why=why)
