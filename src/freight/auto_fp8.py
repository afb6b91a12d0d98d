"""AutoFP8's interface to Freight's quantizer: a script that used `auto_fp8` runs with its import changed.

    from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig

    config = BaseQuantizeConfig(quant_method="fp8", activation_scheme="dynamic")
    model = AutoFP8ForCausalLM.from_pretrained(DIR, config)
    model.quantize([])
    model.save_quantized(OUT)

The output has AutoFP8's own layout. The scales are those of `freight quantize`: observed on the unquantized model,
keys after rotary embedding. AutoFP8's are less exact, because it observed a model whose earlier layers were already
quantized. Padding that an attention mask marks is not observed, unlike in AutoFP8.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freight.calibrate.modules import ignored_modules, layer_modules
from freight.calibrate.quantize import NOTHING_CALIBRATED, Unquantized, load_samples, open_unquantized, write
from freight.calibrate.write import check_disk_space
from freight.checkpoint.writer import require_new
from freight.config.plan import ActivationScheme, Layout, QuantizeArgs, plan
from freight.errors import ConfigError

_PASSED_OVER = frozenset(  # options of from_pretrained about loading by transformers, which is not used here
    """
    torch_dtype dtype device_map trust_remote_code low_cpu_mem_usage attn_implementation use_safetensors cache_dir
    force_download resume_download proxies local_files_only use_auth_token token subfolder _commit_hash
    """.split()  # noqa: SIM905, a list would take a page
)


@dataclass
class BaseQuantizeConfig:
    """How to quantize. `ignore_patterns` are module names, or `re:` and an expression searched in them.

    `kv_cache_quant_targets` asks for KV scales, as in ("k_proj", "v_proj"). Raises ConfigError, a ValueError, for
    another method or scheme. After use, `ignored_layers` and `kv_cache_quant_layers` hold what the patterns matched.
    """

    quant_method: str = "fp8"
    activation_scheme: str = "static"
    ignore_patterns: list[str] = field(default_factory=lambda: ["re:.*lm_head"])
    kv_cache_quant_targets: tuple[str, ...] | None = None
    ignored_layers: list[str] = field(default_factory=list, init=False)
    kv_cache_quant_layers: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.quant_method != "fp8":
            raise ConfigError("Only FP8 quantization is supported.")
        if self.activation_scheme not in ("static", "dynamic"):
            raise ConfigError("Invalid activation_scheme. Choose either 'static' or 'dynamic'.")
        if self.kv_cache_quant_targets is not None and self.activation_scheme == "dynamic":
            raise ConfigError("kv_cache_quant_targets needs calibration: choose activation_scheme='static'")


class AutoFP8ForCausalLM:
    """A checkpoint on its way to FP8. `model` is its folder: weights are read when they are needed."""

    def __init__(self, model: Unquantized, quantize_config: BaseQuantizeConfig) -> None:
        self._opened = model
        self.model = model.checkpoint.path
        self.model_type = model.model.model_type
        self.config = model.model
        self.quantize_config = quantize_config
        self._calibration = NOTHING_CALIBRATED
        self._plan = plan(
            QuantizeArgs(
                weights="fp8",
                activations=quantize_config.activation_scheme,
                kv_cache="fp8" if quantize_config.kv_cache_quant_targets else "none",
                ignore=tuple(quantize_config.ignore_patterns),
                format=Layout.FP8,
            )
        )
        self._ignored, self._torn = ignored_modules(self.config, self._plan.ignore)
        quantize_config.ignored_layers = list(self._ignored)
        quantize_config.kv_cache_quant_layers = self._kv_layers(quantize_config.kv_cache_quant_targets or ())
        self._quantized = False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, quantize_config: BaseQuantizeConfig, **model_init_kwargs: Any
    ) -> AutoFP8ForCausalLM:
        """Open a folder or a hub id. Options about how transformers would load the model have no effect.

        Raises ConfigError for an unknown option, CheckpointError for a model that cannot be quantized.
        """
        unknown = sorted(set(model_init_kwargs) - _PASSED_OVER - {"revision"})
        if unknown:
            raise ConfigError(f"from_pretrained has no option {unknown[0]!r}")
        revision = model_init_kwargs.get("revision")
        return cls(open_unquantized(str(pretrained_model_name_or_path), revision), quantize_config)

    def quantize(self, calibration_tokens: Any = None) -> None:
        """Calibrate, if the activation scheme is static.

        calibration_tokens: [rows, length] token ids (a tensor or lists), or a tokenizer's answer, whose attention mask
        says what is padding. Raises ConfigError without enough of them, CheckpointError if the model computes NaN.
        """
        if self._plan.activations is ActivationScheme.STATIC:
            rows = _rows(calibration_tokens)
            every = replace(self._plan, num_samples=max(1, len(rows)), max_seq_len=self.config.max_position_embeddings)
            samples = load_samples(self._opened, every, rows)
            self._calibration = self._opened.calibrate(self._plan, samples, self._ignored)
        self._quantized = True

    def save_quantized(self, save_dir: str | Path) -> None:
        """Write the checkpoint, tokenizer included. Raises ConfigError if `save_dir` is taken."""
        if not self._quantized:
            raise ConfigError("call quantize(calibration_tokens) before save_quantized")
        out = Path(save_dir)
        require_new(out)
        check_disk_space(self._opened.checkpoint, out)
        write(self._opened, self._plan, self._ignored, self._torn, self._calibration, out)

    def _kv_layers(self, targets: Iterable[str]) -> list[str]:
        """Names of the modules whose output is cached, which `targets` end. One scale for K needs one for V."""
        targets = tuple(targets)
        projections = [name for layer in layer_modules(self.config) for name in layer.qkv[1:]]
        if targets and sorted({name for name in projections if name.endswith(targets)}) != sorted(projections):
            raise ConfigError(
                f"kv_cache_quant_targets={targets!r} do not name the key and value projections; use "
                f"{tuple(name.rpartition('.')[2] for name in projections[:2])!r}"
            )
        return projections if targets else []


def _rows(tokens: Any) -> list[list[int]]:
    """Lists of token ids without padding."""
    if tokens is None:
        raise ConfigError("activation_scheme='static' needs calibration tokens: quantize(tokenizer(texts, …))")
    ids = getattr(tokens, "input_ids", tokens)
    mask = getattr(tokens, "attention_mask", None)
    rows = _lists(ids)
    if mask is None:
        return rows
    return [[token for token, kept in zip(*pair, strict=True) if kept] for pair in zip(rows, _lists(mask), strict=True)]


def _lists(values: Any) -> list[list[int]]:
    rows: Any = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError("calibration tokens are [rows, length]; give a 2-D tensor, or what the tokenizer returns")
    return rows
