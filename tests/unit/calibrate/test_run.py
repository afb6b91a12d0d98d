"""Calibration against llm-compressor's scales, and against the keys and values that transformers
caches.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from freight.errors import CheckpointError
from freight.fp8.formats import Format, Granularity
from freight.fp8.scheme import LayerScales
from freight.kernels.reference_set import REFERENCE
from freight.model.sources import CheckpointSource
from freight.operands.weight import Weight
from freight.quantizer.calibration import Calibration, calibrate
from freight.quantizer.observers import Observer, make_observer
from freight.quantizer.plan import ObserverKind, QuantizeArgs, plan
from freight.quantizer.quantize import open_unquantized
from freight.quantizer.watch import FLOOR

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLM_COMPRESSOR = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())
SAMPLES = LLM_COMPRESSOR["input_ids"]
Edit = Callable[[dict[str, torch.Tensor]], None]


def measure(folder: Path, samples: list[list[int]] = SAMPLES, **options: str) -> Calibration:
    opened = open_unquantized(str(folder))
    args = QuantizeArgs(**{"activations": "static", "kv_cache": "fp8", **options})
    return opened.calibrate(plan(args), samples, ("lm_head",))


def edited(tmp_path: Path, edit: Edit) -> Path:
    """A float32 copy of the fixture with tensors changed."""
    tensors = {
        name: t.float()
        for name, t in load_file(FIXTURES / "base_bf16" / "model.safetensors").items()
    }
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((FIXTURES / "base_bf16" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return tmp_path


def unchanged(tensors: dict[str, torch.Tensor]) -> None:
    pass


def ulps(ours: float, theirs: float) -> int:
    """Distance in bfloat16."""
    one, two = torch.tensor([ours, theirs]).bfloat16().view(torch.int16).tolist()
    return abs(one - two)


def layer(scales: object, index: int) -> LayerScales:
    found = scales.layers[index]  # type: ignore[attr-defined]
    assert found is not None
    return found


def test_scales_are_those_of_llm_compressor_within_one_ulp():
    got = measure(FIXTURES / "base_bf16")
    ours = {f"{name}.input_scale": scale for name, scale in got.input_scales.items()}
    for index in range(2):
        prefix = f"model.layers.{index}.self_attn."
        ours |= {
            prefix + "k_scale": layer(got.kv, index).k[0],
            prefix + "v_scale": layer(got.kv, index).v[0],
        }
    theirs = {k: v for k, v in LLM_COMPRESSOR["scales"].items() if not k.endswith("weight_scale")}
    assert ours.keys() == theirs.keys()
    assert {
        name: ulps(ours[name], theirs[name]) for name in ours if ulps(ours[name], theirs[name]) > 1
    } == {}
    assert (got.num_samples, got.num_tokens) == (len(SAMPLES), sum(map(len, SAMPLES)))


@pytest.fixture(scope="module")
def cached(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A float32 model, and per layer all keys and values [tokens, heads, dim] that transformers
    caches for SAMPLES.
    """
    folder = edited(tmp_path_factory.mktemp("float32"), unchanged)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        caches = [model(torch.tensor([ids]), use_cache=True).past_key_values for ids in SAMPLES]
    return folder, [
        tuple(
            torch.cat([getattr(cache.layers[index], side)[0].transpose(0, 1) for cache in caches])
            for side in ("keys", "values")
        )
        for index in range(2)
    ]


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_keys_and_values_are_seen_as_the_cache_gets_them(
    cached: tuple[Path, list[tuple[torch.Tensor, torch.Tensor]]], granularity: str
):
    folder, layers = cached
    got = measure(folder, activations="dynamic", kv_granularity=granularity)
    assert got.input_scales == {}
    scales = got.kv if granularity == "tensor" else got.kv_finer
    dims = {"tensor": (0, 1, 2), "head": (0, 2), "channel": (0,)}[granularity]
    for index, sides in enumerate(layers):
        mine = layer(scales, index)
        assert mine.granularity is Granularity(granularity)
        for values, side in zip(sides, (mine.k, mine.v), strict=True):
            if granularity == "channel" and side is mine.k:  # of rotated pairs, their norms
                first, second = values.chunk(2, -1)
                values = torch.hypot(first, second).repeat(1, 1, 2)
            expected = values.abs().amax(dims).flatten() / 448
            torch.testing.assert_close(torch.tensor(side), expected, rtol=1e-4, atol=0)


def test_the_coarse_scales_do_not_depend_on_the_finer(cached: tuple[Path, object]):
    folder = cached[0]
    assert measure(folder, kv_granularity="channel").kv == measure(folder).kv
    assert measure(folder).kv_finer is None


def test_a_sleeping_channel_keeps_a_scale(tmp_path: Path):
    def silence(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"][5] *= 1e-9

    mine = layer(measure(edited(tmp_path, silence), kv_granularity="channel").kv_finer, 1)
    assert mine.v[5] == pytest.approx(max(mine.v) * FLOOR)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn: values: NaN"),
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn: keys: NaN"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj: input: NaN"),
        ("model.layers.0.mlp.down_proj.weight", r"layer 0 \(model.layers.0\) computes NaN"),
        ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj: input: NaN"),
    ],
)
def test_nan_is_refused_where_it_begins(tmp_path: Path, tensor: str, says: str):
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor][0] = float("nan")

    with pytest.raises(CheckpointError, match=says):
        measure(edited(tmp_path, poison), samples=[[0] * 64])


