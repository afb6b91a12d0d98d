"""The process that renders templates and tries grammars: what goes wrong in it costs one request,
and nothing else.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from tests.forked_server import forked
from tests.serving import CAN_FORK, has_ended

import freight
from freight.model.config.pooling import PoolingConfig, PoolingKind
from freight.pooling import PoolingTask
from freight.serve.call import Conversation, Pair
from freight.serve.pooling.pairs import read_pair
from freight.serve.processes import children
from freight.serve.rendering.renderer import Renderer
from freight.serve.tokens import Tokenize
from freight.serve.transport.errors import ApiError
from freight.text.chat_text import ChatText
from freight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.clock

DEMO = Path(freight.__file__).parent / "demo"
PLAIN = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}"
WRONG = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long": "{% for i in range(5000) %}{{ 'a' * 1000 }}{% endfor %}",
    "gigabyte": "{{ messages[0].content * 400000000 }}{{ messages[0].content * 400000000 }}",
    "memory": "{{ messages[0].content * 10000000000 }}",
    "refused": "{{ raise_exception('no robots') }}",
    "attribute": "{{ 5 | dictsort }}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "zero": "{{ 1 // 0 }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "environ": "{{ cycler.__init__.__globals__.os.environ }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "include": "{% include '/etc/hostname' %}",
    "import": "{% import 'os' as os %}",
    "mutate": "{{ messages.append(1) }}",
    "address": "{{ raise_exception('<f at 0x7f0011223344>') }}",
}
TEMPLATE = "".join(
    f"{{% if messages[0].role == '{role}' %}}{wrong}{{% endif %}}" for role, wrong in WRONG.items()
)
CHECKS = """
    import os, sys, time
    from freight.errors import RequestError

    def checker(tokenizer, vocab_size, stop_token_ids):
        assert isinstance(stop_token_ids, frozenset)
        assert tokenizer.vocab_size and vocab_size == 7 and stop_token_ids == {1, 2}
        return check

    def check(outputs):
        kind = outputs["regex"]
        if kind == "bad":
            raise RequestError("that is no regex")
        if kind == "slow":
            time.sleep(3600)
        if kind == "crash":
            os.abort()
        if kind == "killed":
            os.kill(os.getpid(), 9)
        if kind == "environment":
            raise RequestError(" ".join([*os.environ, str("torch" in sys.modules)]))
