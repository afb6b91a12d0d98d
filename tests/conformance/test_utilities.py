"""Models, tokens, health: the small endpoints that clients and routers ask."""

from __future__ import annotations

from itertools import product

import pytest
from tests.conformance.wire import Api


def test_models(api: Api) -> None:
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    model = listed["data"][0]
    assert {"id", "object", "created", "owned_by", "root", "max_model_len"} <= set(model)
    assert model["object"] == "model"
    assert api.get(f"/v1/models/{model['id']}").json()["id"] == model["id"]
    missing = api.get("/v1/models/no-such-model")
    assert missing.status == 404
    missing.error()


def test_tokenize_and_detokenize(api: Api) -> None:
    found = api.post(
        "/tokenize", {"model": api.model, "prompt": "def main(", "add_special_tokens": False}
    ).json()
    assert found["count"] == len(found["tokens"]) > 0
    assert found["max_model_len"] > 0
    assert (
        api.post("/detokenize", {"model": api.model, "tokens": found["tokens"]}).json()["prompt"]
        == "def main("
    )


def test_tokens_are_those_of_usage(api: Api) -> None:
    messages = [{"role": "user", "content": "def main("}]
    text = api.post("/tokenize", {"model": api.model, "prompt": "def main("}).json()["count"]
    chat = api.post("/tokenize", {"model": api.model, "messages": messages}).json()["count"]
    assert api.complete().json()["usage"]["prompt_tokens"] == text
    assert api.chat().json()["usage"]["prompt_tokens"] == chat


def test_tokenize_as_tgi(api: Api) -> None:
    tokens = api.post("/tokenize", {"inputs": "def main("}).json()
    assert all({"id", "text", "start", "stop"} <= set(token) for token in tokens)
    assert [token["stop"] for token in tokens][-1] == len("def main(")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [2**31]}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value).replace(" ", ""),
)
def test_bad_tokens_are_400(api: Api, path: str, body: dict[str, object]) -> None:
    assert api.post(path, body).status == 400


def test_a_slash_too_many_is_a_404_and_no_redirect(api: Api) -> None:
    for path in ("/v1/completions/", "/v1/chat/completions/", "/generate/", "/health/"):
        for answer in (api.get(path), api.post(path, {})):
            assert answer.status == 404, path
            assert "location" not in answer.headers, path


def test_sagemakers_address_takes_what_the_others_take(api: Api) -> None:
    messages = [{"role": "user", "content": "def main("}]
    fields = {"model": api.model, "max_tokens": 4, "temperature": 0}
    chat = api.post("/invocations", fields | {"messages": messages}).json()
    assert (
        chat["choices"][0]["message"]
        == api.chat(max_tokens=4, temperature=0).json()["choices"][0]["message"]
    )
    text = api.post("/invocations", fields | {"prompt": "def main("}).json()
    assert text["object"] == "text_completion"
    assert text["choices"] == api.complete(max_tokens=4, temperature=0).json()["choices"]
    whole = api.post(
        "/invocations", {"inputs": "def main(", "parameters": {"max_new_tokens": 4}}
    ).json()
    assert whole[0]["generated_text"] == text["choices"][0]["text"]
    refused = api.post("/invocations", {"model": api.model})
    assert refused.status == 400
    refused.error()


def test_what_sglangs_gateway_asks_a_worker(api: Api) -> None:
    model = api.get("/model_info").json()
    assert model == api.get("/get_model_info").json()
    assert model == {"model_path": api.model, "tokenizer_path": api.model, "is_generation": True}
    server = api.get("/server_info").json()
    assert server == api.get("/get_server_info").json()
    assert (server["model_path"], server["tp_size"], server["dp_size"]) == (api.model, 1, 1)
    limits = api.get("/info").json()
    assert server["max_total_num_tokens"] == limits["kv_cache"]["capacity_tokens"]
    assert server["context_length"] == limits["max_total_tokens"]
    assert 0 < server["max_running_requests"] < limits["max_concurrent_requests"]


def test_tokenizer_info(api: Api) -> None:
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(
        api.get("/tokenizer_info").json()
    )


def test_all_are_there(api: Api) -> None:
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert api.get(path).status == 200, path


def test_metrics_have_the_names_that_routers_read(api: Api) -> None:
    text = api.get("/metrics").body.decode()
    for name in (
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "cache_config_info",
    ):
        assert name in text


SHUT = (
    *("/v1/models", "/v1/chat/completions", "/v1/completions", "/generate", "/generate_stream"),
    *("/info", "/tokenize", "/detokenize", "/tokenizer_info", "/version", "/metrics", "/docs"),
    *("/openapi.json", "/nothing"),
)
WRONG: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Basic eA=="},
)


@pytest.mark.keyed
def test_without_the_key_everything_is_401(api: Api) -> None:
    for path, method, headers in product(SHUT, ("GET", "HEAD", "OPTIONS", "POST"), WRONG):
        reply = api.send(method, path, b"{}" if method == "POST" else None, headers)
        assert reply.status == 401, (path, method, headers)


@pytest.mark.keyed
def test_health_needs_no_key(api: Api) -> None:
    assert [api.send("GET", path, None, {}).status for path in ("/health", "/ping")] == [200, 200]


@pytest.mark.keyed
def test_a_host_header_is_no_way_past_the_key(api: Api) -> None:
    for host in ("x/health?", "x/health#", "[", "a b"):
        answer = api.raw(
            f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        assert answer.split(b" ", 2)[1] in (b"400", b"401"), host
