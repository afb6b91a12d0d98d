"""Grammars and Matchers: what compiles, what is refused in which words and how soon, and which
tokens are permitted.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.clock import takes_less
from tests.refusals import assert_names, refuses
from tests.shares import examples
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Built

from freight import RequestError, StructuredOutputs
from freight.engine import grammar as module
from freight.engine.grammar import Grammars, Matcher, grammar_checker
from freight.text.tokenizer import Tokenizer

DEMO = Path(module.__file__).parents[1] / "demo"
END = 1


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def grammars(demo: Tokenizer) -> Grammars:
    return Grammars(demo, demo.vocab_size, [END])


def sentencepiece(decoder: Any) -> Tokenizer:
    """Words begin with ▁, and other text is bytes; two tokens are named, and one of them is
    special.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {
        piece: index
        for index, piece in enumerate([*pieces, "▁", "▁the", "a", "é", "<think>", "▁{"])
    }
    built = Built(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    built.decoder = decoder
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    built.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(built)


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def follow(matcher: Matcher, ids: list[int]) -> bool:
    """Whether every token of `ids` is permitted where it stands, and the end after the last."""
    for position, token in enumerate([*ids, END]):
        permitted = matcher.permitted(ids[:position])
        if permitted is None or not permitted[token]:
            return False
    return True


def test_byte_level_tokens_have_their_bytes(demo: Tokenizer):
    vocabulary = module._Vocabulary(demo, demo.vocab_size + 3, END)
    ids = demo.encode("Zoë\tsaid: {'a': 1}\r\n你好😀", add_special_tokens=False)
    assert b"".join(vocabulary.tokens[token] for token in ids).decode() == demo.decode(ids)
    assert vocabulary.tokens[demo.vocab_size :] == [b""] * 3
    assert vocabulary.special_token_ids == sorted(demo.special_token_ids)


@pytest.mark.parametrize(
    "decoder", [LLAMA, GEMMA, decoders.Metaspace()], ids=["llama", "gemma", "metaspace"]
)
def test_sentencepiece_tokens_have_their_bytes(decoder: Any):
    tokenizer = sentencepiece(decoder)
    vocabulary = module._Vocabulary(tokenizer, tokenizer.vocab_size, 2)
    expected = {"▁": b" ", "▁the": b" the", "a": b"a", "é": "é".encode(), "<think>": b"<think>"}
    if decoder is not LLAMA and decoder is not GEMMA:
        expected |= {"<0x0A>": b"<0x0A>"}
    else:
        expected |= {"<0x0A>": b"\n", "<0xC3>": b"\xc3", "<0xFF>": b""}
    assert {
        name: vocabulary.tokens[tokenizer.backend.token_to_id(name)] for name in expected
    } == expected


def test_every_token_of_the_same_bytes_is_permitted():
    tokenizer = sentencepiece(LLAMA)
    matcher = Grammars(tokenizer, tokenizer.vocab_size + 5, [2]).matcher(
        StructuredOutputs(regex=" the é?|a")
    )
    permitted = matcher.permitted([])
    assert permitted is not None
    assert permitted.shape == (tokenizer.vocab_size + 5,)
    of = tokenizer.backend.token_to_id
    assert set(permitted.nonzero()[0]) == {of("▁"), of("▁the"), of("a"), of("<0x20>"), of("<0x61>")}


def test_tokens_that_have_no_text_of_their_own_are_refused():
    built = Built(models.BPE({"a": 0, "b": 1}, []))
    built.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="decodes tokens together"):
        grammar_checker(Tokenizer(built), 2, [0])({"regex": "a"})


def test_a_model_without_stop_ids_or_with_fewer_rows_than_tokens(demo: Tokenizer):
    for vocab_size, stops in ((demo.vocab_size, []), (3000, [1]), (5000, [1, 4999, 7000])):
        matcher = Grammars(demo, vocab_size, stops).matcher(StructuredOutputs(regex="a*"))
        permitted = matcher.permitted([])
        assert permitted is not None
        assert permitted.shape == (vocab_size,)
        ends = {token for token in range(vocab_size) if permitted[token]} & {0, 1, 4998, 4999}
        assert ends == {token for token in stops if token < vocab_size}


