"""`freight bench serving`: what is refused before a server is asked, and what people and programs
read.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.refusals import assert_names, line_naming
from tests.unit.bench.stand_in_server import StandIn, running
from typer.main import get_command

from freight.cli.main import app


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "127.0.0.1:8000"], "'127.0.0.1:8000' is not the address of a server"),
        (
            ["--endpoint", "responses"],
            "--endpoint 'responses' is unknown: choose chat or completions",
        ),
        (["--concurrency", "2", "--rate", "1"], "give one of the two"),
        (["--rate", "0"], "--rate 0: give requests a second"),
        (["--rate", "1", "--rate", "nan"], "--rate nan: give requests a second"),
        (["--rate", "inf"], "--rate inf"),
        (["--duration", "-1"], "--duration -1"),
        (["--duration", "nan"], "--duration nan"),
        (["--timeout", "0"], "--timeout 0"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--prompt-tokens", "0"], "--prompt-tokens '0': write a number of tokens"),
        (["--output-tokens", "9:3"], "--output-tokens '9:3'"),
        (["--prompt", "words"], "choose text or ids"),
        (["--prompt", "ids", "--endpoint", "chat"], "a chat is text"),
        (["--prompts", "nothing.jsonl", "--shared-prefix", "3"], "leave --shared-prefix out"),
        (["--url", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1"], "given twice"),
        (["--picture", "load.png"], "name it load.svg"),
        (["--picture", "no/folder/load.svg"], "name a new file in a folder that exists"),
    ],
)
def test_refused(freight, arguments, said):
    answer = freight("bench", "serving", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err


def test_nobody_listens(freight):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        answer = freight("bench", "serving", "--url", url)
    assert (answer.code, answer.out) == (1, "")
    assert_names(answer.err, f"error: {url}", "reached", "--url")
    assert len(answer.err.splitlines()) == 1


def test_a_row_for_each_load_one_object_and_a_picture(freight, tmp_path: Path):
    server, picture = StandIn(key="secret"), tmp_path / "load.svg"
    loads = ["--concurrency", "1", "--concurrency", "3"]
    loads += ["--num-requests", "5", "--output-tokens", "2:4"]
    with running(server):
        asked = ["bench", "serving", "--url", server.url, *loads]
        table = freight(*asked, FREIGHT_API_KEY="secret")
        found = freight(
            *asked, "--json", "--picture", str(picture), "--api-key", "secret", "--endpoint", "chat"
        )
    assert (table.code, found.code) == (0, 0), table.err + found.err
    assert re.findall(r"\d+ at a time", table.out) == ["1 at a time", "3 at a time"]
    rows = json.loads(found.out)["rows"]
    assert [(row["concurrency"], row["requests"], row["errors"]) for row in rows] == [
        (1, 5, {}),
        (3, 5, {}),
    ]
    assert all(10 <= row["output_tokens"] <= 20 for row in rows)
    times = {name for name in rows[0] if name.endswith("_ms")}
    assert times == {"ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "late_ms"}
    assert set(rows[0]["ttft_ms"]) == {"median", "p90", "p99"}
    assert all("messages" in body for body in server.bodies[-10:])
    ElementTree.fromstring(picture.read_text())


def test_errors_and_what_a_server_does_not_take_are_said(freight):
    servers = StandIn(refuses=("ignore_eos", "continuous_usage_stats")), StandIn()
    with running(*servers):
        urls = [word for server in servers for word in ("--url", server.url)]
        sizes = ["--num-requests", "2", "--rounds", "2", "--output-tokens", "3"]
        answer = freight("bench", "serving", *urls, *sizes)
    assert answer.code == 0, answer.err
    line_naming(answer.out, f"{servers[0].url}, 1: does not", "ignore_eos")
    line_naming(answer.out, f"{servers[0].url}, 1: does not", "tokens", "event")
    assert f"{servers[1].url}, 1: does not" not in answer.out
    assert "ttft_ms_median" in answer.out
    assert "(50.0%)" in answer.out, "two rounds cover one half"


def test_every_run_has_a_seed_of_its_own_and_says_it(freight):
    server = StandIn()
    with running(server):
        sizes = ["--num-requests", "3", "--warmup", "0", "--output-tokens", "2"]
        asked = ("bench", "serving", "--url", server.url, *sizes)
        first, second = (json.loads(freight(*asked, "--json").out)["seed"] for _ in range(2))
        sent = [body["prompt"] for body in server.bodies if body["max_tokens"] == 2]
        shown = freight(*asked, "--seed", str(first))
        again = [body["prompt"] for body in server.bodies if body["max_tokens"] == 2][len(sent) :]
    assert first != second
    sent, again = (
        [text for text in prompts if len(text) != 400] for prompts in (sent, again)
    )  # without the probe
    assert sent[:3] == again != sent[3:]
    assert f"seed {first}: --seed {first} sends the same requests again" in shown.out


def test_the_share_of_the_prefix_cache_is_said(freight, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "%s"}\n' % ("abcd" * 100))
    asked = ["bench", "serving", "--num-requests", "2", "--output-tokens", "2"]
    silent, cached, cold = StandIn(), StandIn(cached=25), StandIn(cached=0)
    own = ["--prompts", str(tmp_path / "mine.jsonl")]
    with running(silent, cached, cold):
        again = freight(
            *asked, "--url", silent.url, *own, "--concurrency", "1", "--concurrency", "2"
        )
        once = freight(*asked, "--url", silent.url, *own)
        part = freight(*asked, "--url", cached.url, *own)
        none = freight(*asked, "--url", cold.url)
    line_naming(again.out, "same prompts", "prefix cache")
    line_naming(part.out, f"{cached.url}, 1", "25%", "prefix cache")
    assert "prefix cache" not in once.out + none.out


def test_every_option_has_its_sentence_in_the_documentation():
    documented = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    section = documented.split("## `freight bench serving`")[1].split("\n## ")[0]
    command = get_command(app).commands["bench"].commands["serving"]  # type: ignore[attr-defined]
    spellings = [spelling for option in command.params for spelling in option.opts]
    assert len(spellings) > 15
    assert [
        one for one in spellings if f"`{one}`" not in section and f"`{one} " not in section
    ] == []


def test_the_picture_of_prompts_of_a_file_names_the_file(
    freight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n')
    server = StandIn()
    with running(server):
        sizes = ["--num-requests", "1", "--prompts", "mine.jsonl"]
        asked = ("bench", "serving", "--url", server.url, *sizes)
        assert freight(*asked, "--picture", "load.svg").code == 0
    assert "mine.jsonl</title>" in Path("load.svg").read_text()
