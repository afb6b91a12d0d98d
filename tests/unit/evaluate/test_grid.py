"""The grid of `freight evaluate`: its figures against their definitions, its cost, and that it
repeats itself.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.refusals import line_naming, refuses
from tests.tiny_gguf import write_tiny

import freight
from freight.checkpoint.reader import resolve_model
from freight.errors import ConfigError
from freight.fp8.formats import Granularity
from freight.lab.evaluate import measure as passes
from freight.lab.evaluate.advice import how_to
from freight.lab.evaluate.documents import read_documents, read_prompted
from freight.lab.evaluate.figures import Evaluation
from freight.lab.evaluate.grid import GridArgs, evaluate_grid
from freight.lab.evaluate.measure import rows_at_once
from freight.lab.evaluate.report import run_caches
from freight.lab.evaluate.rounded import SCHEMES, WEIGHT_ONLY
from freight.lab.evaluate.speed import Speed, contexts_for, faster_from
from freight.lab.evaluate.stored_error import Probe
from freight.model.decoder import Decoder
from freight.model.open import open_checkpoint, open_model
from freight.settings.engine import EngineArgs

TEXT = (resolve_model("demo") / "heldout.txt").read_text(encoding="utf-8")
DEMO = EngineArgs("demo")
KEYS = {
    *(
        "kv_cache_dtype",
        "granularity",
        "scale_source",
        "perplexity",
        "kl_mean",
        "kl_p99",
        "same_top",
    ),
    *("bytes_per_token", "prefill_tokens_per_second", "decode_tokens_per_second"),
}


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> list[Evaluation]:
    """The whole grid, over 12 documents and over 12 others."""
    size = 400
    documents = [TEXT[start : start + size] for start in range(0, 24 * 3 * size, 3 * size)]
    path = tmp_path_factory.mktemp("calibration") / "calibration.txt"
    path.write_text(
        (resolve_model("demo") / "calibration.txt").read_text(encoding="utf-8")[:4000],
        encoding="utf-8",
    )
    grid = GridArgs(speed=False, window=128, calibration_data=str(path))
    return [evaluate_grid(DEMO, documents[half::2], grid) for half in (0, 1)]


def test_the_grid_has_every_cache_once(halves: list[Evaluation]):
    runs = [(run.name, run.granularity, run.scale_source, run.centered) for run in halves[0].runs]
    assert runs == [
        ("16 bits", None, None, False),
        ("unit", "tensor", "unit", False),
        ("tensor", "tensor", "calibrated", False),
        ("head", "head", "calibrated", False),
        ("channel", "channel", "calibrated", False),
        ("token", "token", "dynamic", False),
        ("e5m2", "tensor", "unit", False),
        ("centered", "channel", "calibrated", True),
    ]
    assert [run.bytes_per_token for run in halves[0].runs] == [3072, *[1536] * 4, 1584, 1536, 1536]


def test_16_bits_against_itself_has_no_divergence(halves: list[Evaluation]):
    first = halves[0].runs[0]
    assert (first.kl_mean, first.kl_p99, first.kl_max, first.same_top, first.perplexity_ratio) == (
        0,
        0,
        0,
        1,
        1,
    )
    assert all(set(layer.values()) == {0} for layer in first.layer_errors)


def test_the_other_half_of_the_documents_agrees_within_the_intervals(halves: list[Evaluation]):
    for one, other in zip(*(half.runs[1:] for half in halves), strict=True):
        for a, b in (
            (one.kl_interval, other.kl_interval),
            (one.perplexity_ratio_interval, other.perplexity_ratio_interval),
        ):
            assert a is not None
            assert b is not None
            # Of 14 pairs of true 95 % intervals one is disjoint once in ten times. Twice the half
            # widths are nearly 4 standard deviations of the difference.
            half_widths = math.hypot(a[1] - a[0], b[1] - b[0]) / 2
            assert abs(sum(a) - sum(b)) / 2 <= 2 * half_widths
        assert one.kl_interval is not None
        assert one.kl_interval[0] < one.kl_mean < one.kl_interval[1]


def test_figures_are_in_order(halves: list[Evaluation]):
    by_name = {run.name: run for run in halves[0].runs}
    for run in halves[0].runs[1:]:
        assert run.kl_median < run.kl_mean < run.kl_p99 < run.kl_max
        assert all(
            0 < layer[what] < 0.3 for layer in run.layer_errors for what in ("k", "v", "attention")
        )
    token, coarse = by_name["token"], by_name["e5m2"]
    assert token.kl_mean < coarse.kl_mean
    assert all(
        a["k"] < b["k"] for a, b in zip(token.layer_errors, coarse.layer_errors, strict=True)
    )
    centered, channel = by_name["centered"], by_name["channel"]
    assert centered.layer_errors[1]["k"] < channel.layer_errors[1]["k"]
    assert by_name["unit"].flushed_share > token.flushed_share, (
        "small values are lost with a scale of 1.0"
    )


def test_positions_add_up_to_the_whole(halves: list[Evaluation]):
    evaluation = halves[0]
    assert evaluation.position_edges == (0, 16, 32, 64, 128)
    values = [value for value in evaluation.runs[0].perplexity_by_position if value is not None]
    assert min(values) < evaluation.runs[0].perplexity < max(values)


def test_the_same_figures_as_for_one_cache_alone(halves: list[Evaluation]):
    """`run_caches` judges one text; the windows of several documents are its windows for each."""
    document = TEXT[:1500]
    grid = GridArgs(caches=("token",), speed=False, window=128)
    evaluation = evaluate_grid(DEMO, [document], grid)
    _, run = run_caches(DEMO, [("fp8", "dynamic")], document, 128)
    assert evaluation.runs[1].kl_mean == pytest.approx(float(run.token_kl.double().mean()))
    assert evaluation.runs[1].perplexity == pytest.approx(
        math.exp(-float(run.token_logprobs.double().mean()))
    )
    assert evaluation.sample.units == "windows"


def test_every_setting_takes_one_pass_and_little_more(monkeypatch: pytest.MonkeyPatch):
    passed, hidden = [], Decoder.hidden

    def counted(self: Decoder, batch: object, kv: object) -> torch.Tensor:
        passed.append(len(batch.token_ids))  # type: ignore[attr-defined]
        return hidden(self, batch, kv)  # type: ignore[arg-type]

    seconds, judge = [], passes.measure

    def timed(*args: object) -> None:
        begin = passes.now("cpu")
        judge(*args)  # type: ignore[arg-type]
        seconds.append(passes.now("cpu") - begin)

    monkeypatch.setattr(Decoder, "hidden", counted)
    monkeypatch.setattr("freight.lab.evaluate.grid.measure", timed)
    grid = GridArgs(caches=("unit", "token", "e5m2"), speed=False, window=512, max_tokens=1024)
    forward: list[float] = []
    while not forward or (
        len(forward) < 3 and seconds[-1] > 1.3 * forward[-1]
    ):  # others may keep the machine busy
        evaluation = evaluate_grid(DEMO, [TEXT[:8000]], grid)
        forward.append(sum(run.forward_seconds for run in evaluation.runs))
    assert passed == [512] * 2 * 4 * len(forward)  # windows x settings, each time
    assert [run.num_passes for run in evaluation.runs] == [2] * 4
    # 1.3 and less alone on a machine; other tests run beside it
    assert min(whole / part for whole, part in zip(seconds, forward, strict=True)) <= 2.0, (
        seconds,
        forward,
    )


def test_calibration_s_forward_passes_are_counted():
    grid = GridArgs(caches=("tensor", "centered"), speed=False, window=64)
    evaluation = evaluate_grid(DEMO, [TEXT[:400]], grid)
    assert (
        evaluation.calibration_seconds > sum(run.forward_seconds for run in evaluation.runs) / 2
    ), "64 times the text"
    assert evaluation.forward_seconds <= evaluation.seconds
    assert evaluation.as_json()["forward_seconds"] == evaluation.forward_seconds
    without = evaluate_grid(DEMO, [TEXT[:400]], GridArgs(caches=("token",), speed=False, window=64))
    assert without.calibration_seconds == 0


def test_rows_of_every_fourth_chunk_are_looked_at_up_to_a_limit():
    probe, seen = Probe(1), []
    for _ in range(200):
        probe.begin(512, "cpu")
        seen.append(0 if probe.rows is None else len(probe.rows))
    assert seen == [64, 0, 0, 0] * 32 + [0] * 72
    probe.begin(5, "cpu")
    assert probe.rows is None
    short = Probe(1)
    short.begin(5, "cpu")
    assert short.rows is not None
    assert short.rows.tolist() == [0, 1, 2, 3, 4]


def test_rows_of_logits_are_bounded_for_any_vocabulary(monkeypatch: pytest.MonkeyPatch):
    assert [rows_at_once(size) for size in (4096, 32000, 262144, 10**7)] == [4096, 512, 64, 32]
    plain = run_caches(DEMO, [("fp8", "unit")], TEXT[:1000], 128)
    monkeypatch.setattr(passes, "rows_at_once", lambda size: 32)
    pieces = run_caches(DEMO, [("fp8", "unit")], TEXT[:1000], 128)
    assert torch.equal(pieces[1].token_logprobs, plain[1].token_logprobs)
    assert torch.allclose(pieces[1].token_kl, plain[1].token_kl, atol=1e-6)


def test_static_scales_are_those_that_quantize_would_write(tmp_path: Path):
    """Within the rounding of the kernels: calibration uses the reference's."""
    from freight.lab.evaluate.grid import _samples
    from freight.lab.evaluate.report import load_for, plain_config, pool_for
    from freight.lab.evaluate.static_scales import measure_scales
    from freight.model.open import open_model

    options = {"weights": "none", "kv_cache": "fp8", "num_samples": 4, "max_seq_len": 128}
    freight.quantize("demo", tmp_path / "out", kv_granularity="channel", **options)
    written = open_checkpoint(str(tmp_path / "out")).kv_scales
    opened = open_model(DEMO)
    samples = _samples(opened, GridArgs(), 128)[:4]
    plain = plain_config(opened)
    decoder = load_for(opened, [plain])
    pool = pool_for(opened, decoder, plain, max(map(len, samples)))
    found = measure_scales(decoder, pool, samples, ["tensor", "head", "channel"]).scales
    assert found["channel"] is not None
    assert found["head"] is not None
    for own, other in zip(found["channel"].layers, written.layers, strict=True):
        assert own is not None
        assert other is not None
        assert own.granularity is Granularity.CHANNEL
        assert torch.allclose(torch.tensor(own.k), torch.tensor(other.k), rtol=0.03)
        assert torch.allclose(torch.tensor(own.v), torch.tensor(other.v), rtol=0.03)
    heads = [layer.k for layer in found["head"].layers if layer is not None]
    channels = [layer.k for layer in found["channel"].layers if layer is not None]
    for of_heads, of_channels in zip(heads, channels, strict=True):
        for head, scale in enumerate(of_heads):
            pairs = of_channels[64 * head : 64 * head + 64]
            assert pairs[:32] == pairs[32:], "both channels of a pair have its norm"
            assert max(pairs) / 2**0.5 <= scale <= max(pairs)


