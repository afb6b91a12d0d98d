"""AutoFP8's interface to Freight's quantizer: a script that used `auto_fp8` runs with its import
changed.

    from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig

    config = BaseQuantizeConfig(quant_method="fp8", activation_scheme="dynamic")
    model = AutoFP8ForCausalLM.from_pretrained(DIR, config)
    model.quantize([])
    model.save_quantized(OUT)

A script's `tokenizer(…).to("cuda")` needs a GPU, because it is a method of transformers. Delete
`.to("cuda")` to run on a CPU: Freight accepts tokens on any device. `quantize` also accepts a file,
the name of a data set on the hub, or texts, like `freight quantize --calibration-data`. Calibration
runs in `save_quantized`, once the output path has been checked.

The output has AutoFP8's layout. The scales are those of `freight quantize`: observed on the
unquantized model, for keys after rotary embedding. AutoFP8's are less exact, because it observes a
model whose earlier layers are already quantized. Unlike AutoFP8, Freight does not observe padding
that an attention mask marks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from freight.checkpoint.writer import require_new
from freight.errors import ConfigError
from freight.quantizer.calibration import Calibration
from freight.quantizer.data import Samples
from freight.quantizer.modules import ignored_modules, layer_modules, matched_modules
from freight.quantizer.plan import ActivationScheme, Layout, QuantizeArgs, plan
from freight.quantizer.quantize import (
    NOTHING_CALIBRATED,
    Unquantized,
    load_samples,
    open_unquantized,
    require_any,
    require_blocks,
    require_other,
    write,
)
from freight.quantizer.report import Report, data_name
from freight.quantizer.stages import stages
from freight.quantizer.tree import model_tree
from freight.quantizer.write import check_disk_space

logger = logging.getLogger("freight")

# options of from_pretrained about loading with transformers, which is not used here
_IGNORED = frozenset(
    """
    torch_dtype dtype device_map trust_remote_code low_cpu_mem_usage attn_implementation use_safetensors cache_dir
    force_download resume_download proxies local_files_only use_auth_token token subfolder _commit_hash
    """.split()  # noqa: SIM905, a list would take a page
)


@dataclass
class BaseQuantizeConfig:
    """The options of a quantization. `ignore_patterns` are module names, or `re:` and an expression
    searched in them.

    `kv_cache_quant_targets` asks for KV scales, as in ("k_proj", "v_proj"). Raises ConfigError, a
    ValueError, for another method or scheme. After use, `ignored_layers` and
    `kv_cache_quant_layers` hold what the patterns matched.
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
            raise ConfigError(
                "kv_cache_quant_targets needs calibration: choose activation_scheme='static'"
            )


