"""The definitions of convolutions and recurrences: against transformers' code, and the same bits in
any cut.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.state_cases import STATE_FORMATS, Layer, in_calls, sequences, token_by_token
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridForgetGate
from transformers.models.glm5_next.modeling_glm5_next import chunk_kimi_delta_attention
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNormGated,
    torch_chunk_gated_delta_rule,
)

from freight.fp8.formats import Format
from freight.kernels.reference_set import REFERENCE
from freight.operands.recurrence import Convolution, DecayParameters, GatedNorm
from freight.operands.states import States

BLOCKS = (3, 1, 4, 2, 0)


def run(
    layer: Layer, rows: int, cuts: tuple[int, ...], **options: float
) -> tuple[torch.Tensor, States]:
    inputs, states = layer.inputs(rows, **options), layer.states(6)  # type: ignore[arg-type]
    out = in_calls(
        lambda part, where: REFERENCE.recurrence(
            **{name: x[part] for name, x in inputs.items()},
            states=states,
            sequences=where,
            rule=layer.rule,
        ),
        rows,
        cuts,
        BLOCKS,
    )
    return out, states


@pytest.mark.parametrize("half_life", [1.0, 20.0, 1000.0])
def test_a_gated_delta_net_is_that_of_transformers(half_life: float) -> None:
    layer, rows = Layer(every=64), 150
    inputs = layer.inputs(rows, half_life=half_life)
    found, _ = run(layer, rows, (150,), half_life=half_life)
    q, k = (inputs[name].view(1, rows, 2, 64).repeat_interleave(2, 2) for name in ("q", "k"))
    v = inputs["v"].view(1, rows, 4, 32)
    wanted, _ = torch_chunk_gated_delta_rule(
        q, k, v, inputs["log_decay"][None], inputs["beta"][None], use_qk_l2norm_in_kernel=True
    )
    assert (found.view(rows, 4, 32) - wanted[0]).abs().max() < 2e-6


@pytest.mark.parametrize("half_life", [1.0, 20.0, 1000.0])
def test_kimi_delta_attention_is_that_of_transformers(half_life: float) -> None:
    layer, rows = Layer(by_channel=True, key_heads=4, every=64), 150
    inputs = layer.inputs(rows, half_life=half_life)
    found, _ = run(layer, rows, (150,), half_life=half_life)
    q, k, v = (inputs[name].view(1, rows, 4, -1) for name in ("q", "k", "v"))
    wanted, _ = chunk_kimi_delta_attention(
        q, k, v, inputs["log_decay"][None], inputs["beta"][None], use_qk_l2norm_in_kernel=True
    )
    assert (found.view(rows, 4, 32) - wanted[0]).abs().max() < 2e-6
    assert (found - token_by_token(layer, inputs)).abs().max() < 2e-6


@pytest.mark.parametrize("half_life", [1.0, 20.0, 1000.0])
def test_mamba2_is_the_recurrence_of_its_paper(half_life: float) -> None:
    """In float64, one token after the other: S = decay S + beta k vᵀ, o = qᵀ S + skip v."""
    layer, rows = Layer(delta=False), 100
    inputs = {name: x.double() for name, x in layer.inputs(rows, half_life=half_life).items()}
    found, _ = run(layer, rows, (100,), half_life=half_life)
    q, k = (inputs[name].view(rows, 2, 64).repeat_interleave(2, 1) for name in ("q", "k"))
    v, skip = inputs["v"].view(rows, 4, 32), layer.rule.skip.double()[:, None]
    state = torch.zeros(4, 64, 32, dtype=torch.float64)
    for t in range(rows):
        state = state * inputs["log_decay"][t].exp()[:, None, None]
        state = state + (inputs["beta"][t][:, None] * k[t])[:, :, None] * v[t][:, None]
        wanted = (q[t][:, :, None] * state).sum(1) + skip * v[t]
        assert (found[t].view(4, 32) - wanted).abs().max() < 2e-4, (
            t
        )  # of sums of 64 products of size 10


@pytest.mark.parametrize("format", STATE_FORMATS)
@pytest.mark.parametrize(
    "kind", [Layer(), Layer(delta=False), Layer(by_channel=True)], ids=["delta", "mamba2", "kda"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_cut_into_calls_changes_a_bit(format: Format, kind: Layer, dtype: torch.dtype) -> None:
    layer = replace(kind, format=format, dtype=dtype)
    whole, states = run(layer, 150, (150,))
    for cuts in ((1,), (7,), (16,), (33,), (1, 31, 5)):
        parts, kept = run(layer, 150, cuts)
        assert torch.equal(whole, parts), cuts
        for name, part in states.parts.items():
            assert torch.equal(
                part.view(torch.uint8)[[3, 1, 4, 2]],
                kept.parts[name].view(torch.uint8)[[3, 1, 4, 2]],
            )


def test_sequences_of_a_call_do_not_see_each_other() -> None:
    layer = replace(Layer(), format=Format.INT8)
    first, second = layer.inputs(40, 1), layer.inputs(21, 2)
    second["v"][5] = torch.nan
    states = layer.states(6)
    together = sequences([(0, 40, (3, 1)), (0, 21, (2,))])
    both = {name: torch.cat((first[name], second[name])) for name in first}
    found = REFERENCE.recurrence(**both, states=states, sequences=together, rule=layer.rule)
    alone = REFERENCE.recurrence(
        **first, states=layer.states(6), sequences=sequences([(0, 40, (3, 1))]), rule=layer.rule
    )
    assert torch.equal(found[:40], alone)
    assert found[40:45].isfinite().all()
    assert found[45:].isnan().all(1).all()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(50,), (1,), (7,), (2, 33)])
def test_a_convolution_is_that_of_torch(width: int, cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((50, 24), (24, width)))
    bias = torch.randn(24, generator=generator)
    states = States({"columns": torch.full((6, width - 1, 24), torch.nan)}, 16)
    found = in_calls(
        lambda part, where: REFERENCE.convolve(
            x[part], Convolution(weight, bias, True), states, where
        ),
        50,
        cuts,
        BLOCKS,
    )
    wanted = F.silu(F.conv1d(F.pad(x.T[None], (width - 1, 0)), weight[:, None], bias, groups=24))[
        0
    ].T
    assert (found - wanted).abs().max() < 2e-6


def test_decays_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(9, 4, generator=generator).to(torch.bfloat16) for _ in range(2))
    a_log, dt_bias = torch.tensor([-3.0, 0.0, 1.0, 2.7]), torch.tensor([-4.0, 0.0, 1.0, 30.0])
    beta, decay = REFERENCE.decays(a, b, DecayParameters(a_log, dt_bias))
    torch.testing.assert_close(beta, b.float().sigmoid())
    torch.testing.assert_close(decay, -a_log.exp() * F.softplus(a.float() + dt_bias))
    dt, decay = REFERENCE.decays(a, None, DecayParameters(a_log, dt_bias, (0.1, 2.0)))
    torch.testing.assert_close(dt, F.softplus(a.float() + dt_bias).clamp(0.1, 2.0))
    torch.testing.assert_close(decay, -a_log.exp() * dt)


def test_decays_of_channels_are_those_of_transformers() -> None:
    """Of Ling 3.0, with a bound and without; Kimi Linear has those without."""
    generator = torch.Generator().manual_seed(0)
    config = BailingHybridConfig(hidden_size=24, num_attention_heads=3, head_dim=8)
    config.linear_head_dim = 8
    gate = BailingHybridForgetGate(config)
    for own in gate.parameters():
        own.data.copy_(torch.randn(own.shape, generator=generator))
    x, b = torch.randn(9, 24, generator=generator), torch.randn(9, 3, generator=generator)
    for bounded in (True, False):
        gate.safe_gate = bounded
        wanted = gate(x[None])[0]
        bound = gate.lower_bound if bounded else None
        parameters = DecayParameters(gate.A_log.data, gate.dt_bias.data, bound=bound)
        beta, decay = REFERENCE.decays(gate.f_proj(x), b, parameters)
        torch.testing.assert_close(beta, b.sigmoid())
        torch.testing.assert_close(decay, wanted.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norms_are_those_of_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(7, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(96, generator=generator).to(dtype)
    first = Qwen3_5RMSNormGated(32, 1e-5).to(dtype)
    first.weight.data.copy_(weight[:32])
    wanted = first(x.view(-1, 32), gate.view(-1, 32)).view(7, 96)
    torch.testing.assert_close(
        REFERENCE.gated_norm(x, gate, GatedNorm(weight[:32], 1e-5, 32, True)), wanted
    )
    last, whole = (
        NemotronHRMSNormGated(96, 32, 1e-5).to(dtype),
        GraniteMoeHybridRMSNormGated(96, 96, 1e-5).to(dtype),
    )
    for module, group in ((last, 32), (whole, 96)):
        module.weight.data.copy_(weight)
        torch.testing.assert_close(
            REFERENCE.gated_norm(x, gate, GatedNorm(weight, 1e-5, group, False)),
            module(x, gate),
            rtol=2**-7,
            atol=1e-6,
        )
