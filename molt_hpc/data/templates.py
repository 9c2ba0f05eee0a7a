"""Which tokens of a rendered conversation are assistant replies, found by rendering alone.

Chat templates differ in every detail, so nothing is searched for by its text. A reply's place is
where two renderings differ that differ in that reply only; it begins where the generation prompt
ends, and it ends with the first special token after it, the one that the model must learn to stop
with. The text is then tokenised in pieces cut at these places, as it is when the model is sampled from.
"""

import os
from typing import Any

import numpy as np

PROBES = ("0", "1")
"""Two stand-ins for a reply that differ in their first and last character."""


class NoReply(ValueError):
    """The conversation has no assistant message: there would be nothing to learn."""


def check_messages(value: Any) -> list[dict[str, Any]]:
    """`value` as a list of chat messages; ValueError says what is wrong with it, NoReply if it has no assistant message."""
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number}: expected an object with a role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {number} ({message['role']}): expected text in 'content'")
    if all(message["role"] != "assistant" for message in value):
        raise NoReply("no assistant message: there is no reply to learn")
    return value


def render_with_mask(tokenizer: Any, messages: list[dict[str, Any]],
                     tools: list[dict[str, Any]] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] of the conversation and a bool mask [T] of the tokens that belong to assistant replies.

    Raises ValueError if the template cannot render the messages or treats a reply in a way that hides where it is.
    """
    check_messages(messages)
    text = _render(tokenizer, messages, tools)
    spans = [_reply_span(tokenizer, messages, tools, text, index) for index, message in enumerate(messages) if message["role"] == "assistant"]
    special = {*tokenizer.all_special_ids, *(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)}
    pieces, at = [], 0  # tokens, and whether they are learned
    for start, end in spans:
        stop, length = _end_of_turn(tokenizer, text[end:], special)
        pieces += [(_tokenise(tokenizer, text[at:start]), False), (_tokenise(tokenizer, text[start:end]), True), (stop, True)]
        at = end + length
    pieces.append((_tokenise(tokenizer, text[at:]), False))
    mask = np.array([learned for tokens, learned in pieces for _ in tokens], bool)
    mask[:1] = False
    return np.array([token for tokens, _ in pieces for token in tokens], np.int32), mask


def _render(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def _reply_span(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str,
                index: int) -> tuple[int, int]:
    """Characters [start, end) of reply `index` in the rendered text, without its end-of-turn token."""
    first, second = (_render(tokenizer, [*messages[:index], {"role": "assistant", "content": probe}, *messages[index + 1:]], tools)
                     for probe in PROBES)
    before = len(os.path.commonprefix([first, second]))
    after = len(os.path.commonprefix([first[::-1], second[::-1]]))
    if before + after >= len(first):
        raise ValueError(f"message {index}: the chat template does not render this reply at all")
    if not text.endswith(first[len(first) - after:]):
        raise ValueError(f"message {index}: the chat template renders what follows a reply depending on the reply")
    prompt = _render(tokenizer, messages[:index], tools, prompt=True) if index else ""
    opens = prompt and prompt != _render(tokenizer, messages[:index], tools)
    start = len(prompt) if opens and text.startswith(prompt) else len(os.path.commonprefix([text, first[:before]]))
    return start, max(start, len(text) - after)


def _end_of_turn(tokenizer: Any, rest: str, special: set[int]) -> tuple[list[int], int]:
    """Ids up to the first special token of what follows a reply, and how many characters they are; nothing if there is none."""
    encoded = tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)
    for number, token in enumerate(encoded["input_ids"]):
        if token in special:
            return list(encoded["input_ids"][:number + 1]), encoded["offset_mapping"][number][1]
    return [], 0


def _tokenise(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
