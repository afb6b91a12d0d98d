"""Families of models and their markup for tool calls and reasoning, as data.

A family is recognized by words in its chat template, or chosen by the parser names of other
servers. Forms with tagged arguments and with lists are here; those with JSON after a name are in
`serve/answers/response_templates.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freight.base.fields import JsonDict
from freight.errors import ConfigError, choices, nearest
from freight.serve.answers.gemma_calls import GemmaValues
from freight.serve.answers.listed_calls import ListedCalls
from freight.serve.answers.response_templates import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MISTRAL_ARGS,
    MISTRAL_LIST,
    CallForm,
)
from freight.serve.answers.tagged_calls import Tagged
from freight.text.thinking import (
    THINK,
    THINK_GEMMA4,
    THINK_GRANITE,
    THINK_HY3,
    THINK_MISTRAL,
    THINK_SEED,
    Tags,
)


def _region(opening: str, closing: str | None) -> JsonDict:
    """Build the entry of a response template for regions that a syntax reads, from two patterns."""
    ends = {} if closing is None else {"close_pattern": closing}
    return {"open_pattern": opening, **ends, "repeats": True, "content": "text"}


def _tagged(syntax: Tagged, region: JsonDict, **fields: Any) -> CallForm:
    """Build a form of calls with tagged arguments."""
    section = (fields.get("opening", "").strip(), fields.get("section_end", ""))
    syntax = replace(syntax, section=section)
    form: JsonDict = {
        "before_name": syntax.head[0],
        "before_arguments": syntax.head[1],
        "after_arguments": syntax.tail,
        **fields,
    }
    return CallForm(field=region, syntax=syntax, quoted=False, **form)


_GLM_MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
_GLM_REGION = _region(r"<tool_call>(?=\s{0,8}[^\s{<])", r"</tool_call>")
_GLM = Tagged(
    ("<tool_call>", ""),
    "</tool_call>",
    ("<arg_key>", "</arg_key>"),
    ("<arg_value>", "</arg_value>"),
    gap="\n",
)
# GLM 4.5 and 4.6
GLM45 = _tagged(_GLM, _GLM_REGION, before_arguments="\n", between="\n", markers=_GLM_MARKERS)
# GLM 4.7: no line ends
GLM47 = _tagged(replace(_GLM, gap="", line=""), _GLM_REGION, markers=_GLM_MARKERS)


def _hunyuan(suffix: str) -> CallForm:
    """Build the form of Hy3, whose tokens end with a suffix that depends on the release."""
    tags = [
        f"<{tag}{suffix}>"
        for name in ("tool_calls", "tool_call", "arg_key", "arg_value")
        for tag in (name, f"/{name}")
    ]
    section, section_end, call, call_end, key, key_end, value, value_end = tags
    separator = f"<tool_sep{suffix}>"
    return _tagged(
        Tagged((call, separator), call_end, (key, key_end), (value, value_end), gap="\n"),
        _region(rf"(?:{section}\s{{0,8}})?{call}", call_end),
        opening=f"{section}\n",
        before_arguments=f"{separator}\n",
        between="\n",
        closing=f"\n{section_end}",
        section_end=section_end,
        markers=(*tags, separator),
    )


HY3 = _hunyuan(":opensource")
HY3_PLAIN = _hunyuan("")
_FUNCTION = Tagged(("<function=", ">"), "</function>", ("<parameter=", ">"), ("", "</parameter>"))
QWEN3_CODER = (
    _tagged(  # Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5. Models sometimes omit <tool_call>.
        replace(_FUNCTION, pad="\n", outer=("<tool_call>", "</tool_call>")),
        _region(
            r"(?:<tool_call>\s{0,8})?<function=",
            r"</function>\s{0,8}(?:</tool_call>|(?=<tool_call>|<function=))",
        ),
        before_name="<tool_call>\n<function=",
        before_arguments=">\n",
        after_arguments="</function>\n</tool_call>",
        between="\n",
        markers=("<tool_call>", "</tool_call>"),
    )
)
SEED_OSS = _tagged(
    replace(_FUNCTION, outer=("<seed:tool_call>", "</seed:tool_call>")),
    _region(r"<seed:tool_call>\s{0,8}<function=", r"</function>\s{0,8}</seed:tool_call>"),
    before_name="<seed:tool_call>\n<function=",
    before_arguments=">\n",
    after_arguments="</function>\n</seed:tool_call>",
    between="\n",
    markers=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX_M2 = _tagged(
    Tagged(
        ('<invoke name="', '">'), "</invoke>", ('<parameter name="', '">'), ("", "</parameter>")
    ),
    _region(r"(?:<minimax:tool_call>\s{0,8})?<invoke name=", "</invoke>"),
    opening="<minimax:tool_call>\n",
    before_arguments='">\n',
    after_arguments="</invoke>\n",
    closing="</minimax:tool_call>",
    section_end="</minimax:tool_call>",
    markers=("<minimax:tool_call>", "</minimax:tool_call>"),
)


def _dsml(section: str, space: str = "") -> CallForm:
    """Build the form of DeepSeek since V3.2, whose markup says of each value whether it is a
    string. space: between the marker and the name of a tag.
    """
    mark = f"｜DSML｜{space}"
    return _tagged(
        Tagged(
            (f'<{mark}invoke name="', '">'),
            f"</{mark}invoke>",
            (f'<{mark}parameter name="', '"'),
            ("", f"</{mark}parameter>"),
            strings=True,
        ),
        _region(rf"(?:<{mark}{section}>\s{{0,8}})?<{mark}invoke name=", f"</{mark}invoke>"),
        opening=f"<{mark}{section}>\n",
        before_arguments='">\n',
        after_arguments=f"</{mark}invoke>\n",
        closing=f"</{mark}{section}>",
        section_end=f"</{mark}{section}>",
        markers=("｜DSML｜",),
    )


DEEPSEEK_V32 = _dsml("function_calls")
DEEPSEEK_V4 = _dsml("tool_calls")
DEEPSEEK_V41 = _dsml("calls", " ")
GEMMA4 = CallForm(
    field=_region(r"<\|tool_call>\s{0,4}(?:call)?:", r"<tool_call\|>"),  # models omit `call`
    syntax=GemmaValues(":", '<|"|>'),
    before_name="<|tool_call>call:",
    before_arguments="",
    after_arguments="<tool_call|>",
    quoted=False,
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
)


def _listed(opening: str, closing: str, region: JsonDict, markers: tuple[str, ...]) -> CallForm:
    return CallForm(
        field=region,
        syntax=ListedCalls(),
        opening=f"{opening}[",
        before_name='{"name": ',
        before_arguments=', "arguments": ',
        after_arguments="}",
        between=", ",
        closing=f"]{closing}",
        markers=markers,
    )


# Granite 3
GRANITE = _listed(
    opening="<|tool_call|>",
    closing="",
    region=_region(r"<\|?tool_call\|?>(?=\s{0,8}\[)", None),
    markers=("<|tool_call|>",),
)
# `functools` as its prompt asks for, or its special tokens
PHI4 = _listed(
    opening="functools",
    closing="",
    region=_region(r"functools(?=\[)|<\|tool_call\|>", r"<\|/tool_call\|>"),
    markers=("<|tool_call|>", "<|/tool_call|>"),
)
# Hunyuan A13B, Apriel
HUNYUAN = _listed(
    opening="<tool_calls>",
    closing="</tool_calls>",
    region=_region(r"<tool_calls>(?=\s{0,8}[\[{])", r"</tool_calls>"),
    markers=("<tool_calls>", "</tool_calls>"),
)
NEMOTRON = _listed(
    opening="<TOOLCALL>",
    closing="</TOOLCALL>",
    region=_region(r"<TOOLCALL>", r"</TOOLCALL>"),
    markers=("<TOOLCALL>", "</TOOLCALL>"),
)


# Words in a chat template -> the form. The first entry whose words all occur applies; None: a form
# that is not implemented.
CALL_FORMS: tuple[tuple[tuple[str, ...], CallForm | None], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<tool_sep", "<arg_key", ":opensource"), HY3),
    (("<tool_sep", "<arg_key"), HY3_PLAIN),
    (("<arg_key>", "</arg_key>\n"), GLM45),
    (("<arg_key>",), GLM47),
    (("<seed:tool_call>", "<function="), SEED_OSS),
    (("<tool_call>", "<function="), QWEN3_CODER),
    (("<minimax:tool_call>", "<invoke"), MINIMAX_M2),
    (("]<]minimax[>[",), None),  # MiniMax-M3
    (("｜DSML｜", " calls>"), DEEPSEEK_V41),
    (("｜DSML｜", "function_calls"), DEEPSEEK_V32),
    (("｜DSML｜", "tool_calls"), DEEPSEEK_V4),
    (("<｜tool▁sep｜>", "```json"), DEEPSEEK_V3),
    (("<｜tool▁sep｜>",), DEEPSEEK_V31),
    (("<|tool_call_argument_begin|>",), KIMI_K2),
    (("<|tool_call>", "call:"), GEMMA4),
    (("<TOOLCALL>",), NEMOTRON),
    (("<tool_calls>", "</tool_calls>"), HUNYUAN),
    (("functools[",), PHI4),
    (("<|tool|>", "<|/tool|>"), PHI4),
    (("<|tool_call|>",), GRANITE),
    (("<tool_call>", "</tool_call>"), HERMES),
    (("<|start_header_id|>", "<function="), None),  # Functionary 3.1
    (("<|start_header_id|>", '"parameters"'), LLAMA3),
    (("<|python_tag|>",), LLAMA3),
)


# The texts that precede an answer in a prompt.
ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "[/INST]",
    "<｜Assistant｜>",
    "<|assistant|>",
    "<|assistant|>\n",
    "<start_of_turn>model\n",
    "<|turn>model\n",
    "]~b]ai\n",
    "<seed:bos>assistant\n",
    "<|im_assistant|>assistant<|im_middle|>",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<｜hy_Assistant｜>",
    "<｜hy_Assistant:opensource｜>",
)

HARMONY = "harmony"  # gpt-oss's format, which is not one of these forms
# Parser names of other servers -> forms. Of several, the one that the chat template shows applies,
# else the first.
TOOL_CALL_PARSERS: dict[str, tuple[CallForm | str, ...]] = {
    "hermes": (HERMES,),
    "granite4": (HERMES,),
    "llama3_json": (LLAMA3,),
    "llama4_json": (LLAMA3,),
    "mistral": (MISTRAL_ARGS, MISTRAL_LIST),
    "glm45": (GLM45, GLM47),
    "glm47": (GLM47, GLM45),
    "qwen3_coder": (QWEN3_CODER,),
    "qwen3_xml": (QWEN3_CODER,),
    "mimo": (QWEN3_CODER,),
    "step3p5": (QWEN3_CODER,),
    "seed_oss": (SEED_OSS,),
    "minimax_m2": (MINIMAX_M2,),
    "deepseek_v3": (DEEPSEEK_V3,),
    "deepseek_v31": (DEEPSEEK_V31,),
    "deepseek_v32": (DEEPSEEK_V32,),
    "deepseek_v4": (DEEPSEEK_V4, DEEPSEEK_V41),
    "deepseek_v41": (DEEPSEEK_V41,),
    "kimi_k2": (KIMI_K2,),
    "gemma4": (GEMMA4,),
    "granite": (GRANITE,),
    "phi4_mini_json": (PHI4,),
    "hunyuan_a13b": (HUNYUAN,),
    "hy_v3": (HY3, HY3_PLAIN),
    "poolside_v1": (GLM45, GLM47),
    "openai": (HARMONY,),
}
_THINKERS = (  # parsers of reasoning in <think> tags
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
    "glm45",
    "glm47",
    "holo2",
    "hunyuan_a13b",
    "kimi_k2",
    "mimo",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "poolside_v1",
    "step3",
    "step3p5",
)
REASONING_PARSERS: dict[str, tuple[Tags | str, ...]] = {
    **dict.fromkeys(_THINKERS, (THINK,)),
    "gemma4": (THINK_GEMMA4,),
    "granite": (THINK_GRANITE,),
    "hy_v3": (THINK_HY3, THINK),
    "mistral": (THINK_MISTRAL,),
    "seed_oss": (THINK_SEED,),
    "openai_gptoss": (HARMONY,),
    "gpt_oss": (HARMONY,),
}


def check_parser(flag: str, name: str | None) -> None:
    """Raise ConfigError if `name`, the value of `flag`, is unknown. None: the flag is not given."""
    known = REASONING_PARSERS if flag == "--reasoning-parser" else TOOL_CALL_PARSERS
    if name is not None and name not in known:
        raise ConfigError(
            f"{flag} is {name!r}, which is not known{nearest(name, known)}; it can be {choices(sorted(known))}"
        )


def form_of(chat_template: str) -> CallForm | None:
    """Return the form of tool calls of a model with this chat template; None if it is not known."""
    text = chat_template.replace("\\n", "\n")
    for words, form in CALL_FORMS:
        if all(word in text for word in words):
            return form
    return None


def response_template(form: CallForm | None, reasoning: Tags | None) -> JsonDict:
    """Build a response template, in transformers' format, for the calls and the reasoning of a
    family.
    """
    fields: JsonDict = {}
    if reasoning is not None:
        fields["reasoning_content"] = {
            "open": list(reasoning.opens),
            "close": list(reasoning.closes),
            "content": "text",
        }
    if form is not None:
        fields["tool_calls"] = dict(form.field)
    fields["content"] = {"content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": list(ANCHORS), "fields": fields}