def test_weights_are_rows_with_two_caches_each_as_quantize_writes_them(tmp_path: Path):
    grid = GridArgs(caches=("token",), weights=SCHEMES, speed=False, window=128)
    evaluation = evaluate_grid(DEMO, [TEXT[:1000]], grid)
    rows = {(run.weights, run.name): run for run in evaluation.runs}
    assert [*rows] == [(w, c) for w in ("as stored", *SCHEMES) for c in ("16 bits", "token")]
    assert all(run.kl_mean > 1e-4 for run in evaluation.runs[2:])
    assert len({run.kl_mean for run in evaluation.runs}) == len(rows)
    written: dict[str, dict[str, Any]] = {
        "fp8-channel": {"weights": "fp8-channel"},
        "int4-64": {"weights": "int4", "group_size": 64},
        "mxfp4": {"weights": "mxfp4"},
    }
    for scheme, options in written.items():
        freight.quantize("demo", tmp_path / scheme, **options)
        (run,) = run_caches(EngineArgs(str(tmp_path / scheme)), [], TEXT[:1000], 128)
        perplexity = math.exp(-float(run.token_logprobs.double().mean()))
        assert rows[scheme, "16 bits"].perplexity == pytest.approx(perplexity, rel=1e-5), scheme


def test_weight_only_schemes_are_those_that_quantize_writes(tmp_path: Path):
    """Of 4 bits, which kernels multiply by inputs in INT8 where they can, --activations tells the
    same.
    """
    grid = GridArgs(caches=("token",), weights=WEIGHT_ONLY, speed=False, window=128)
    evaluation = evaluate_grid(DEMO, [TEXT[:1000]], grid)
    rows = {(run.weights, run.name): run for run in evaluation.runs}
    assert [*rows] == [(w, c) for w in ("as stored", *WEIGHT_ONLY) for c in ("16 bits", "token")]
    plain = rows["as stored", "16 bits"].perplexity
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "fp8-channel-a16": ({"weights": "fp8-channel", "activations": "none"}, {}),
        "fp8-block-a16": ({"weights": "fp8-block", "activations": "none"}, {}),
        "int4-32-a16": ({"weights": "int4", "group_size": 32}, {"activations": "bfloat16"}),
        "mxfp4-a16": ({"weights": "mxfp4"}, {"activations": "bfloat16"}),
    }
    for scheme, (written, args) in cases.items():
        freight.quantize("demo", tmp_path / scheme, **written)
        (run,) = run_caches(EngineArgs(str(tmp_path / scheme), **args), [], TEXT[:1000], 128)
        perplexity = math.exp(-float(run.token_logprobs.double().mean()))
        assert rows[scheme, "16 bits"].perplexity == pytest.approx(perplexity, rel=1e-5), scheme
        assert rows[scheme, "16 bits"].perplexity != pytest.approx(plain, rel=1e-5), scheme


