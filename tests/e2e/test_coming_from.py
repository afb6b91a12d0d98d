"""docs/coming-from.md: each row's command or snippet is run, the cache is what the row says, and
what is refused is.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.container import ROOT, entry_point, would_serve
from tests.rank_exports import write_export
from tests.refusals import refuses

from freight import LLM, AsyncLLM, ConfigError, SamplingParams
from freight.auto_fp8 import AutoFP8ForCausalLM, BaseQuantizeConfig
from freight.llm_compressor import QuantizationModifier, oneshot
from freight.model.open import open_model
from freight.settings.engine import EngineArgs, EngineConfig, KVCacheConfig

FIXTURES = ROOT / "tests" / "fixtures"
IDS = json.loads((FIXTURES / "llmcompressor_scales.json").read_text())["input_ids"][:4]
IDS = [ids[: min(map(len, IDS))] for ids in IDS]
SMALL: dict[str, Any] = {"kv_cache_memory": "4MiB", "max_model_len": 64}


class Row(NamedTuple):
    system: str
    there: str
    here: str
    cache: str


def rows() -> Iterator[Row]:
    system = ""
    for line in (ROOT / "docs" / "coming-from.md").read_text().splitlines():
        if line.startswith("## "):
            system = line[3:]
        elif line.startswith("| `"):
            there, here, cache, _ = (cell.strip() for cell in line.strip("|").split("|"))
            yield Row(system, there.strip("`"), here, cache.strip("`"))


ROWS = list(rows())


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """The capital words of the page -> what stands for them here."""
    factors = {str(layer): 0.03 for layer in range(6)}
    scales = {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}}
    (tmp_path / "scales.json").write_text(json.dumps(scales))
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"input_ids": ids}) + "\n" for ids in IDS)
    )
    return {
        "MODEL": "demo",
        "BASE": str(FIXTURES / "base_bf16"),
        "QUANTIZED": str(FIXTURES / "autofp8_static_kv"),
        "EXPORT": str(write_export(tmp_path / "export")),
        "SCALES.json": str(tmp_path / "scales.json"),
        "DATA.jsonl": str(tmp_path / "data.jsonl"),
        "OUT.json": str(tmp_path / "out.json"),
        "OUT": str(tmp_path / "out"),
    }


def filled(text: str, places: dict[str, str]) -> str:
    """`text` with its places named. MODEL_ID is no place."""
    words = "|".join(re.escape(word) for word in sorted(places, key=len, reverse=True))
    return re.sub(rf"(?<![\w/])({words})(?!\w)", lambda word: places[word[1]], text)


def described(kv: KVCacheConfig) -> str:
    return f"{kv.describe()}, {kv.granularity}, {kv.scale_source}"


def run_command(line: str, folder: Path) -> tuple[int, dict[str, Any] | None]:
    """(exit status, the engine's options of the server that it would start, None if it starts
    none).
    """
    words, environ = shlex.split(line), {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    if words[0] == "docker":
        image = next(at for at, word in enumerate(words) if word.partition(":")[0] == "freight")
        options, argv = words[2:image], words[image + 1 :]
        environ = dict(value.split("=", 1) for name, value in pairwise(options) if name == "-e")
        words = ["freight", *entry_point(folder, *argv, **environ)[0]]
    status, served = would_serve(words, environ)
    return status, None if served is None else served[1]


def run_python(code: str) -> list[EngineConfig]:
    """Run a snippet with the names that the page imports; the configurations of its LLMs."""
    made: list[EngineConfig] = []

    def llm(model: str, **options: Any) -> LLM:
        opened = LLM(model, **SMALL, skip_tokenizer_init=model != "demo", **options)
        made.append(opened.config)
        return opened

    def async_llm(model: str, **options: Any) -> AsyncLLM:
        return AsyncLLM(model, engine="thread", **SMALL, **options)

    names = {
        "LLM": llm,
        "AsyncLLM": async_llm,
        "SamplingParams": SamplingParams,
        "torch": torch,
        "IDS": IDS,
        "oneshot": oneshot,
    }
    names |= {"AutoFP8ForCausalLM": AutoFP8ForCausalLM, "BaseQuantizeConfig": BaseQuantizeConfig}
    exec(code, names | {"QuantizationModifier": QuantizationModifier})
    return made


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.system}: {row.there[:60]}")
def test_the_row(
    row: Row, places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    refused = row.here.startswith("refused: ")
    line = filled(row.there if refused else row.here.strip("`"), places)
    command = re.sub(r"^(vllm|aphrodite|text-generation-launcher)\b", "freight", line)
    command = re.sub(r"^(python -m sglang.launch_server|llama-server)\b", "freight serve", command)
    if refused:
        says = row.here.removeprefix("refused: ").strip("`")
        if "(" in line:
            with pytest.raises(ConfigError, match=re.escape(says)):
                run_python(line)
        else:
            assert run_command(command, tmp_path) == (2, None)
            assert says in capsys.readouterr().err
        return
    if "(" in line:
        made = run_python(line)
        found = described(made[-1].kv) if made else ""
    else:
        status, options = run_command(command, tmp_path)
        assert status == 0, capsys.readouterr().err
        opened = None if options is None else open_model(EngineArgs(**options))
        found = "" if opened is None else described(opened.resolve(opened.args).kv)
    assert not row.cache or found == row.cache
    for place in ("OUT", "OUT.json"):
        if re.search(rf"\b{re.escape(place)}(?![\w.])", row.here):
            assert Path(places[place]).exists()


def test_the_page_has_every_system_and_its_promises():
    assert list(dict.fromkeys(row.system for row in ROWS)) == [
        *("TGI", "vLLM", "SGLang", "llama.cpp", "Aphrodite"),
        *("AutoFP8", "AMMO and ModelOpt", "llm-compressor"),
    ]
    with refuses(ConfigError, "fp8_e4m3fn", "--kv-cache-dtype fp8"):
        run_python(f'LLM("{FIXTURES / "autofp8_static_kv"}", kv_cache_dtype="fp8_e5m2")')
    assert "docs/coming-from.md" in "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