# Behind a control character the tokenizer splits text that llguidance writes as one forced token
TEXTS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('"\\/\n ab'),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(40))
@given(choice=st.lists(TEXTS, min_size=1, max_size=5), other=TEXTS)
@example(choice=["\x7f", "a\x7fb"], other="\x7fb")
def test_exactly_the_choices_are_permitted(
    demo: Tokenizer, grammars: Grammars, choice: list[str], other: str
):
    for text in (*choice, other):
        ids = demo.encode(text, add_special_tokens=False)
        matcher = grammars.matcher(StructuredOutputs(choice=choice))
        assert follow(matcher, ids) == (text in choice)
        longer = any(entry != text and entry.startswith(text) for entry in choice)
        assert matcher.error is not None or matcher.ended(ids) == (text in choice and not longer)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a":1,"b":[]}', True),
        ('{\n  "a": 1,\n  "b": [\n    true\n  ]\n}', True),
        ('{"a":' + " " * 16 + '1,"b":[]}', True),
        ('{"a":' + " " * 50 + '1,"b":[]}', False),
        ('{"a":' + "\n" * 17 + '1,"b":[]}', False),
        ('{"b":[],"a":1}', False),
        ('{"a":1}', False),
    ],
)
def test_blanks_in_json_are_bounded(demo: Tokenizer, grammars: Grammars, text: str, good: bool):
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    assert (
        follow(grammars.matcher(StructuredOutputs(json=schema)), list(demo.encode(text, False)))
        == good
    )


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (
            {"json": {"type": "object", "not": {}, "uniqueItems": True}},
            "json .*not, uniqueItems is not supported",
        ),
        ({"json": {"type": "frog"}}, "Invalid type: frog"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf .* use anyOf"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "(?<=a)b"}}, "look-around"),
        (
            {
                "json": {
                    "$ref": "#/$defs/a",
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                }
            },
            "no text .* satisfies",
        ),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": r"\bab"}, "word boundaries"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "[a&&b]"}, "no text .* satisfies"),
        ({"regex": "(" * 2000 + ")" * 2000}, "nested"),
        ({"regex": "((.{1,1000}){1,1000}){1,1000}"}, "too large"),
        ({"grammar": "start: x"}, "unknown name"),
        ({"grammar": 'x: "a"'}, "no start rule"),
        ({"grammar": "start: start"}, "no text .* satisfies"),
        ({"grammar": "start: " + "(" * 7000 + '"a"' + ")" * 7000}, "nested"),
        ({"grammar": 'start: %json {"$ref": "https://example.com"}'}, "nothing is ever fetched"),
        ({"grammar": '%import "/etc/passwd"\nstart: "a"'}, "grammar cannot be compiled"),
    ],
)
def test_what_does_not_compile_is_refused_in_our_words(
    grammars: Grammars, outputs: dict[str, Any], says: str
):
    with pytest.raises(RequestError, match=says) as caught:
        grammars.check(StructuredOutputs.of(outputs))
    message = str(caught.value)
    assert message.startswith(f"structured_outputs.{next(iter(outputs))} cannot be compiled: ")
    assert len(message) < 300
    assert "<non-verbose" not in message
    assert "\n" not in message