"""


def hello(role="user", **values):
    return Conversation([{"role": role, "content": "hé"}], template_values=values)


def make_folder(folder, template):
    (folder / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), TEMPLATE + PLAIN)


@pytest.fixture(scope="module")
def started(folder):
    """A loop with one renderer, for the requests that do not end its process."""
    with asyncio.Runner() as runner:
        renderer = Renderer(folder, 7, (1, 2), max_waiting=2)
        runner.run(renderer.start())
        yield runner, renderer
        runner.run(renderer.close())


@pytest.fixture
def quickly(monkeypatch):
    """Processes are forked: their start is not what is tested."""
    if CAN_FORK:
        monkeypatch.setattr(children, "subprocess", SimpleNamespace(Popen=forked))


@pytest.fixture
def running(started):
    runner, renderer = started
    return lambda conversation: runner.run(renderer.render(conversation))


def failure(call):
    with pytest.raises(ApiError) as caught:
        call()
    return caught.value


def test_renders_as_the_tokenizer_does(running, folder):
    tokenizer = Tokenizer.load(folder)
    conversation = hello(tools=[{"type": "function", "function": {"name": "f"}}])
    text = running(conversation)
    assert text == tokenizer.render_chat(conversation.messages, **conversation.template_values)
    assert tokenizer.encode(text.text, add_special_tokens=False) == tokenizer.apply_chat_template(
        conversation.messages, **conversation.template_values
    )
    parts = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert running(Conversation(parts, False, True)).text.endswith("<assistant>b")


def test_pairs_are_put_by_the_template(tmp_path):
    roles = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    loops = "{% if messages[0].content == 'loop' %}" + WRONG["loop"] + "{% endif %}"
    tokenizer = Tokenizer.load(make_folder(tmp_path, roles + loops))
    pooling = PoolingConfig(PoolingTask.CLASSIFY, PoolingKind.LAST, 1)
    pair = Pair("a query", "a document of some words")

    async def test() -> None:
        renderer = Renderer(tmp_path, 7, deadline_s=2)
        try:
            whole = await renderer.read_pair(pair, pooling, None, "documents[0]", None)
            assert whole == read_pair(tokenizer, pooling, pair, None)
            assert "<query>" in tokenizer.decode(whole.token_ids)
            cut = await renderer.read_pair(
                pair, pooling, len(whole.token_ids) - 2, "documents[0]", None
            )
            assert cut == read_pair(tokenizer, pooling, pair, len(whole.token_ids) - 2)
            for broken, status, param in (
                (Pair("loop", "x"), 500, "texts[1]"),
                (pair, 400, "texts[2]"),
            ):
                with pytest.raises(ApiError) as failed:
                    await renderer.read_pair(broken, pooling, 1, param, None)
                assert (failed.value.status, failed.value.param) == (status, param)
            assert await renderer.read_pair(pair, pooling, None, "documents[0]", None) == whole
        finally:
            await renderer.close()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("refused", "no robots"),
        ("attribute", "AttributeError"),
        ("recursion", "RecursionError"),
        ("zero", "ZeroDivisionError"),
        ("class", "__class__"),
        ("environ", "__init__"),
        ("globals", "__globals__"),
        ("include", "loader"),
        ("import", "loader"),
        ("mutate", "unsafe"),
        ("long", "at most 4194304 are read"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(running, role, says):
    error = failure(lambda: running(hello(role)))
    assert (error.status, error.param) == (400, "messages")
    assert says in error.message


def test_no_address_leaves_the_process(running):
    assert "0x" not in failure(lambda: running(hello("address"))).message


def test_malformed_conversations_are_refused(running):
    assert "messages[0].role" in failure(lambda: running(Conversation([{"content": "a"}]))).message
    assert failure(lambda: running(Conversation([]))).status == 400
    for name in ("self", "messages", "tokenize", "chat_template"):
        assert name in failure(lambda name=name: running(hello(**{name: 1}))).message
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert failure(lambda: running(hello(tools=deep))).status == 400


@pytest.mark.usefixtures("quickly")
def test_a_template_that_loops_is_ended_and_the_next_request_is_served(folder):
    async def scenario():
        renderer = Renderer(folder, 7, deadline_s=0.5)
        await renderer.start()
        before = renderer.pid
        looping = asyncio.create_task(renderer.render(hello("loop")))
        waiting = asyncio.create_task(renderer.render(hello()))
        with pytest.raises(ApiError) as caught:
            await looping  # it would never end
        renderer.deadline_s = 300  # what is sound may take long on a slow machine
        assert (caught.value.status, caught.value.code) == (500, "template_error")
        assert caught.value.headers["x-should-retry"] == "false"
        assert "<user>hé" in (await waiting).text
        assert renderer.pid != before
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        await renderer.close()

    uvloop.run(scenario())


@pytest.mark.usefixtures("quickly")
def test_a_template_cannot_take_the_memory(folder):
    async def scenario():
        renderer = Renderer(folder, 7, deadline_s=300, memory=1 << 30)
        for role in ("gigabyte", "memory"):
            with pytest.raises(ApiError, match="takes too much memory") as caught:
                await renderer.render(hello(role))
            assert caught.value.status == 400
        assert "<user>hé" in (await renderer.render(hello())).text
        await renderer.close()

    asyncio.run(scenario())


def wait_until_it_can_be_waited_for(renderer):
    """Without doing so. A zombie with a thread that still ends cannot be, and holds its socket
    open.
    """
    process = renderer._process.popen
    if CAN_FORK:
        assert select.select([process._pipe], [], [], 300)[0]
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.usefixtures("quickly")
def test_kill_costs_the_request_within_it_only(folder):
    async def scenario():
        renderer = Renderer(folder, 7, deadline_s=300)
        await renderer.start()
        looping = asyncio.create_task(renderer.render(hello("loop")))
        await asyncio.sleep(0.2)
        os.kill(renderer.pid, signal.SIGKILL)
        with pytest.raises(ApiError) as caught:
            await looping
        assert (caught.value.status, caught.value.code) == (500, "template_error")
        await renderer.start()
        killed = renderer.pid
        os.kill(killed, signal.SIGKILL)  # while it has nothing to do
        wait_until_it_can_be_waited_for(renderer)
        assert "<user>hé" in (await renderer.render(hello())).text
        await renderer.close()

    asyncio.run(scenario())


def test_a_caller_that_goes_away_leaves_its_answer_to_nobody(started):
    runner, renderer = started

    async def scenario():
        first = asyncio.create_task(renderer.render(hello(tools=[{"name": "first"}])))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await renderer.render(hello(tools=[{"name": "second"}]))).text.endswith(
            "[{'name': 'second'}]"
        )

    runner.run(scenario())


def test_too_many_that_wait_are_refused(started):
    runner, renderer = started

    async def scenario():
        asked = await asyncio.gather(
            *(renderer.render(hello()) for _ in range(5)), return_exceptions=True
        )
        refused = [answer for answer in asked if isinstance(answer, ApiError)]
        assert {error.status for error in refused} == {429}
        assert refused[0].headers["Retry-After"] == "1"
        assert sum(isinstance(answer, ChatText) for answer in asked) == 5 - len(refused) >= 2
        assert "<user>hé" in (await renderer.render(hello())).text

    runner.run(scenario())


@pytest.mark.usefixtures("quickly")
def test_one_that_was_closed_starts_no_process_for_those_that_wait(folder):
    async def scenario():
        renderer = Renderer(folder, 7, (1, 2), deadline_s=300)
        await renderer.start()
        waiting = [asyncio.create_task(renderer.render(hello("loop"))) for _ in range(2)]
        await asyncio.sleep(0.05)
        await renderer.close()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [error.status for error in errors] == [500, 503]
        assert renderer.pid is None

    asyncio.run(scenario())


def test_grammars(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, None)  # without a template, transformers is not imported
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(CHECKS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FREIGHT_API_KEY", "secret")

    async def outcome(renderer, kind):
        try:
            return await renderer.check_grammar({"regex": kind})
        except ApiError as error:
            return error

    async def scenario():
        renderer = Renderer(
            folder,
            7,
            {2, 1},
            deadline_s=300,
            start_deadline_s=300,
            grammar_checker="stand_in:checker",
        )
        assert await outcome(renderer, "fine") is None
        bad = await outcome(renderer, "bad")
        assert (bad.status, bad.message, bad.param) == (
            400,
            "that is no regex",
            "structured_outputs",
        )
        for kind, deadline in (("slow", 0.5), ("crash", 300)):
            renderer.deadline_s = deadline
            error = await outcome(renderer, kind)
            assert (error.status, error.code) == (400, "invalid_grammar")
        assert (await outcome(renderer, "killed")).status == 500
        environment = (await outcome(renderer, "environment")).message.split()
        assert environment[-1] == "False"  # torch is not there
        assert "PATH" in environment
        assert "FREIGHT_API_KEY" not in environment
        await renderer.close()

    asyncio.run(scenario())


def test_the_grammars_of_the_engine(caplog):
    renderer = Renderer(DEMO, 4096, [1])

    async def scenario():
        for good in (
            {"regex": "a+"},
            {"json": {"type": "object"}},
            {"choice": ["a", "b"]},
            {"json_object": True},
        ):
            await renderer.check_grammar(good)
        for bad in ({"regex": "("}, {"json": {"not": {}}}, {"grammar": "start: nothing"}):
            with pytest.raises(ApiError, match="cannot be compiled") as refused:
                await renderer.check_grammar(bad)
            assert refused.value.status == 400
        await renderer.close()

    asyncio.run(scenario())
    assert not caplog.records  # one process has checked all


def test_a_folder_without_a_tokenizer(tmp_path, caplog):
    async def scenario():
        renderer = Renderer(tmp_path, 7)
        with pytest.raises(ApiError, match="did not start") as caught:
            await renderer.start()
        assert str(tmp_path) not in caught.value.message
        assert renderer.pid is None

    asyncio.run(scenario())
    assert "has no tokenizer" in caplog.text


def test_the_process_ends_with_its_parent_even_while_it_loops(folder):
    program = f"""
        import asyncio
        from freight.serve.call import Conversation
        from freight.serve.rendering.renderer import Renderer

        async def main():
            renderer = Renderer({str(folder)!r}, 7)
            await renderer.start()
            print(renderer.pid, flush=True)
            await renderer.render(Conversation([{{"role": "loop", "content": ""}}]))

        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.kill()
    deadline = time.monotonic() + 300
    while not has_ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("plain", [None, ((0, 5), (20, 30))])
