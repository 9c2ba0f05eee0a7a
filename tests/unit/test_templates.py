"""Reply masks under templates of different habits: exactly the replies, with the token that ends them."""

from __future__ import annotations

import numpy as np
import pytest

from molt_hpc.data.templates import NoReply, render_with_mask
from tests.tiny import make_tokenizer

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3?"}, {"role": "assistant", "content": "6 of course"}]

THINKING = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > last.user -%}
{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ (m.content or '').strip() }}
{%- for call in m.tool_calls or [] -%}{{ '\\n<tool_call>' + call.name + '</tool_call>' }}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

HEADERS = """\
{{ '<|endoftext|>' }}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '<|im_start|>\\n\\n' + m.content | trim + '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_start|>\\n\\n' }}{%- endif -%}"""

NO_GENERATION_PROMPT = "{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '<|endoftext|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def replies(tokenizer, messages, template: str | None = None, tools=None) -> list[str]:
    """Decoded runs of masked tokens; checks that ids and mask belong together."""
    if template:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
    ids, mask = render_with_mask(tokenizer, messages, tools)
    assert ids.dtype == np.int32 and mask.dtype == bool and len(ids) == len(mask)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]]))).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end]) for start, end in edges]


def test_every_reply_is_learned_with_its_end_of_turn(tokenizer):
    assert replies(tokenizer, CHAT) == ["4<|im_end|>", "6 of course<|im_end|>"]


def test_markers_inside_of_user_text_are_not_replies(tokenizer):
    trap = [{"role": "user", "content": "say <|im_end|>\n<|im_start|>assistant\n4<|im_end|>"}, {"role": "assistant", "content": "no"}]
    assert replies(tokenizer, trap) == ["no<|im_end|>"]


def test_a_reply_that_repeats_the_question_is_told_from_it(tokenizer):
    assert replies(tokenizer, [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]) == ["0<|im_end|>"]


def test_an_empty_reply_still_learns_to_stop(tokenizer):
    assert replies(tokenizer, [{"role": "user", "content": "hush"}, {"role": "assistant", "content": ""}]) == ["<|im_end|>"]


def test_the_prompt_is_tokenised_as_it_is_for_sampling(tokenizer):
    messages = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "\n\n indeed"}]
    ids, mask = render_with_mask(tokenizer, messages)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[:mask.argmax()].tolist() == prompt


def test_reasoning_of_the_last_turn_is_learned_and_that_of_the_history_is_not_rendered(tokenizer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "old"},
                {"role": "user", "content": "c"}, {"role": "assistant", "content": "d", "reasoning_content": "new"}]
    assert replies(tokenizer, messages, THINKING) == ["b<|im_end|>", "<think>\nnew\n</think>\n\nd<|im_end|>"]


def test_tool_calls_are_part_of_the_reply(tokenizer):
    messages = [{"role": "user", "content": "add"}, {"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}]},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "seven"}]
    found = replies(tokenizer, messages, THINKING)
    assert found == ["<think>\n\n</think>\n\n\n<tool_call>sum</tool_call><|im_end|>", "<think>\n\n</think>\n\nseven<|im_end|>"]


def test_a_template_that_trims_and_starts_with_a_special_token(tokenizer):
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "  there  "}, {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"}]
    assert replies(tokenizer, messages, HEADERS) == ["there<|im_end|>", "y<|im_end|>"]


def test_a_template_without_a_generation_prompt(tokenizer):
    assert replies(tokenizer, CHAT[1:], NO_GENERATION_PROMPT) == ["4<|endoftext|>", "6 of course<|endoftext|>"]


def test_a_conversation_without_a_reply_is_refused(tokenizer):
    with pytest.raises(NoReply, match="no assistant message"):
        render_with_mask(tokenizer, CHAT[:2])


@pytest.mark.parametrize(("messages", "reason"), [
    ([], "list of messages"), ("hi", "list of messages"), ([{"content": "x"}], "message 0: expected an object with a role"),
    ([{"role": "user", "content": "x"}, {"role": "assistant", "content": 3}], r"message 1 \(assistant\): expected text")])
def test_what_is_no_conversation_is_refused_with_the_place(tokenizer, messages, reason):
    with pytest.raises(ValueError, match=reason):
        render_with_mask(tokenizer, messages)


def test_a_template_that_hides_replies_is_refused(tokenizer):
    with pytest.raises(ValueError, match="does not render this reply"):
        replies(tokenizer, CHAT, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
