"""Models of every family with changed tensors, computed by transformers; where transformers does not
load the experts' separate matrices, by Freight, which tests/parity compares with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.parity.random_models import freight_logits, save_random, tokens
from tests.parity.variants import VARIANTS
from torch import Tensor

from freight.model.config.model import ModelConfig
from freight.model.open import open_checkpoint
from freight.model.shapes import tensor_shapes
from freight.quantizer.other_parts import tensors_beside

IDS = tokens(60)
STACKED = (
    *("gemma4-moe", "granite-moe", "granite-moe-biases", "granite-h-moe", "qwen3-vl-moe"),
    *("qwen3-vl-moe-dense-layer", "step3p7", "step3p7-plain"),
    *("mistral4", "mistral4-groups"),
)


class Original:
    """A random float32 model: its tensors by their names in the checkpoint, and its logits."""

    def __init__(self, variant: str, folder: Path) -> None:
        self._folder = folder
        self._source = folder / "original"
        self._by_transformers = variant not in STACKED
        model = save_random(VARIANTS[variant], self._source, torch.float32)
        self._class = type(model)
        self.logits = self._logits_of(self._source)
        opened = open_checkpoint(str(self._source))
        self.config: ModelConfig = opened.model
        shapes = tensor_shapes(self.config)
        self.tensors = {name: opened.checkpoint.take(name, shape) for name, shape in shapes.items()}
        for name in tensors_beside(opened.checkpoint, self.config):
            self.tensors[name] = opened.checkpoint.copy(name)

    def error_with(self, changed: Mapping[str, Tensor], **keys: Any) -> float:
        """Return the largest difference of logits when `changed` replaces tensors, as a share of the
        largest logit; `keys` are changed in config.json.
        """
        written = self._folder / "changed"
        written.mkdir(exist_ok=True)
        tensors = {**self.tensors, **changed}
        contiguous = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(contiguous, written / "model.safetensors", {"format": "pt"})
        config = json.loads((self._source / "config.json").read_text())
        (written / "config.json").write_text(json.dumps(config | keys))
        difference = (self._logits_of(written) - self.logits).abs().max()
        return float(difference / self.logits.abs().max())

    def _logits_of(self, folder: Path) -> Tensor:
        """float32 [len(IDS), vocab_size]"""
        if not self._by_transformers:
            return freight_logits(folder, IDS, "float32")
        model, report = self._class.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["mismatched_keys"]
        with torch.no_grad():
            logits: Tensor = model.eval()(torch.tensor([IDS])).logits[0].float()
        return logits