def test_what_is_zero_gets_one_and_is_told(tmp_path: Path):
    def clear(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"].zero_()

    got = measure(edited(tmp_path, clear))
    assert layer(got.kv, 1).v == (1.0,)
    expected = ("model.layers.1.self_attn: values", "model.layers.1.self_attn.o_proj: input")
    assert got.zeros == expected


def test_scales_that_still_move_are_told(tmp_path: Path):
    """The last sample has a token that is ten times as loud as all others."""

    def loud(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.v_proj.weight"][:, 0] = 1.0
        tensors["model.embed_tokens.weight"][:, 0] = 0.0
        tensors["model.embed_tokens.weight"][200, 0] = 10.0

    folder = edited(tmp_path, loud)
    quiet, loud_ids = [7, 8, 9] * 40, [200] * 120
    name = "model.layers.0.self_attn: values"
    assert measure(folder, [quiet, quiet, quiet, loud_ids]).moving[name] > 2
    assert name not in measure(folder, [loud_ids, quiet, quiet, quiet]).moving
    assert measure(folder, [loud_ids]).moving == {}, "one sample says nothing about settling"


def test_activations_of_ignored_modules_are_not_watched(cached: tuple[Path, object]):
    opened = open_unquantized(str(cached[0]))
    ignored = tuple(
        f"model.layers.{index}.mlp.{part}_proj" for index in range(2) for part in ("gate", "up")
    )
    got = opened.calibrate(plan(QuantizeArgs(activations="static")), SAMPLES, ignored)
    assert not set(ignored) & got.input_scales.keys()
    assert len(got.input_scales) == 10
    assert got.kv is None


class Ledger:
    """A WeightSource that knows which layers' weights are in memory."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source, self.alive, self.most = source, Counter[str](), 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.tensor(name, shape)

    @property
    def compute_format(self) -> Format:
        return self.source.compute_format

    def embedding(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Weight:
        return self.source.embedding(name, shape)

    def exact(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.exact(name, shape)

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        weight, layer = Weight(self.source.weight(name, shape).data.clone()), name.split(".")[2]
        self.alive[layer] += 1
        self.most = max(self.most, sum(count > 0 for count in self.alive.values()))
        weakref.finalize(weight.data, self.let_go, layer)
        return weight

    def input_scale(self, name: str) -> float | None:
        return None

    def let_go(self, layer: str) -> None:
        self.alive[layer] -= 1

    def head(self, name: str, shape: tuple[int, ...]) -> Weight:
        raise AssertionError("calibration computes no logits")


def test_one_layer_is_in_memory_at_a_time():
    opened = open_unquantized(str(FIXTURES / "base_bf16"))
    format = opened.model.checkpoint_format
    ledger = Ledger(CheckpointSource(opened.checkpoint, format, format, "cpu"))
    calibrate(opened.model, ledger, REFERENCE, plan(QuantizeArgs(kv_cache="fp8")), SAMPLES)
    assert ledger.most == 1
    assert not ledger.alive.total()


@pytest.mark.parametrize("options", [{}, {"center": True}])
@pytest.mark.parametrize("observer", ["absmax", "percentile"])
def test_the_observers_of_one_layer_are_in_memory_at_a_time(
    monkeypatch: pytest.MonkeyPatch, observer: str, options: dict[str, bool]
):
    """A histogram of every channel is hundreds of MiB a layer."""
    alive = Counter[str]()
    most = 0

    def noted(kind: ObserverKind, name: str, groups: int, device: str = "cpu") -> Observer:
        nonlocal most
        made, layer = make_observer(kind, name, groups, device), name.split(".")[2]
        alive[layer] += 1
        most = max(most, sum(count > 0 for count in alive.values()))
        weakref.finalize(made, lambda: alive.update({layer: -1}))
        return made

    monkeypatch.setattr("freight.quantizer.watch.make_observer", noted)
    samples = [list(range(40))] * 2
    decided = plan(
        QuantizeArgs(
            activations="static",
            kv_cache="fp8",
            kv_granularity="channel",
            observer=observer,
            **options,
        )
    )
    open_unquantized(str(FIXTURES / "base_bf16")).calibrate(decided, samples, ("lm_head",))
    assert most == 1
    assert len(alive) == 2
    assert not sum(alive.values())


def test_progress_reaches_the_end(cached: tuple[Path, object]):
    seen: list[tuple[str, int, int]] = []
    opened = open_unquantized(str(cached[0]))
    opened.calibrate(
        plan(QuantizeArgs(kv_cache="fp8")), SAMPLES, (), lambda *args: seen.append(args)
    )
    total = 2 * sum(map(len, SAMPLES))
    assert seen[-1] == ("calibrating", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize("observer", ["percentile", "mse"])
def test_the_other_observers_clip_at_most_half(cached: tuple[Path, object], observer: str):
    largest, other = measure(cached[0]), measure(cached[0], observer=observer)
    for index in range(2):
        for mine, most in zip(layer(other.kv, index).k, layer(largest.kv, index).k, strict=True):
            assert most / 2 <= mine <= most
    assert other.kv != largest.kv
    assert largest.kv is not None
    assert largest.kv.format is Format.E4M3FN
