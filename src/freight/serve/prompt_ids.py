"""A prompt of a call as token ids: rendered, tokenized and cut as its parameters say.

The server and `freight verify` read prompts by this function alone, so that both give the model the
same tokens; each brings its own way to render and to encode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from freight.engine.intake import Intake
from freight.sampling import SamplingParams
from freight.serve.call import Conversation, Pair, Work
from freight.text.chat_text import ChatText

Render = Callable[[Conversation], Awaitable[ChatText]]
# (text, add_special_tokens, params) -> the token ids, or the last of them that `params` may leave,
# and the number of all
Encode = Callable[[str | ChatText, bool, SamplingParams], Awaitable[tuple[Sequence[int], int]]]


@dataclass(frozen=True)
class PromptIds:
    """text: the prompt as given, or the rendered conversation; None for token ids, and for a text
    that is cut: an echo decodes the tokens that the model reads.
    """

    text: str | None
    token_ids: Sequence[int]
    params: SamplingParams


async def read_prompt(work: Work, intake: Intake, render: Render, encode: Encode) -> PromptIds:
    """Return the token ids of a prompt, and the parameters that hold for it. Raises what `render`
    and `encode` raise, and RequestError where `truncate_prompt_tokens` leaves nothing.
    """
    prompt = work.prompt
    params = work.params
    if isinstance(prompt, Conversation):
        chat = await render(prompt)
        if work.params_of is not None:
            params = work.params_of(chat.text)
        token_ids, _ = await encode(chat, bool(work.add_special_tokens), params)
        return PromptIds(chat.text, intake.cut(token_ids, params), params)
    if isinstance(prompt, str):
        token_ids, count = await encode(prompt, work.add_special_tokens is not False, params)
        left = intake.cut(token_ids, params)
        return PromptIds(prompt if len(left) == count else None, left, params)
    assert not isinstance(prompt, Pair), "the service reads pairs"
    return PromptIds(None, intake.cut(prompt, params), params)