def test_4_bits_follow_activations_and_a16_does_not():
    text = [TEXT[:300]]
    grid = GridArgs(caches=(), weights=("int4", "int4-a16"), speed=False, window=64)
    usual = evaluate_grid(EngineArgs("demo", device="cpu"), text, grid).runs
    plain = evaluate_grid(EngineArgs("demo", device="cpu", activations="bfloat16"), text, grid).runs
    perplexities = {run.weights: run.perplexity for run in usual if run.name == "16 bits"}
    assert perplexities["int4"] != perplexities["int4-a16"]
    of_both = {
        run.perplexity for run in plain if run.weights != "as stored" and run.name != "token"
    }
    assert of_both == {perplexities["int4-a16"]}


def test_other_weights_of_a_gguf_file_are_refused_with_the_way_to_16_bits(tmp_path: Path):
    path = write_tiny(tmp_path / "tiny.gguf")
    grid = GridArgs(weights=("fp8-a16",), speed=False)
    with refuses(ConfigError, "--weights", "fp8-a16", "GGUF", "freight convert", str(path)):
        evaluate_grid(EngineArgs(str(path)), [[1, 2, 3]], grid)


def test_speed_is_timed_in_turns_and_named_from_where_it_pays():
    grid = GridArgs(caches=("unit",), window=64)
    evaluation = evaluate_grid(DEMO, [TEXT[:400]], grid)
    assert evaluation.contexts == (16, 64, 256, 1024)
    for run in evaluation.runs:
        assert run.prefill_tokens_per_second
        assert run.decode is not None
        assert min(run.decode) > 0
        assert run.decode_tokens_per_second == run.decode[-1]
    assert contexts_for(131072, 3072) == (341, 1365, 5461, 21845, 87381)
    assert contexts_for(8, 3072) == (8,)
    plain = Speed(1.0, (16, 64, 256), (10.0, 10.0, 10.0))
    assert faster_from(Speed(1.0, (16, 64, 256), (11.0, 9.0, 20.0)), plain) == 256
    assert faster_from(Speed(1.0, (16, 64, 256), (11.0, 12.0, 20.0)), plain) == 16
    assert faster_from(Speed(1.0, (16, 64, 256), (11.0, 12.0, 10.0)), plain) is None


