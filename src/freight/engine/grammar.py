"""StructuredOutputs -> grammars, and which tokens they permit next. The only module that imports
llguidance.

- A grammar is compiled once and kept (the 256 used last); each completion has a Matcher of its own.
- Compilation recurses as deep as a grammar is nested, and ends the process where the stack of a
  thread is too small: it runs on a thread with 512 MiB. Masks need no more than any thread has. The
  first mask is part of compiling, because some grammars fail only there.
- A JSON text has at most 16 blanks or line ends in a row, or a model could go on writing them.
- Compiling, and each mask, end in under a second: limits on the work stop what would not
  (`a{4000}{4000}`).
- Errors are in our words. llguidance's own may show what a grammar has read so far, and name no
  field.
- A Matcher takes in every output token once, whatever interrupts it, and a failure in it stays
  there.

Nothing is imported or built before the first grammar. Imports no torch.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from freight.base.json_schema import Json, enforceable
from freight.errors import RequestError
from freight.structured import CANNOT_GO_ON, StructuredOutputs
from freight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

KEPT = 256  # compiled grammars
STACK = 512 << 20  # bytes, of the thread that compiles
WHITESPACE = r"[ \n]{0,16}"  # between the parts of a JSON text

# llguidance's measure of work: a quarter of its default, with which 7 s were possible
COMPILE_FUEL = 200_000
MASK_FUEL = 50_000  # for each token; a quarter of the default, with which 0.3 s were possible

_ONE_STACK = threading.Lock()  # threading.stack_size is a setting of the process


class Matcher:
    """How far the output of one completion has come in its grammar.

    Every method takes all output tokens so far, and first takes in those that it has not seen.
    `error` says why the completion cannot go on; it is None while it can, and stays once it is set.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        """`start` is a compiled grammar at its beginning; it is copied, and never changed."""
        self._start = start
        # the grammar, and the output tokens that it has taken in
        self._state: tuple[LLMatcher, int] | None = None
        self._vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids
        self.error: str | None = None

    def fork(self) -> Matcher:
        """Return a matcher that goes on from here on its own."""
        other = Matcher(self._start, self._vocab_size, self.stop_token_ids)
        if self._state is not None:
            grammar, num_taken = self._state
            other._state = (grammar.deep_copy(), num_taken)
        other.error = self.error
        return other

    def ended(self, output: Sequence[int]) -> bool:
        """Return whether the text is complete, and nothing but the end can follow."""
        grammar = self._catch_up(output)
        return grammar is not None and bool(grammar.is_stopped())

    def permitted(
        self,
        output: Sequence[int],
        barred: Collection[int] = (),
        allowed_ids: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.bool_] | None:
        """bool [vocab_size]: tokens that may come next; None, with `error` set, if they are not
        known.

        allowed_ids: bool [vocab_size], those that other parameters leave; None: all. The ids in `barred`
        are left out, unless no other may come.
        """
        grammar = self._catch_up(output)
        if grammar is None:
            return None
        try:
            bits = grammar.compute_bitmask()
        except Exception as error:
            self._fail(str(error))
            return None
        if grammar.is_error():
            self._fail(grammar.get_error())
            return None
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[
            : self._vocab_size
        ].astype(np.bool_)
        if allowed_ids is not None:
            allowed &= allowed_ids
        if barred:
            without_barred = allowed.copy()
            without_barred[[token for token in barred if token < self._vocab_size]] = False
            if without_barred.any():
                return without_barred
        return allowed

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Return tokens of the text that has to come next, as the tokenizer writes it; () if any may.

        Other tokens of the same text are permitted as well.
        """
        grammar = self._catch_up(output)
        if grammar is None:
            return ()
        try:
            tokens = grammar.compute_ff_tokens()
        except Exception:  # `permitted` says what is wrong, if it matters
            return ()
        known = takewhile(lambda token: token < self._vocab_size, tokens)
        return tuple(known)

    def _catch_up(self, output: Sequence[int]) -> LLMatcher | None:
        """Return the grammar after `output`; None when there is an error."""
        if self.error is not None:
            return None
        try:
            grammar, num_taken = self._state or (self._start.deep_copy(), 0)
            if num_taken < len(output):
                # until the last line: an exception in between makes the next call begin anew
                self._state = None
                for token in output[num_taken:]:
                    if not grammar.consume_token(token):
                        self._fail(grammar.get_error())
                        return None
            self._state = (grammar, len(output))
        except Exception as error:
            self._fail(str(error))
            return None
        return grammar

    def _fail(self, why: str) -> None:
        self.error = f"{CANNOT_GO_ON}: {_in_our_words(why)}"


class Grammars:
    """The grammars of one model. May be used from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]
    ) -> None:
        """vocab_size: of the logits. stop_token_ids: the model's own, any of which ends a text."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_token_ids = frozenset(
            token for token in stop_token_ids if 0 <= token < vocab_size
        )
        self._lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def check(self, outputs: StructuredOutputs) -> None:
        """Compile `outputs`, or do nothing where it is kept. Raises RequestError for what cannot
        be.
        """
        self._compile(outputs)

    def matcher(self, outputs: StructuredOutputs) -> Matcher:
        """Return a Matcher for a completion that has no token yet. Raises RequestError like
        `check`.
        """
        return Matcher(self._compile(outputs), self._vocab_size, self._stop_token_ids)

    def _compile(self, outputs: StructuredOutputs) -> LLMatcher:
        key = outputs.key()
        with self._lock:
            if key not in self._compiled:
                if self._ll_tokenizer is None:
                    self._ll_tokenizer = _ll_tokenizer(
                        self._tokenizer, self._vocab_size, self._stop_token_ids
                    )
                self._compiled[key] = _compiled(self._ll_tokenizer, *key)
            self._compiled.move_to_end(key)
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[key]


def grammar_checker(
    tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Collection[int]
) -> Callable[[Mapping[str, Json]], None]:
    """Return a function that tries grammars, mappings of the fields of StructuredOutputs, and
    raises RequestError for one that fails.
    """
    grammars = Grammars(tokenizer, vocab_size, stop_token_ids)

    def check(outputs: Mapping[str, Json]) -> None:
        grammars.check(StructuredOutputs.of(outputs))

    return check


class _Vocabulary:
    """A tokenizer as llguidance's TokenizerWrapper reads it, which tries bytes first: `encode`
    refuses them.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end: int) -> None:
        pieces = tokenizer.pieces(skip_special_tokens=False)
        if pieces is None:
            raise RequestError(
                "structured_outputs needs the text of single tokens, and this model's tokenizer decodes tokens together"
            )
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [b""] * max(vocab_size, end + 1)
        for token in range(min(vocab_size, tokenizer.vocab_size)):
            string = tokenizer.token_string(token, skip_special_tokens=False)
            piece = b"" if string is None else pieces.decoder.piece(string)
            data = piece.encode() if isinstance(piece, str) else piece
            # never in a text; a mark to llguidance
            self.tokens[token] = b"" if data.startswith(b"\xff") else data
        self.special_token_ids = sorted(
            token for token in tokenizer.special_token_ids if token < vocab_size
        )
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _ll_tokenizer(
    tokenizer: Tokenizer, vocab_size: int, stop_token_ids: frozenset[int]
) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    # A model without stop ids gets one behind its vocabulary, which is never drawn.
    ends = sorted(stop_token_ids) or [vocab_size]
    vocabulary = _Vocabulary(tokenizer, vocab_size, ends[0])
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=ends)


