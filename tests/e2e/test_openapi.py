"""/openapi.json holds: whatever schemathesis makes of it, allowed or not, gets an answer that
stands in it, and no 5xx.

The server runs under `python -O`: nothing that a request can meet depends on an `assert`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai import BadRequestError, OpenAI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from tests.e2e.conftest import KEY, OPTIONS, DemoServer
from tests.pooling_models import save_body
from tests.serving import freight_serve

from freight.model.config.family import words

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
HEADERS = {"Authorization": f"Bearer {KEY}"}
MANY = 200
# path -> how many bodies `make test` tries
POSTS = {
    "/v1/chat/completions": 6,
    "/v1/completions": 10,
    "/generate": 10,
    "/generate_stream": 10,
    "/": 10,
    "/tokenize": 10,
    "/detokenize": 10,
    "/v1/responses": 6,
    "/v1/messages": 6,
    "/v1/messages/count_tokens": 6,
    "/invocations": 0,  # bodies of others
}
# of a server of a model that embeds
POOLED = {
    "/v1/embeddings": 8,
    "/rerank": 8,
    "/v1/rerank": 8,
    "/v2/rerank": 0,
    "/score": 8,
    "/v1/score": 0,
    "/pooling": 8,
    "/embed": 8,
    # of a model that classifies
    "/classify": 0,
    "/predict": 0,
}
# they load what is on the disk: no body that a schema allows is served
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
GETS = words("""
    /v1/models /v1/models/{model_id} /info /health /ping /version /metrics /state /model_info
    /get_model_info /server_info /get_server_info
""")
ENDLESS = "/state/stream"
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def short_server(served_folder: Any) -> Iterator[DemoServer]:
    options = [*OPTIONS, "--enable-lora", "--api-key", f"tests:{KEY}", "--max-model-len", "256"]
    with freight_serve(served_folder, options, flags=["-O"]) as url:
        yield DemoServer(url, served_folder.name, served_folder)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    folder = save_body(tmp_path_factory.mktemp("models") / "embeds", "qwen3", "Model")
    options = ["--api-key", f"tests:{KEY}", "--kv-cache-memory", "16MiB"]
    with freight_serve(folder, options, flags=["-O"]) as url:
        yield DemoServer(url, folder.name, folder)


@pytest.fixture(scope="module")
def document(short_server: DemoServer) -> dict[str, Any]:
    answer = requests.get(short_server.url + "/openapi.json", headers=HEADERS, timeout=300)
    return answer.json()  # type: ignore[no-any-return]


# What fits only some models or some other fields. A schema cannot say that, and most bodies with
# one are refused.
DEPENDENT = words("""
    response_format structured_outputs guided_json guided_regex guided_choice guided_grammar
    logit_bias stop_token_ids tools tool_choice top_logprobs prompt_logprobs stream_options
    text output_config reasoning thinking chat_template_kwargs add_generation_prompt
    continue_final_message
    prompt_name instruction use_activation raw_scores dimensions task
""")


def make_short(path: str, body: dict[str, Any], plain: bool) -> None:
    """Let an allowed body ask for few tokens, and for the model that there is: which that is, no
    schema can know.
    """
    body.pop("model", None)
    if path in POOLED:
        for name in DEPENDENT if plain else ():
            body.pop(name, None)
    elif path.startswith("/v1/"):
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 3
        body.pop("max_completion_tokens", None)
        for name in DEPENDENT if plain else ():
            body.pop(name, None)
        for name, value in body.items():
            if isinstance(value, float) and value.is_integer():
                body[name] = int(value)  # 1.0 is an integer to a schema, and not to the server
    elif "inputs" in body and "token" not in path:
        body["parameters"] = {**(body.get("parameters") or {}), "max_new_tokens": 3}


def hold(
    server: DemoServer, document: dict[str, Any], path: str, method: str, mode: Any, examples: int
) -> None:
    operation = schemathesis.openapi.from_dict(document)[path][method]
    session = requests.Session()
    statuses: set[int] = set()

    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        derandomize=examples < MANY,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and method == "POST":
            make_short(path, case.body, plain=examples < MANY)
        answer = case.call(base_url=server.url, session=session, headers=HEADERS, timeout=300)
        statuses.add(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    with session:
        check()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert 200 in statuses, f"{path}: no body that the document allows is served"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("path", POSTS)
def test_many_bodies(
    path: str, mode: Any, short_server: DemoServer, document: dict[str, Any]
) -> None:
    hold(short_server, document, path, "POST", mode, MANY)


def test_what_it_says_holds(short_server: DemoServer, document: dict[str, Any]) -> None:
    """Of every path: a few bodies, and whether it needs a key."""
    paths = document["paths"]
    expected = {("get", path) for path in (*GETS, ENDLESS)} | {
        ("post", path) for path in (*POSTS, *POOLED, *ADAPTERS)
    }
    assert {(method, path) for path in paths for method in paths[path]} == expected
    names = [paths[path][method]["operationId"] for method, path in sorted(expected)]
    assert len(set(names)) == len(names)
    for method, path in sorted(expected):
        answer = requests.request(method, short_server.url + path, timeout=300)
        assert (answer.status_code == 401) == ("security" in paths[path][method]), path
    for path in sorted(GETS):
        hold(short_server, document, path, "GET", GenerationMode.POSITIVE, 3)
    for path in ADAPTERS:
        hold(short_server, document, path, "POST", GenerationMode.NEGATIVE, 6)
    for place, (path, count) in enumerate(POSTS.items()):
        if count:
            hold(short_server, document, path, "POST", MODES[place % 2], count)
    require_chat_a_refusal_and_a_form(short_server)


def test_what_it_says_of_models_that_pool_holds(
    embedder: DemoServer, document: dict[str, Any]
) -> None:
    for place, (path, count) in enumerate(POOLED.items()):
        if count:
            hold(embedder, document, path, "POST", MODES[place % 2], count)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("path", [path for path, count in POOLED.items() if count])
def test_many_bodies_of_models_that_pool(
    path: str, mode: Any, embedder: DemoServer, document: dict[str, Any]
) -> None:
    hold(embedder, document, path, "POST", mode, MANY)


def require_chat_a_refusal_and_a_form(server: DemoServer) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    with OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        create = partial(client.chat.completions.create, model=server.name, **asked)
        assert create(max_tokens=4).choices[0].finish_reason == "length"
        with pytest.raises(BadRequestError) as refused:
            create(top_p=0)
        assert refused.value.param == "top_p"
        schema = {"name": "sky", "schema": {"enum": ["clear", "grey"]}}
        form: Any = {"type": "json_schema", "json_schema": schema}
        choice = create(response_format=form, max_tokens=20).choices[0]
        assert json.loads(choice.message.content or "") in ("clear", "grey")