def test_json_has_the_promised_keys(halves: list[Evaluation]):
    said = json.loads(json.dumps(halves[0].as_json()))
    assert all(set(run) >= KEYS for run in said["runs"])
    assert said["weights"]["bytes"] > 0


def test_jsonl_is_a_document_a_line(tmp_path: Path):
    path = tmp_path / "documents.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two\\u2028three"}\n')
    assert read_documents(path) == ["one", "two\u2028three"]
    path.write_text('{"body": "one"}\n')
    assert read_documents(path, "body") == ["one"]
    # a byte order mark, CRLF, and a separator that Python takes for the end of a line
    path.write_bytes('\ufeff{"text": "two\u2028three"}\r\n{"text": "é"}\r\n'.encode())
    assert read_documents(path) == ["two\u2028three", "é"]
    (text,) = read_prompted(path, "text", "text")[:1]
    assert (text.prompt, text.text) == ("two\u2028three", "two\u2028three")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", ("is empty",)),
        ("a.jsonl", "\n", ("is empty",)),
        ("a.jsonl", '{"text": "x"}\n{"body": "x"}\n', ("line 2", "'text'", "--field", "body")),
        ("a.jsonl", '{"text": 3}\n', ("line 1", "'text'")),
        ("a.jsonl", "[1]\n", ("line 1", "list")),
        ("a.jsonl", '{"text": "a\\ud800"}\n', ("line 1", "'text'", "surrogates", "character 1")),
        ("a.jsonl", '{"' + "k" * 90_000 + '": 1}\n', ("line 1", "kkk", "90000 characters")),
        ("a.jsonl", "{\n", ("line 1", "not JSON")),
        ("a.jsonl", '{"text": "x", "text": "y"}\n', ("line 1", "'text' twice")),
        ("a.jsonl", '{"text": "x"}\r\n{"text": "é"}\n', ("--data", "line 2", "UTF-8")),
        ("a.txt", "x\n\né", ("--data", "line 3", "UTF-8")),
    ],
)
def test_bad_files_are_refused_by_line(name: str, text: str, says: tuple[str, ...], tmp_path: Path):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as refused:
        read_documents(tmp_path / name)
    assert all(part in str(refused.value) for part in says)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("args", "documents", "grid", "says"),
    [
        (DEMO, [[5]], GridArgs(), "has 1 token; perplexity needs at least 2"),
        (
            DEMO,
            [[5], [6], [7]],
            GridArgs(max_tokens=2),
            "none of the 3 documents has 2 tokens within the first 2 tokens",
        ),
        (DEMO, ["a b c d"], GridArgs(window=2000), "--window 2000 is more than the 1024"),
        (DEMO, ["a b c d"], GridArgs(caches=("tokens",)), "--caches 'tokens' is unknown"),
        (DEMO, ["a b c d"], GridArgs(weights=("int3",)), "--weights 'int3' is unknown"),
        (DEMO, ["a b c d"], GridArgs(weights=("fp8-a8",)), "--weights 'fp8-a8' is unknown"),
        (DEMO, ["a b c d"], GridArgs(weights=("int8-a16",)), "INT8 by inputs in INT8 alone"),
        (
            EngineArgs("demo", quantization="fp8"),
            ["a b c"],
            GridArgs(weights=("fp8",)),
            "quantized already",
        ),
        (
            EngineArgs("demo", kv_cache_dtype="fp8"),
            ["a b c"],
            GridArgs(caches=("token",)),
            "omit one",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_weights_are_read(
    args: EngineArgs,
    documents: list[object],
    grid: GridArgs,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(
        "freight.model.open.OpenModel.load", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        evaluate_grid(args, documents, grid)  # type: ignore[arg-type]


def test_layers_are_skipped_in_every_8_bit_cache() -> None:
    args = EngineArgs(max_model_len=64, kv_cache_dtype_skip_layers="1")
    grid = GridArgs(
        caches=("unit", "channel", "token", "e5m2", "int8"),
        weights=("fp8",),
        max_tokens=64,
        speed=False,
    )
    found = evaluate_grid(args, [TEXT[:1000]], grid)
    plain = {"dtype": "bfloat16", "granularity": None}
    for run in found.runs:
        if run.name == "16 bits":
            assert run.layers is None
            continue
        assert run.layers is not None
        assert run.layers[1] == plain
        assert run.layers.count(plain) == 1
        assert (
            run.layer_errors[1]["k"] == run.layer_errors[1]["v"] == 0.0 < run.layer_errors[0]["k"]
        )
    assert len(found.runs) == 8
    line_naming("\n".join(found.overview.notes), "8-bit", "layer 1", "bfloat16")


def engine_args(command: str) -> EngineArgs:
    """The options of `freight serve MODEL --name value …`."""
    words = shlex.split(command)
    names = [word.removeprefix("--").replace("-", "_") for word in words[3::2]]
    return EngineArgs(words[2], **dict(zip(names, words[4::2], strict=True)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of --kv-budget."""
    folder = tmp_path_factory.mktemp("budget") / "chosen"
    freight.quantize(
        "demo",
        folder,
        weights="none",
        kv_cache="fp8",
        kv_budget="bits=12",
        num_samples=2,
        max_seq_len=256,
    )
    return str(folder)


@pytest.mark.parametrize("skipped", [(), ("0",), ("0", "1")])
def test_a_choice_by_layer_is_measured_and_its_command_gives_it(
    chosen: str, skipped: tuple[str, ...]
):
    """The engine gives it with --kv-cache-dtype auto alone, also with skips."""
    args = EngineArgs(chosen, kv_cache_dtype_skip_layers=skipped)
    caches = GridArgs(caches=("tensor", "token"), speed=False, max_tokens=100)
    evaluation = evaluate_grid(args, [TEXT[:1000]], caches)
    assert [run.name for run in evaluation.runs] == ["16 bits", "checkpoint", "token"]
    for run in evaluation.runs:
        given = engine_args(how_to(run, evaluation.overview))
        opened = open_model(given)
        kv = opened.resolve(given).kv
        assert (kv.layer_names(), kv.names()["scale_source"]) == (run.layers, run.scale_source)


def test_a_checkpoint_in_fp8_is_a_row_as_well(tmp_path: Path):
    freight.quantize("demo", tmp_path / "fp8", weights="fp8-channel")
    grid = GridArgs(caches=(), weights=("fp8-channel", f"{tmp_path}/fp8"), speed=False, window=64)
    runs = evaluate_grid(DEMO, [TEXT[:300]], grid).runs
    means = {run.weights: run.kl_mean for run in runs if run.name == "16 bits"}
    assert means["fp8"] == pytest.approx(means["fp8-channel"], rel=1e-5)
    assert means["fp8"] > 0
