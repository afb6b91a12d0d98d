"""The options of recurrent states: --state-every, the tokens between kept states, and
--state-dtype, their format.

All kernel sets take the same formats of states, and 16 bits are bfloat16 alone. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from freight.base.fields import is_integer
from freight.base.options import choose
from freight.errors import ConfigError
from freight.fp8.formats import Format
from freight.model.config.model import ModelConfig
from freight.operands.tiles import STATE_TILE
from freight.settings.engine import KVCacheConfig

_MOST_EVERY = 2**30  # kernels take 32-bit numbers, and no context is as long
STATE_DTYPES = (
    "auto",
    "bfloat16",
    "float32",
    "int8",
    "fp8",
    "fp8_e4m3",
    "fp8_e4m3fn",
    "fp8_e4m3fnuz",
)
_REFUSED: dict[object, str] = {  # formats of keys and values that states cannot have -> the reason
    "float16": "a state may grow beyond its largest number, 65,504; use bfloat16, which takes as much, or float32",
    "fp8_e5m2": "two bits of mantissa make twice the error of E4M3; use int8, which has the least of 8 bits, or fp8",
}


def check_states(interval: object, dtype: object, block_size: int) -> None:
    """Raise ConfigError for values of --state-every and --state-dtype that no model takes."""
    _check_every(interval, block_size)
    _check_dtype(dtype)


def _check_every(value: object, block_size: int) -> None:
    """Require None, or a power of two that is a multiple of the block size and of a state's tile.
    Raises ConfigError.
    """
    if value is None:
        return
    least = max(STATE_TILE, block_size)
    if not is_integer(value) or value < least or value & (value - 1):
        raise ConfigError(
            f"--state-every {value!r} must be a power of two, {least} or more: a multiple of {STATE_TILE} and "
            f"of --block-size {block_size}; give {least}, {2 * least} or {4 * least}, or omit it"
        )
    if value > _MOST_EVERY:
        raise ConfigError(
            f"--state-every {value} must be at most {_MOST_EVERY}, beyond any context; or omit it"
        )


def _check_dtype(value: object) -> None:
    if isinstance(value, str) and value in _REFUSED:
        raise ConfigError(f"--state-dtype {value}: {_REFUSED[value]}")
    choose("--state-dtype", value, STATE_DTYPES)


def default_state(compute: Format) -> Format:
    """Return the format of unquantized states: float32 if computed in float32, else bfloat16, whose
    range they need.
    """
    if compute is Format.FLOAT32:
        return Format.FLOAT32
    return Format.BFLOAT16


def with_state(
    kv: KVCacheConfig, asked: str, compute: Format, native: Format, model: ModelConfig
) -> KVCacheConfig:
    """Return `kv` with the format of states that --state-dtype `asked` selects. `native`: the
    device's E4M3.

    `auto` is INT8 if keys and values have 8 bits, because its error in states is smaller than that
    of E4M3. A config.json may name a dtype (`mamba_ssm_dtype`), but it describes the publisher's
    code and is ignored. Raises ConfigError if a format is named and no layer has a recurrent state.
    """
    if not model.recurrent:
        if asked != "auto":
            raise ConfigError(
                f"--state-dtype {asked}: no layer of this model ({model.model_type}) keeps a recurrent state, and "
                "inputs of convolutions are kept in the compute dtype; omit --state-dtype"
            )
        return kv
    if asked == "auto" and kv.format.is_quantized:
        return replace(kv, state=Format.INT8)
    if asked == "auto":
        return replace(kv, state=default_state(compute))
    if asked in ("fp8", "fp8_e4m3"):
        return replace(kv, state=native)
    return replace(kv, state=Format(asked))
