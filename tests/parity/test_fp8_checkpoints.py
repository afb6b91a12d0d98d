"""An FP8 checkpoint computes what it declares: transformers with the producer's matrices, inputs
rounded by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.formats.forms import FORMS
from tests.formats.writers import CONFIG, Written, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from freight import LLM, SamplingParams

TOKENS = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(5))


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def static(made: Written, module: str, x: Tensor) -> Tensor:
    return rounded(x, float(made.tensors[f"{module}.input_scale"]))


def per_row(made: Written, module: str, x: Tensor) -> Tensor:
    limit = made.form.input_limit or torch.inf
    return rounded(x, x.abs().amax(-1, keepdim=True).clamp(max=limit) / 448)


def per_group(made: Written, module: str, x: Tensor) -> Tensor:
    groups = [rounded(part, part.abs().amax(-1, keepdim=True) / 448) for part in x.split(128, -1)]
    return torch.cat(groups, -1)


def with_transformers(
    made: Written, inputs: Callable[[Written, str, Tensor], Tensor] | None
) -> Tensor:
    """Log-probabilities of the prompt's tokens; `inputs` is what becomes of the input of a
    quantized matrix.
    """
    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "dtype"}))
        .float()
        .eval()
    )
    state = {f"{module}.weight": matrix.float() for module, matrix in made.dequantized.items()}
    state |= {name: made.tensors[name].float() for name in model.state_dict() if name not in state}
    model.load_state_dict(state)

    def hook(module: str) -> Callable[..., Any]:
        assert inputs is not None
        return lambda _, arguments: (inputs(made, module, arguments[0]),)

    for name, part in model.named_modules():
        if inputs is not None and name in made.dequantized:
            part.register_forward_pre_hook(hook(name))
    with torch.no_grad():
        logprobs = model(TOKENS[None]).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, TOKENS[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("autofp8 static", static),
        ("modelopt in config", static),
        ("autofp8 dynamic", per_row),
        ("quark channel token", per_row),
        ("fbgemm", per_row),
        ("deepseek", per_group),
        ("modelopt blocks", None),
    ],
)
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_activations_are_rounded_as_declared(name: str, inputs: Any, kernels: str, tmp_path: Path):
    made = write(FORMS[name])
    options = {"dtype": "float32", "kv_cache_dtype": "float32", "kernels": kernels}
    llm = LLM(model=made.save(tmp_path), skip_tokenizer_init=True, max_num_seqs=1, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    prompt = llm.generate([{"prompt_token_ids": TOKENS.tolist()}], params)[0].prompt_logprobs
    assert prompt is not None
    ours = torch.tensor(
        [row[t].logprob for row, t in zip(prompt, TOKENS.tolist(), strict=True) if row is not None]
    )
    error = (ours - with_transformers(made, inputs)).abs()
    assert error.mean() < 0.002
    for other in {None, per_row, per_group} - {
        inputs
    }:  # it is this rounding, no other and not none
        assert (ours - with_transformers(made, other)).abs().mean() > 4 * error.mean()