class AutoFP8ForCausalLM:
    """A checkpoint to be quantized to FP8. `model` is its folder; weights are read when they are
    needed.

    `print(model)` shows its modules with their shapes and formats; after `quantize`, the formats to
    be written.
    """

    def __init__(self, model: Unquantized, quantize_config: BaseQuantizeConfig) -> None:
        self.model = model.checkpoint.path
        self.model_type = model.model.model_type
        self.quantize_config = quantize_config
        self._samples: Samples | None = None
        self._data = ""  # what a report calls them
        self._calibration: Calibration | None = None
        kv_cache = "none"
        if quantize_config.kv_cache_quant_targets:
            kv_cache = "fp8"
        args = QuantizeArgs(
            weights="fp8",
            activations=quantize_config.activation_scheme,
            kv_cache=kv_cache,
            ignore=tuple(quantize_config.ignore_patterns),
            format=Layout.FP8,
        )
        self._plan = plan(args)
        unquantized = matched_modules(model.model, self._plan.ignore)
        self._opened = model.quantized_as(self._plan.weights, self._plan.layout, unquantized)
        self.config = self._opened.model
        self._ignored, self._partly_kept = ignored_modules(
            self.config, self._plan.ignore, never=self._opened.modules_beside
        )
        require_any(self.config, self._plan, self._ignored)
        require_blocks(self.config, self._plan, self._ignored)
        quantize_config.ignored_layers = list(self._ignored)
        quantize_config.kv_cache_quant_layers = self._kv_layers(
            quantize_config.kv_cache_quant_targets or ()
        )
        self._quantized = False

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        quantize_config: BaseQuantizeConfig,
        **model_init_kwargs: Any,
    ) -> AutoFP8ForCausalLM:
        """Open a folder or a hub id. Options about loading with transformers have no effect.

        Raises ConfigError for an unknown option, CheckpointError for a model that cannot be
        quantized.
        """
        unknown = sorted(set(model_init_kwargs) - _IGNORED - {"revision"})
        if unknown:
            raise ConfigError(f"from_pretrained has no option {unknown[0]!r}")
        revision = model_init_kwargs.get("revision")
        return cls(open_unquantized(str(pretrained_model_name_or_path), revision), quantize_config)

    def quantize(self, calibration_tokens: object = None) -> None:
        """Take the calibration data, if the activation scheme is static.

        `calibration_tokens` are [rows, length] token ids (a tensor or lists), or a tokenizer's
        result with an attention mask that marks padding; or a path, the name of a data set on the
        hub, or a list of texts. Raises ConfigError if they are too few. `save_quantized` calibrates.
        """
        if self._plan.activations is ActivationScheme.STATIC:
            limits = replace(self._plan, max_seq_len=self.config.max_position_embeddings)
            data = calibration_tokens
            if not _is_text(data):
                data = _rows(data)
            if isinstance(data, list):
                limits = replace(limits, num_samples=max(1, len(data)))
            self._samples = load_samples(self._opened, limits, data)
            self._data = data_name(calibration_tokens)
        self._calibration = None
        self._quantized = True

    def save_quantized(self, save_dir: str | Path, overwrite: bool = True) -> None:
        """Calibrate, unless done before, and write the checkpoint, tokenizer included.

        A folder that Freight wrote is replaced, unless `overwrite` is False. Raises ConfigError,
        before anything is calibrated, for any other folder that exists; CheckpointError if the model
        computes NaN.
        """
        if not self._quantized:
            raise ConfigError("call quantize(calibration_tokens) before save_quantized")
        out = Path(save_dir)
        require_new(out, overwrite)
        require_other(self._opened.checkpoint, out)
        check_disk_space(self._opened.checkpoint, out)
        print(self)
        print(f"Saving the model to {save_dir}")
        with stages() as on_progress:
            if self._calibration is None:
                self._calibration = NOTHING_CALIBRATED
                if self._samples is not None:
                    self._calibration = self._opened.calibrate(
                        self._plan, self._samples, self._ignored, on_progress
                    )
            source = self._opened, self._plan, self._ignored, self._partly_kept
            calibration = self._calibration
            report = None
            if self._samples is not None:
                report = Report(
                    self._opened.name,
                    self.config,
                    self._plan,
                    self._data,
                    self._samples,
                    calibration,
                )
            result = write(*source, calibration, out, on_progress, overwrite, report=report)
        for warning in result.warnings:
            logger.warning("%s", warning)
        mib = 2**20
        print(
            f"Saved: {result.bytes_before / mib:,.2f} MiB before, {result.bytes_after / mib:,.2f} MiB after"
        )

    def __repr__(self) -> str:
        plan = None
        if self._quantized:
            plan = self._plan
        return model_tree(self._opened.checkpoint, self.config, plan, self._ignored)

    def _kv_layers(self, targets: Iterable[str]) -> list[str]:
        """Return the names of the modules whose output is cached and that end in one of `targets`.
        Raises ConfigError unless these are all of them: a scale for K needs one for V.
        """
        targets = tuple(targets)
        if not targets:
            return []
        projections: list[str] = []
        for layer in layer_modules(self.config):
            projections += layer.mixed.get("qkv", ())[1:]
        matched = {name for name in projections if name.endswith(targets)}
        if sorted(matched) != sorted(projections):
            raise ConfigError(
                f"kv_cache_quant_targets={targets!r} do not name the key and value projections; use "
                f"{tuple(name.rpartition('.')[2] for name in projections[:2])!r}"
            )
        return projections


def _is_text(data: object) -> bool:
    """Return whether `data` is a path, the name of a data set, or a list of texts."""
    return isinstance(data, str | Path) or (
        isinstance(data, list) and bool(data) and isinstance(data[0], str)
    )


def _rows(tokens: object) -> list[list[int]]:
    """Return lists of token ids without padding. Raises ConfigError for anything that is not token
    ids.
    """
    if tokens is None:
        raise ConfigError(
            "activation_scheme='static' needs calibration tokens: quantize(tokenizer(texts, …)), without "
            '.to("cuda") on a machine that has no GPU'
        )
    ids = getattr(tokens, "input_ids", tokens)
    mask = getattr(tokens, "attention_mask", None)
    rows = _lists(ids)
    if mask is None:
        return rows
    unpadded = []
    for row, mask_row in zip(rows, _lists(mask), strict=True):
        unpadded.append([token for token, is_token in zip(row, mask_row, strict=True) if is_token])
    return unpadded


def _lists(values: object) -> list[list[int]]:
    rows = values
    if hasattr(values, "tolist"):
        rows = values.tolist()
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(
            "calibration tokens must be [rows, length]; give a 2-D tensor, or the tokenizer's result"
        )
    return rows
