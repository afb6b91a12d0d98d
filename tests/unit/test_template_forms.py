"""The forms of messages that chat templates read, found by rendering: content as a string or parts,
arguments as objects or text, system messages in the middle, and what a template leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.server.openai_cases import LIMITS, SERVED

import freight
from freight.errors import RequestError
from freight.serve.anthropic.messages_request import parse_messages
from freight.serve.openai.chat_request import parse_chat
from freight.serve.openai.responses_request import parse_responses
from freight.text.messages import read_messages
from freight.text.tokenizer import Tokenizer

DEMO = Tokenizer.load(Path(freight.__file__).parent / "demo")
USER = {"role": "user", "content": "Is it raining?"}
RESULT = {"role": "tool", "tool_call_id": "c00000000", "content": "rain"}
LOOP = "{% for m in messages %}[{{ m.role }}]BODY{% endfor %}"


def rendered(template, messages, **values):
    return DEMO.with_chat_template(template).render_chat(messages, **values).text


def called(arguments, **others):
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "c00000000", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, **others, "tool_calls": calls}


PARTS = {  # spellings of content that is a list of parts
    "a loop": "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    "subscripts": "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
    "the first": "{{ m.content[0].text }}",
    "the last": "{{ (m.content | last)['text'] }}",
    "selected": "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "a filter in the loop": "{% for p in m.content if p is mapping and 'text' in p %}{{ p.text }}{% endfor %}",
    "a macro": "{% macro w(c) %}{% for p in c %}{{ p.get('text', '') }}{% endfor %}{% endmacro %}{{ w(m.content) }}",
    "another name": "{% set c = m.get('content') %}{% for x in c %}{{ x['text'] }}{% endfor %}",
    "not a string": "{% if m.content is not string %}{{ m.content[0]['text'] }}{% endif %}",
    "keys": "{% for p in m.content %}{% for k, v in p.items() if k == 'text' %}{{ v }}{% endfor %}{% endfor %}",
}
STRINGS = {  # spellings that look like parts and take a string, or both
    "either": "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}",
    "characters": "{% for c in m.content %}{{ c }}{% endfor %}",
    "in upper case": "{{ m.content | upper }}",
    "as JSON": "{{ m.content | tojson }}",
    "a name like parts": "{% set content = m.content | trim %}{{ content }}",
}


@pytest.mark.parametrize("name", [*PARTS, *STRINGS])
def test_the_users_text_arrives_however_a_template_reads_content(name):
    template = LOOP.replace("BODY", {**PARTS, **STRINGS}[name])
    parts = [{"type": "text", "text": "Is it "}, {"type": "text", "text": "raining?"}]
    for content in ("Is it raining?", parts):
        text = rendered(template, [{"role": "user", "content": content}])
        assert "is it raining?" in text.lower()
        assert "type" not in text


def test_each_role_has_its_own_form():
    body = (
        "{% if m.role == 'user' %}{{ m.content[0].text }}{% elif m.role == 'tool' %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ '' + (m.content or '') }}"
        "{{ m.tool_calls }}{% endif %}"
    )
    messages = [
        {"role": "system", "content": "Be short."},
        USER,
        {"role": "assistant", "content": "Let me look."},
        USER,
        called('{"city": "Bonn"}'),
        RESULT,
    ]
    text = rendered(LOOP.replace("BODY", body), messages)
    assert "[system]Be short.[user]Is it raining?[assistant]Let me look." in text
    assert text.endswith("[tool]rain")


def test_a_template_that_needs_values_is_looked_at_with_them():
    template = "{% if policy is not defined %}{{ raise_exception('no policy') }}{% endif %}" + LOOP
    template = template.replace("BODY", PARTS["a loop"])
    assert rendered(template, [USER], policy="p").endswith("[user]Is it raining?")
    with pytest.raises(RequestError, match="no policy"):
        rendered(template, [USER])
    switched = "{% if shown %}" + template.split("{% endif %}", 1)[1] + "{% endif %}"
    assert rendered(switched, [USER], shown=True) == "[user]Is it raining?"


def test_a_template_that_writes_no_users_text_is_refused_by_path():
    for body in ("{{ m.text }}", "{{ m.content.parts }}", "{% for p in m.content %}{% endfor %}"):
        with pytest.raises(RequestError, match=r"^messages\[1\]\.content .*--chat-template"):
            rendered(LOOP.replace("BODY", body), [{"role": "system", "content": "x"}, USER])
    assert rendered("One prompt for all.", [USER]) == "One prompt for all."


def test_several_templates_are_looked_at_each_by_itself():
    templates = {
        "default": LOOP.replace("BODY", "{{ m.content }}"),
        "tool_use": LOOP.replace("BODY", PARTS["the first"]),
    }
    tokenizer = Tokenizer(DEMO.backend, {}, templates)
    assert tokenizer.render_chat([USER]).text == "[user]Is it raining?"
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert tokenizer.render_chat([USER], tools=tools).text == "[user]Is it raining?"


CALLS = (
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}=ARGUMENTS{% endfor %}"
)
AS_TEXT = {
    "joined": "{{ '' + c.function.arguments }}",
    "printed": "{{ c.function.arguments }}",  # of an object: Python's notation
    "by a filter": "{{ [c.function.arguments, ''] | join }}",
    "in a list": "{{ ('<' ~ c['function']['arguments'] ~ '>')[1:-1] }}",
}
AS_OBJECT = {
    "JSON": "{{ c.function.arguments | tojson }}",
    "either": "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
    "items": '{% for k, v in c.function.arguments | items %}{"{{ k }}": "{{ v }}"}{% endfor %}',
    "method": '{% for k, v in c.function.arguments.items() %}{"{{ k }}": "{{ v }}"}{% endfor %}',
}


@pytest.mark.parametrize("name", [*AS_TEXT, *AS_OBJECT])
def test_arguments_are_written_as_json_however_a_template_reads_them(name):
    body = CALLS.replace("ARGUMENTS", {**AS_TEXT, **AS_OBJECT}[name])
    for arguments in ('{"city": "Bonn"}', {"city": "Bonn"}):
        text = rendered(LOOP.replace("BODY", body), [USER, called(arguments), RESULT])
        assert text == '[user]Is it raining?[assistant]weather={"city": "Bonn"}[tool]rain'


def test_arguments_as_text_are_the_clients_own():
    template = LOOP.replace("BODY", CALLS.replace("ARGUMENTS", AS_TEXT["joined"]))
    for arguments, written in (('{"a":1,\n"b":"é"}',) * 2, ({"b": "é"}, '{"b": "é"}')):
        assert f"weather={written}[tool]" in rendered(template, [USER, called(arguments), RESULT])
    for arguments in ("", "null", None, {}):
        assert "weather={}[tool]" in rendered(template, [USER, called(arguments), RESULT])


@pytest.mark.parametrize("content", [None, "", "Let me look."])
@pytest.mark.parametrize("test", ["is none", "is not defined", "== ''"])
def test_calls_and_the_content_beside_them_arrive_whichever_a_template_asks_for(content, test):
    call = "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    body = f"{{% if m.content {test} %}}{call}{{% else %}}{{{{ '' + m.content }}}}{{% endif %}}"
    messages = [USER, called('{"city": "Bonn"}', content=content), RESULT]
    text = rendered(LOOP.replace("BODY", body), messages)
    begun = "[assistant]Let me look." if content else ""
    assert text == f'[user]Is it raining?{begun}[assistant]weather{{"city": "Bonn"}}[tool]rain'


@pytest.mark.parametrize(
    "body",
    [
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% else %}{{ m.content }}{% endif %}",
        "{% if m.tool_calls %}{{ raise_exception('one call') if m.tool_calls | length > 1 }}"
        "{{ m.tool_calls[0].function.arguments.city }}{% else %}{{ m.content }}{% endif %}",
    ],
    ids=["left out", "refused"],
)
def test_two_calls_become_two_messages_where_a_template_writes_one(body):
    body = body.replace(".city", " | tojson")
    message = called('{"city": "Bonn"}')
    second = {
        "id": "c00000001",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Turin"}'},
    }
    message["tool_calls"].append(second)
    results = [RESULT, {**RESULT, "tool_call_id": "c00000001", "content": "sun"}]
    text = rendered(LOOP.replace("BODY", body), [USER, message, *results])
    bonn, turin = '[assistant]{"city": "Bonn"}[tool]rain', '[assistant]{"city": "Turin"}[tool]sun'
    assert text == f"[user]Is it raining?{bonn}{turin}"


def test_calls_and_results_that_a_template_leaves_out_become_text():
    body = "{% if m.role != 'tool' %}{{ m.content }}{% endif %}"
    results = [RESULT, {**RESULT, "content": "wind"}]
    text = rendered(LOOP.replace("BODY", body), [USER, called('{"city": "Bönn"}'), *results])
    call = '[assistant]{"name": "weather", "arguments": {"city": "Bönn"}}'
    assert text == f"[user]Is it raining?{call}[user]rain\n\nwind"


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = ONE_SYSTEM.replace(" and not loop.first", "")
DROPS_LATER = ONE_SYSTEM.split("{% if", 1)[0] + (
    "{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
DROPS_ALL = DROPS_LATER.replace(" or loop.first", "")
LAST_WINS = (
    "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}{% endfor %}"
    "[system]{{ n.s }}{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
A, B, ANSWER = (
    {"role": "system", "content": "A"},
    {"role": "developer", "content": "B"},
    {"role": "assistant", "content": "ok"},
)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (LOOP.replace("BODY", "{{ m.content }}"), [A, USER, ANSWER, B, USER], "kept"),
        (ONE_SYSTEM, [A, USER, ANSWER, B, USER], "[system]A[user]Q[assistant]ok[user]B\n\nQ"),
        (ONE_SYSTEM, [USER, ANSWER, A, B, USER], "[user]Q[assistant]ok[user]A\n\nB\n\nQ"),
        (ONE_SYSTEM, [A, B, USER], "[system]A\n\nB[user]Q"),
        (ONE_SYSTEM, [A, USER, ANSWER, B], "[system]A\n\nB[user]Q[assistant]ok"),
        (ONE_SYSTEM, [USER, ANSWER, B], "[system]B[user]Q[assistant]ok"),
        (ONE_SYSTEM, [USER, B, ANSWER, USER], "[user]Q[assistant]ok[user]B\n\nQ"),
        (
            DROPS_LATER,
            [A, B, USER, ANSWER, B, USER],
            "[system]A\n\nB[user]Q[assistant]ok[user]B\n\nQ",
        ),
        (DROPS_ALL, [A, USER, ANSWER, B, USER], "[user]A\n\nQ[assistant]ok[user]B\n\nQ"),
        (DROPS_ALL, [USER, ANSWER, B], "[user]B\n\nQ[assistant]ok"),
        (LAST_WINS, [A, B, USER], "[system]A\n\nB[user]Q"),
        (LAST_WINS, [A, USER, B, USER], "[system]A[user]Q[user]B\n\nQ"),
        (NO_SYSTEM, [USER, ANSWER, B, USER], "[user]Q[assistant]ok[user]B\n\nQ"),
        (NO_SYSTEM, [USER, ANSWER, B], "[user]B\n\nQ[assistant]ok"),
    ],
)
def test_a_system_message_goes_where_the_template_takes_it(template, messages, text):
    kept = "[system]A[user]Q[assistant]ok[system]B[user]Q"
    expected = kept if text == "kept" else text
    assert rendered(template, messages) == expected.replace("Q", USER["content"])


def in_chat(texts):
    return {"messages": [{"role": role, "content": text} for role, text in texts]}


def in_responses(texts):
    return {"input": [{"role": role, "content": text} for role, text in texts]}


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, in_chat),
        (parse_responses, in_responses),
        (parse_messages, lambda texts: {**in_chat(texts), "max_tokens": 2}),
    ],
    ids=["chat", "responses", "messages"],
)
def test_every_api_takes_a_system_message_within_the_conversation(parse, body):
    texts = [("system", "A"), ("user", "Q"), ("assistant", "ok"), ("system", "B"), ("user", "R")]
    conversation = parse(body(texts), SERVED, LIMITS).work[0].prompt
    text = rendered(ONE_SYSTEM, conversation.messages)
    assert text == "[system]A[user]Q[assistant]ok[user]B\n\nR"


def test_what_the_publisher_refuses_is_refused_in_the_templates_words():
    with pytest.raises(RequestError, match="must be at the beginning"):
        rendered(NO_SYSTEM, [A, USER])


def test_json_of_messages_comes_back_the_same():
    """A conversation is read where it arrives and once more where it is rendered."""
    template = LOOP.replace("BODY", CALLS.replace("ARGUMENTS", AS_TEXT["joined"]))
    messages = [USER, called('{"a":1}'), called(""), RESULT, {"role": "assistant", "refusal": "no"}]
    once = read_messages(messages)
    assert read_messages(json.loads(json.dumps(once))) == once
    assert rendered(template, once) == rendered(template, messages)


def test_the_answer_that_a_template_judges_may_be_the_last_message():
    judge = (
        "{% if messages[-1].role == 'user' %}U: {{ messages[-1].content[0].text }}{% else %}"
        "U: {{ messages[-2].content[0].text }} A: {{ messages[-1].content[0].text }}{% endif %}"
    )
    answer = {"role": "assistant", "content": "Heavily."}
    assert rendered(judge, [USER, answer]) == "U: Is it raining? A: Heavily."
    assert rendered(judge, [USER]) == "U: Is it raining?"