def _compiled(ll_tokenizer: LLTokenizer, form: str, text: str) -> LLMatcher:
    """Return a grammar at its beginning. Raises RequestError."""
    from llguidance import LLMatcher, LLParserLimits

    def compile_() -> LLMatcher:
        # verbose_errors: messages would show the grammar and what was read
        limits = LLParserLimits(
            verbose_errors=False, initial_lexer_fuel=COMPILE_FUEL, step_lexer_fuel=MASK_FUEL
        )
        grammar = LLMatcher(
            ll_tokenizer, _source(LLMatcher, form, text), log_level=0, limits=limits
        )
        if not grammar.is_error():
            grammar.compute_bitmask()
        return grammar

    try:
        grammar = _on_large_stack(compile_)
    except Exception as error:
        raise RequestError(
            f"structured_outputs.{form} cannot be compiled: {_in_our_words(str(error))}"
        ) from error
    if grammar.is_error():
        raise RequestError(
            f"structured_outputs.{form} cannot be compiled: {_in_our_words(grammar.get_error())}"
        )
    return grammar


def _source(make: type[LLMatcher], form: str, text: str) -> str:
    """Return what the compiler reads."""
    if form == "parts":
        main, parts = json.loads(text)
        named = [_named(name, _source(make, *part)) for name, *part in parts]
        return json.dumps({"grammars": [_named("main", main), *named]})
    if form == "regex":
        return str(make.grammar_from_regex(text))
    if form == "grammar":
        return str(make.grammar_from_lark(text))
    if form == "choice":
        # llguidance's Lark takes JSON's strings, but U+007F as an escape only
        alternatives = (
            json.dumps(entry, ensure_ascii=False).replace("\x7f", "\\u007f")
            for entry in json.loads(text)
        )
        return str(make.grammar_from_lark(f"start: {' | '.join(alternatives)}"))
    schema = '{"type":"object"}'
    if form == "json":  # a format that the compiler does not know is an annotation, and no fault
        schema = json.dumps(enforceable(json.loads(text), constraints=False)[0], ensure_ascii=False)
    return str(make.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))


def _named(name: str, source: str) -> dict[str, Json]:
    """Return a source as one grammar among several."""
    if source.startswith('{"grammars"'):
        return {**json.loads(source)["grammars"][0], "name": name}
    return {"name": name, "lark_grammar": source}


def _on_large_stack(function: Callable[[], T]) -> T:
    """Return the result of `function`, called on a thread with STACK bytes; raises what it raises."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # a panic of the compiler is no Exception
            failure.append(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _ONE_STACK:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise RuntimeError(f"the compiler failed: {failure[0]}") from failure[0]
    return result[0]


def _in_our_words(message: str) -> str:
    """Return a short reason without llguidance's own state, notation or names of options."""
    keywords = re.search(r"Unimplemented keys: \[(.*?)\]", message)
    if keywords:
        names = keywords[1].replace('"', "")
        return f"JSON Schema's {names} is not supported; leave it out, as StructuredOutputs.enforceable does"
    if "oneOf constraints are not supported" in message:
        return "JSON Schema's oneOf is not supported where two branches may both match; use anyOf"
    if "NoExtension" in message:
        return "no text of the model's tokens satisfies it"
    if "lookaround" in message:
        return "look-around and word boundaries are not supported"
    if "Resource" in message:
        return "a $ref must be within its schema; nothing is ever fetched"
    for known in ("TooComplex", "too many", "too large", "too big", "fuel", "limit"):
        if known in message:
            return "it is too large or too ambiguous; make repetitions, alternatives or rules fewer"
    if "panic" in message or "failed:" in message:
        return "the compiler of grammars failed on it; make it simpler"
    reason = re.search(r"^error: (.*)$", message, re.MULTILINE)
    if reason:
        first = reason[1]
    else:
        first = (message.splitlines() or ["no reason is known"])[0].split("; following")[0]
    return first.replace("<non-verbose/>", "").strip()[:200]
