"""What a chat template puts around replies, learned by rendering short stand-in conversations.

A conversation is rendered whole once, when a segment begins. After that only what is new is rendered, behind a stand-in
question and a stand-in reply whose place is searched for, so that the cost of a turn does not grow with the history. What
a template does to replies that are already there (some drop their thinking) depends on the shapes of the messages
only; it is found out once for each shape and remembered.
"""

import functools
import json
from typing import Any

from jinja2.exceptions import TemplateError

from molt_hpc.data.media import ImageError, ImageReader, MediaStore

Message = dict[str, Any]

MARK = "zq0reply0qz"
THOUGHT = "zq0thought0qz"
QUESTION = {"role": "user", "content": "zq0question0qz"}
TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"q": "0"}}}
STAND_INS = {"tool": {"role": "tool", "content": "0", "tool_call_id": "call_0", "name": "f"}}
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
"""Marks around thinking that templates look for in a reply's text."""


class TemplateRefused(ValueError):
    """The chat template cannot render these messages."""


def thinking(reply: Message) -> tuple[tuple, str]:
    """(shape, text) of a reply's thinking: in its own field, or in the content behind or before one of the marks; ((), '') if none."""
    if reply.get("reasoning_content"):
        return ("field",), reply["reasoning_content"]
    content = reply.get("content") or ""
    for opening, closing in THINKING:
        if closing in content:
            text = content.split(closing)[0]
            return (opening if opening in text else "", closing), text.split(opening)[-1]
    return (), ""


class Dialect:
    """A tokenizer with its chat template; everything here is a pure function of the arguments. images: None if the model sees none."""

    def __init__(self, tokenizer: Any, images: ImageReader | None = None):
        self.tokenizer, self.images = tokenizer, images
        self._kept: dict[str, bool] = {}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def place(self, token_ids: list[int], images: list[str]) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids as the model sees them, ranges of the images' tokens); `token_ids` has one for each. Raises ImageError if the numbers differ."""
        return self.images.place(token_ids, images) if self.images else (token_ids, [])

    def store(self) -> MediaStore:
        """Where the images that this model sees are kept; ImageError if it sees none."""
        if self.images is None:
            raise ImageError("this model sees no images, or is of a kind whose images are not supported (Qwen-VL's are)")
        return self.images.store

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(self, messages: list[Message], tools: list[Any] | None = None, options: Message | None = None, prompt: bool = True) -> str:
        """The conversation as text, with the opening of a reply behind it if `prompt`. Raises TemplateRefused."""
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt, **(options or {}))
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise TemplateRefused(f"the model's chat template cannot render these messages: {type(error).__name__}: {error}") from None

    @functools.cached_property
    def opening(self) -> str:
        """What the template puts in front of a reply; empty if there is no template."""
        if not self.tokenizer.chat_template:
            return ""
        whole, closed = (self.render([QUESTION], prompt=prompt) for prompt in (True, False))
        return whole[len(closed):] if whole.startswith(closed) else ""

    def seam(self, reply: Message, stop: int | None, new: list[Message], tools: bool, options: Message | None = None) -> list[int] | None:
        """Ids of everything between the last sampled token of `reply` and the first token of the next reply, the `new` messages included.

        stop: the token with which the reply ended, None if it was cut. None as the answer: the template does not go on
        from this reply (it has another end of turn, or puts something else in the reply's place).
        """
        calls, probe = reply.get("tool_calls"), {"role": "assistant", "content": MARK}
        if calls:
            last = calls[-1] | {"function": {"name": calls[-1]["function"]["name"], "arguments": {"q": MARK}}}
            probe = {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}
        try:
            _, found, rest = self.render([QUESTION, probe, *new], [TOOL] if tools else None, options).partition(MARK)
        except TemplateRefused:
            return None
        if not found or (calls and stop is None):
            return None
        if stop is not None:
            before, found, rest = rest.partition(self.text([stop]))
            if not found or (before.strip() and not calls):
                return None
        return self.ids(rest)

    def keeps(self, reply: Message, new: list[Message], tools: bool, options: Message | None = None, earlier: bool = False) -> bool:
        """Whether all of a reply of this shape is still rendered once messages with the roles of `new` have followed.

        earlier: another reply stands between this one and the new messages.
        """
        shape, roles = thinking(reply)[0], [m["role"] for m in new]
        roles = [role for n, role in enumerate(roles) if n == 0 or role != roles[n - 1]]
        content, calls = bool((reply.get("content") or "").strip()), bool(reply.get("tool_calls"))
        key = json.dumps([shape, content, calls, roles, tools, options, earlier])
        if key not in self._kept:
            self._kept[key] = self._probe(shape, content, calls, roles, tools, options, earlier)
        return self._kept[key]

    def _probe(self, shape: tuple, content: bool, calls: bool, roles: list[str], tools: bool, options: Message | None,
               earlier: bool) -> bool:
        probe: Message = {"role": "assistant", "content": MARK if content else ""}
        if shape == ("field",):
            probe["reasoning_content"] = THOUGHT
        elif shape:
            probe["content"] = f"{shape[0]}{THOUGHT}{shape[1]}{MARK}"
        if calls or earlier:
            probe["tool_calls"] = [CALL]
        between = [STAND_INS["tool"], {"role": "assistant", "content": "0"} | ({"tool_calls": [CALL]} if calls else {})] if earlier else []
        follow = [STAND_INS.get(role, {"role": role, "content": "0"}) for role in roles]
        try:
            text = self.render([QUESTION, probe, *between, *follow], [TOOL] if tools else None, options)
        except TemplateRefused:
            return False
        return (THOUGHT if shape else MARK if content else "") in text