def test_long_texts_have_the_tokens_of_the_tokenizer(started, folder, plain):
    runner, renderer = started
    tokenizer = Tokenizer.load(folder)
    text = "Hé 漢 </s> word " * 800  # of 9,600 tokens: two messages
    prompt = text if plain is None else ChatText(text, plain)
    whole = tokenizer.encode(text) if plain is None else tokenizer.encode_chat(prompt, True)
    assert runner.run(renderer.encode(prompt, True, None, None)) == (whole, len(whole))
    for last in (0, 7, len(whole) + 1):
        expected = whole[len(whole) - last :] if last <= len(whole) else whole
        assert runner.run(renderer.encode(prompt, True, last, "key")) == (expected, len(whole))
    served = SimpleNamespace(tokenizer=tokenizer, max_model_len=64)
    for with_texts, with_offsets in ((False, False), (True, False), (False, True)):
        asked = Tokenize("", True, with_texts, with_offsets and plain is None)
        parts = runner.run(renderer.tokenized(prompt, asked, 64, None))
        assert json.loads(b"".join(parts)) == asked.answer(prompt, served)


def test_a_rendered_conversation_of_many_control_tokens_comes_whole(running, folder):
    conversation = Conversation([{"role": "user", "content": "a<|begin_of_text|>" * 20_000}])
    chat = running(conversation)
    assert chat == Tokenizer.load(folder).render_chat(conversation.messages)
    assert len(chat.plain) == 20_000