def test_a_failure_of_the_compiler_itself_is_refused(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    def panic(*_: object) -> str:
        raise BaseException("panicked at /build/src/lib.rs:1")

    monkeypatch.setattr(module, "_source", panic)
    with refuses(RequestError, "compiler of grammars") as caught:
        grammar_checker(demo, demo.vocab_size, [END])({"regex": "a"})
    assert "/build" not in str(caught.value)


DANGEROUS = """
import sys, time
from freight import RequestError
from freight.engine.grammar import Grammars
from freight.engine import grammar
from freight.structured import StructuredOutputs
from freight.text.tokenizer import Tokenizer

tokenizer = Tokenizer.load(sys.argv[1])
grammars = Grammars(tokenizer, tokenizer.vocab_size, [1])
grammars.check(StructuredOutputs(regex="a"))
chain = {f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1100)}
rules = "\\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(2998)), 'a2998: "x"'])
import json
raw = [  # what StructuredOutputs refuses, given to the compiler as it is
    ("json", json.dumps({"$ref": "#/$defs/a0", "$defs": chain | {"a1100": {"type": "null"}}})),
    ("grammar", rules),
    ("grammar", "start: " + "(" * 60000),
    ("regex", "(" * 60000),
]
for form, text in raw:
    try:
        grammar._compiled(grammars._ll_tokenizer, form, text)
    except RequestError:
        pass
for given in (
    {"json": chain}, {"grammar": rules}, {"grammar": "start: " + "(" * 16000}, {"regex": "(" * 4000},
    {"regex": "(a+)+b"}, {"regex": "(.{1,1000}){1,1000}"}, {"regex": "a{4000}{4000}{4000}"},
    {"json": {"type": "string", "minLength": 10**9}}, {"json": {"type": "array", "minItems": 10**9}},
    {"grammar": 'start: "a" start'}, {"grammar": 'start: start start | "a"'},
):
    begun = time.process_time()
    try:
        grammars.matcher(StructuredOutputs.of(given)).permitted([])
    except RequestError:
        pass
    assert time.process_time() - begun < 1.5, given
print("alive")
"""


def test_grammars_that_end_other_processes_end_none():
    answer = subprocess.run(
        [sys.executable, "-c", DANGEROUS, str(DEMO)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (answer.returncode, answer.stdout) == (0, "alive\n"), answer.stderr


def test_the_stack_size_of_other_threads_stays(demo: Tokenizer):
    before = threading.stack_size()
    grammar_checker(demo, demo.vocab_size, [END])({"regex": "a"})
    with pytest.raises(RequestError):
        grammar_checker(demo, demo.vocab_size, [END])({"regex": "("})
    assert threading.stack_size() == before


def test_the_grammars_used_last_are_kept(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []

    class Compiled:
        def deep_copy(self) -> Compiled:
            return self

    def compile_(tokenizer: object, form: str, text: str) -> Compiled:
        compiled.append(text)
        return Compiled()

    monkeypatch.setattr(module, "_compiled", compile_)
    grammars = Grammars(demo, demo.vocab_size, [END])
    for i in range(300):
        grammars.check(StructuredOutputs(regex=f"a{i}"))
        grammars.check(StructuredOutputs(regex="a0"))
    assert compiled == [f"a{i}" for i in range(300)]
    assert len(grammars._compiled) == module.KEPT == 256
    grammars.check(StructuredOutputs(regex="a299"))
    assert len(compiled) == 300
    grammars.check(StructuredOutputs(regex="a1"))
    assert compiled[300:] == ["a1"]


def test_several_threads_share_grammars(demo: Tokenizer):
    grammars = Grammars(demo, demo.vocab_size, [END])
    counts: list[int] = []

    def work(number: int) -> None:
        for i in range(5):
            permitted = grammars.matcher(
                StructuredOutputs(choice=["a", f"b{(number + i) % 3}"])
            ).permitted([])
            assert permitted is not None
            counts.append(int(permitted.sum()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 20


class Interrupted(BaseException):
    pass


class Recorder:
    """A grammar that notes what it consumes, and is interrupted before or after the tokens in `at`."""

    def __init__(self, at: list[tuple[int, bool]]) -> None:
        self.at = at
        self.seen: list[int] = []

    def deep_copy(self) -> Recorder:
        return Recorder(self.at)

    def consume_token(self, token: int) -> bool:
        for after in (False, True):
            if (token, after) in self.at:
                self.at.remove((token, after))
                self.seen += [token] * after
                raise Interrupted
        self.seen.append(token)
        return True

    def is_stopped(self) -> bool:
        return False


@given(
    steps=st.lists(st.integers(1, 3), max_size=6),
    at=st.lists(st.tuples(st.integers(0, 17), st.booleans())),
)
def test_every_token_is_taken_in_once_whatever_interrupts(
    steps: list[int], at: list[tuple[int, bool]]
):
    matcher, output = Matcher(Recorder(at), 20, frozenset()), list[int]()
    for step in steps:
        output += range(len(output), len(output) + step)
        while True:
            try:
                matcher.ended(output)
                break
            except Interrupted:
                pass
        assert matcher._state is not None
        assert matcher._state[0].seen == output


def test_a_matcher_that_fails_says_so_and_stays_so(grammars: Grammars, demo: Tokenizer):
    matcher = grammars.matcher(StructuredOutputs(choice=["ab"]))
    wrong = demo.encode("zz", add_special_tokens=False)
    assert matcher.permitted(wrong) is None
    assert matcher.error is not None
    assert matcher.error.startswith("its structured output cannot go on: ")
    assert not matcher.ended([])
    sibling = grammars.matcher(StructuredOutputs(choice=["ab"]))
    assert follow(sibling, demo.encode("ab", add_special_tokens=False))


def test_a_python_error_of_the_matcher_stays_in_it():
    class Broken(Recorder):
        def deep_copy(self) -> Broken:
            raise ValueError("no copy")

    matcher = Matcher(Broken([]), 20, frozenset())
    assert matcher.permitted([]) is None
    assert_names(matcher.error or "", "structured output", "no copy")


def test_a_fork_of_a_matcher_goes_on_alone(grammars: Grammars, demo: Tokenizer):
    matcher = grammars.matcher(StructuredOutputs(regex="ab|ac|xyz"))
    a, x = (demo.encode(text, add_special_tokens=False)[0] for text in "ax")
    for output in ([], [a]):
        before = matcher.permitted(output)
        fork, other = matcher.fork(), matcher.fork()
        first = int(np.flatnonzero(before)[0])
        fork.permitted([*output, first])
        assert (other.permitted(output) == before).all()
        assert (matcher.permitted(output) == before).all()
    assert matcher.permitted([a, x]) is None
    assert matcher.fork().error == matcher.error is not None


def test_what_is_forced_is_the_text_that_has_to_come_next(grammars: Grammars, demo: Tokenizer):
    """In tokens that are permitted one after the other; nothing where there is a choice."""
    matcher = grammars.matcher(StructuredOutputs(regex="class Queue(Base|Case):"))
    forced = list(matcher.forced([]))
    assert "class Queue".startswith(demo.decode(forced))
    assert len(forced) >= 2
    for index, token in enumerate(forced):
        permitted = matcher.permitted(forced[:index])
        assert permitted is not None
        assert permitted[token]
    assert grammars.matcher(StructuredOutputs(regex="[a-z]+")).forced([]) == ()
    assert matcher.forced([*forced, 3]) == ()  # it cannot go on


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(ab){12}|(abab){2}c[0-9]{3}"},
        {"choice": ["import os", "import sys", "from typing import Any"]},
        {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
        {"json": {"enum": ["a long answer", "a long answer that goes on"]}},
        {"grammar": 'start: "def " NAME "(self):" END\nNAME: /[a-z]+/\nEND: "\\n    pass\\n"'},
    ],
)  # fmt: skip
def test_what_is_asked_for_as_forced_changes_no_mask_and_no_end(
    grammars: Grammars, form: dict[str, Any]
):
    """Of a matcher that is asked at every token, and of its forks, on random ways through."""
    rng = Random(3)
    for _ in range(12):
        plain, asked = (grammars.matcher(StructuredOutputs(**form)) for _ in range(2))
        output: list[int] = []
        for _ in range(40):
            forced = asked.forced(output)
            masks = [one.permitted(output) for one in (plain, asked, asked.fork())]
            assert masks[0] is not None
            assert all(mask is not None and (mask == masks[0]).all() for mask in masks)
            if forced:
                assert masks[0][forced[0]]
            likely = forced[:1] if rng.random() < 0.5 else ()
            output.append(rng.choice(likely or np.flatnonzero(masks[0]).tolist()))
            assert asked.ended(output) == plain.ended(output)
            if plain.ended(output) or output[-1] == END:
                break


def test_barred_ids_come_when_no_others_may(grammars: Grammars, demo: Tokenizer):
    def ids(output: list[int], barred: list[int]) -> set[int]:
        permitted = grammars.matcher(StructuredOutputs(choice=["a", "ab"])).permitted(
            output, barred
        )
        assert permitted is not None
        return set(permitted.nonzero()[0].tolist())

    one, both = (demo.encode(text, add_special_tokens=False) for text in ("a", "ab"))
    assert len(ids(one, [])) > 1
    assert ids(one, [END, 10**6]) == ids(one, []) - {END}
    assert ids(both, [END]) == ids(both, []) == {END}


def test_a_mask_takes_less_than_a_step(grammars: Grammars, demo: Tokenizer):
    matcher = grammars.matcher(StructuredOutputs(json=True))

    def hundred_masks() -> None:
        for _ in range(100):
            matcher.permitted([])

    assert takes_less(0.5, hundred_masks)
