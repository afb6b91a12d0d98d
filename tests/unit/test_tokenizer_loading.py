"""What `Tokenizer.load` takes from the files of a folder beside the pipeline of tokenizer.json."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from tests.refusals import assert_names
from tokenizers import Tokenizer as Built
from tokenizers import decoders, models, pre_tokenizers, processors

from freight.errors import CheckpointError, RequestError
from freight.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


def write(folder, **files):
    """A byte-level tokenizer without merges, <s> and </s> at 256 and 257; other files by their
    names' stems.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Built(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    built.pre_tokenizer, built.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    built.add_special_tokens(["<s>", "</s>"])
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    built.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_tokens_that_only_tokenizer_config_declares_are_added(tmp_path):
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    declared = {
        "256": {"content": "<s>", "special": True, **flags},
        "259": {"content": "<tool>", "special": False, **flags},
        "258": {"content": "<|eot|>", "special": True, **flags},
    }
    config = {
        "added_tokens_decoder": declared,
        "eos_token": "<|eot|>",
        "extra_special_tokens": ["<|x|>"],
    }
    tokenizer = Tokenizer.load(
        write(tmp_path, tokenizer_config=config, special_tokens_map={"eos_token": "</s>"})
    )
    assert tokenizer.encode("<|eot|><tool><|x|>", False) == [258, 259, 260]
    assert tokenizer.special_token_ids == {256, 257, 258, 260}
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.vocab_size) == (
        258,
        None,
        261,
    )
    assert tokenizer.decode([258, 259, 260]) == "<tool>"


def test_tokens_of_the_older_files_are_added(tmp_path):
    names = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|eot|>", "lstrip": False},
        "pad_token": "<pad>",
    }
    folder = write(tmp_path, special_tokens_map=names, added_tokens={"<b>": 259, "<|eot|>": 258})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("<b><|eot|><pad>", False) == [259, 258, 260]
    assert tokenizer.special_token_ids == {256, 257, 258, 260}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 258)


@pytest.mark.parametrize("said", [True, False])
def test_the_post_processor_decides_about_bos_and_eos(tmp_path, caplog, said):
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": said,
        "add_eos_token": not said,
    }
    with caplog.at_level(logging.INFO, "freight"):
        assert Tokenizer.load(write(tmp_path, tokenizer_config=config)).encode("") == [256]
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (0 if said else 2)
    if not said:
        assert_names(warned[0], "add_bos_token false", "tokenizer.json adds <s>")
        assert_names(warned[1], "add_eos_token true", "tokenizer.json adds none")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {
                "tokenizer_config.json": {"chat_template": "config"},
                "chat_template.json": {"chat_template": "x"},
            },
            "config",
        ),
        ({"chat_template.json": {"chat_template": "json"}}, "json"),
        (
            {"tokenizer_config.json": {"chat_template": "config"}, "chat_template.jinja": "jinja"},
            "jinja",
        ),
        (
            {
                "chat_template.jinja": "{{ bos_token }}jinja",
                "tokenizer_config.json": {"bos_token": "<s>"},
            },
            "<s>jinja",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "default", "template": "named"}]
                }
            },
            "named",
        ),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}, "d"),
    ],
)
def test_a_chat_template_is_found_where_it_may_be(tmp_path, files, text):
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tokenizer = Tokenizer.load(write(tmp_path))
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.apply_chat_template(USER), skip_special_tokens=False) == text
    if text == "d":
        assert tokenizer.decode(tokenizer.apply_chat_template(USER, tools=[{"name": "f"}])) == "t"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no robots') }}", "refuses these messages: no robots"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.__class__.x }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a'.index('b') }}", "substring not found"),
        ("{{ [].pop() }}", "SecurityError|unsafe|IndexError"),
        ("{{ namespace(a=1).b.c }}", "no attribute"),
        ("{{ messages | attr(1) }}", "TypeError|AttributeError"),
        ("{% if %}", "Expected an expression"),
        ("{{ '%d' % 'x' }}", "TypeError"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(tmp_path, template, words):
    tokenizer = Tokenizer.load(write(tmp_path, tokenizer_config={"chat_template": template}))
    with pytest.raises(RequestError, match=words):
        tokenizer.apply_chat_template(USER)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize(
    "content", ["", '{"version": "1.0"', "[" * 200_000, "[]", "null", "\x00", None]
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=rf"{name}.*skip_tokenizer_init=True"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": 5},
        {"bos_token": {"text": "<s>"}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": ["a"]},
        {"added_tokens_decoder": {"7": "a"}},
        {"extra_special_tokens": [5]},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
    ],
    ids=json.dumps,
)
def test_a_malformed_tokenizer_config_is_refused(tmp_path, config):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.load(write(tmp_path, tokenizer_config=config))


def test_a_folder_without_tokenizer_json_is_converted_and_a_line_says_so(tmp_path, caplog):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "chat_template": "ab"}'
    )
    with caplog.at_level(logging.INFO, "freight"):
        tokenizer = Tokenizer.load(tmp_path)
    (record,) = caplog.records
    assert_names(record.getMessage(), str(tmp_path), "tokenizer.json", "transformers")
    assert tokenizer.encode("ab") == tokenizer.apply_chat_template(USER) == [256]
    assert tokenizer.eos_token_id == 257
    assert tokenizer.decode([256, 257]) == "ab"


def test_the_text_of_a_single_token(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    assert all(
        tokenizer.token_text(token) == tokenizer.decode([token], False)
        for token in [*range(260), *range(260)]
    )
    assert tokenizer.token_text(257) == "</s>"
    assert tokenizer.token_text(2**40) == tokenizer.decode([2**40]) == ""
    with pytest.raises(RequestError, match="token id -1 is negative"):
        tokenizer.token_text(-1)


def test_a_tokenizer_json_needs_no_transformers(tmp_path):
    check = (
        "import sys; from freight.text.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1]); t.decode(t.encode('a'));"
        "assert t.has_chat_template; sys.exit('transformers' in sys.modules)"
    )
    folder = write(tmp_path, tokenizer_config={"chat_template": "x"})
    assert subprocess.run([sys.executable, "-c", check, str(folder)], check=False).returncode == 0


def test_a_text_that_has_no_tokens_is_refused(tmp_path):
    built = Built(models.WordLevel({"b": 0}, unk_token="<unk>"))
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "b", "add_bos_token": true}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("b") == [0]
    with pytest.raises(RequestError, match="no tokens for 'a'"):
        tokenizer.encode("a")
