"""The token tree: what the agent asks for, however it asks, each sampled token is trained once and in the context it was sampled in."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.rollout.dialect import Dialect, TemplateRefused
from molt_hpc.rollout.generate import Turn
from molt_hpc.rollout.session import ContextOverflow, Session
from tests.chat_templates import END, TEMPLATES, make_tokenizer

tokenizer_of = functools.cache(make_tokenizer)


def user(text):
    return {"role": "user", "content": text}


def tool(text, call="call_0"):
    return {"role": "tool", "content": text, "tool_call_id": call, "name": "f"}


def call(number=0, **arguments):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}


def turn_of(ids, finish="stop", stop_reason=None):
    count = len(ids)
    logprobs = -np.arange(1, count + 1, dtype=np.float32)
    return Turn(np.array(ids, np.int32), logprobs, np.array([[0, count, 3]], np.int32), finish, stop_reason)


class Chat:
    """A session with an engine that says what it is told to; it notes every prompt that it saw."""

    def __init__(self, template="chatml", limit=100_000, tools=None, options=None):
        self.tokenizer, self.template, self.tools, self.options = tokenizer_of(template), template, tools, options
        self.dialect = Dialect(self.tokenizer)
        self.session = Session(self.dialect, limit)
        self.seen: list[tuple[list[int], list[int]]] = []

    def say(self, messages, text, end=None, temperature=1.0, message=None, cut=False):
        """The engine answers with `text` and the token `end`; returns the message that the agent gets."""
        plan = self.session.plan(messages, self.tools, self.options)
        ids = self.dialect.ids(text) + ([] if cut else self.dialect.ids(end or END[self.template]))
        message = message or {"role": "assistant", "content": text}
        self.session.commit(plan, turn_of(ids, "length" if cut else "stop"), temperature, message)
        self.seen.append((plan.prompt_ids(), ids))
        return message

    def prompt_text(self):
        return self.dialect.text(self.seen[-1][0])

    def check(self):
        """Every token the engine sampled is under exactly one mask, behind exactly the prompt that the engine saw."""
        found = []
        for segment in self.session.segments():
            segment.check()
            for start, end in segment.action_spans:
                found.append((segment.token_ids[:start].tolist(), segment.token_ids[start:end].tolist()))
                assert segment.logprobs[start:end].tolist() == [-float(i) for i in range(1, end - start + 1)]
        assert sorted(found) == sorted(self.seen)
        owners = self.session.span_owners()
        assert [found[owners.index(n)] for n in range(len(owners))] == self.seen
        return self.session.segments()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_conversation_continues_one_segment_and_reads_as_the_template_renders_it(template):
    chat = Chat(template)
    messages = [user("hello")]
    for question in ("the answer", "12 or 21", "is he"):
        reply = chat.say(messages, "\nhello lo" if template == "glm" else "hello lo")
        messages = [*messages, reply, user(question)]
    chat.say(messages, "lo")
    opened = "<think>\n" if template == "deepseek" else ""  # stands in front of replies as they are sampled, not in the history
    assert chat.prompt_text().replace(opened, "") == chat.dialect.render(messages).replace(opened, "")
    assert len(chat.check()) == 1


@pytest.mark.parametrize("template", ["chatml", "qwen3", "deepseek", "glm", "kimi"])
def test_parallel_calls_and_all_their_results_stay_in_the_segment(template):
    """glm stops a reply that calls with another token than one that answers."""
    calls = [call(0, x=1), call(1, x="two")]
    shown = {"role": "assistant", "content": "", "tool_calls": calls}
    chat = Chat(template, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    whole = chat.dialect.render([user("hello"), shown, tool("1", "call_0"), tool("2", "call_1")], chat.tools)
    opening = chat.dialect.render([user("hello")], chat.tools)
    end = {"glm": "<|observation|>"}.get(template, END[template])
    sampled = whole[len(opening):].split(end)[0] if template != "deepseek" else None
    if template == "deepseek":  # its opening holds a thinking mark that the history does not
        sampled = whole[len(opening) - len("<think>\n"):].split(end)[0]
    chat.say([user("hello")], sampled, end, message=shown)
    messages = [user("hello"), shown, tool("1", "call_0"), tool("2", "call_1")]
    reply = chat.say(messages, "both")
    assert chat.prompt_text().replace("<think>\n", "") == whole.replace("<think>\n", "")
    chat.say([*messages, reply, user("and?")], "so")
    assert len(chat.check()) == 1


def test_one_call_a_message_continues_with_llama():
    shown = {"role": "assistant", "content": "", "tool_calls": [call(0, x=1)]}
    chat = Chat("llama3")
    chat.say([user("hello")], '{"name": "f", "parameters": {"x": 1}}', message=shown)
    messages = [user("hello"), shown, tool("one")]
    chat.say(messages, "done")
    assert chat.prompt_text() == chat.dialect.render(messages) and len(chat.check()) == 1


def test_thinking_stays_through_tool_results_and_a_new_question_opens_a_segment():
    chat = Chat("qwen3")
    first = {"role": "assistant", "content": "<think>\nhe\n</think>\n\n", "tool_calls": [call(0, x=1)]}
    chat.say([user("hello")], '<think>\nhe\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', message=first)
    messages = [user("hello"), first, tool("1")]
    second = chat.say(messages, "plain")
    assert len(chat.session.segments()) == 1
    chat.say(messages := [*messages, second, user("next")], "<think>\nlo\n</think>\n\nso")
    assert chat.prompt_text() == chat.dialect.render(messages) and "he\n</think>" not in chat.prompt_text()
    segments = chat.check()
    assert len(segments) == 2 and [len(s.action_spans) for s in segments] == [2, 1]


@pytest.mark.parametrize("template", ["qwen3", "deepseek", "glm"])
def test_templates_that_drop_thinking_get_a_segment_for_each_question(template):
    chat = Chat(template)
    opened = "" if template == "deepseek" else "<think>"
    messages = [user("hello")]
    for number in range(3):
        messages = [*messages, chat.say(messages, f"{opened}he lo</think>answer {number}"), user(f"q{number}")]
    assert [len(s.action_spans) for s in chat.check()] == [1, 1, 1]


def test_templates_that_keep_thinking_keep_the_segment():
    chat = Chat("chatml")
    messages = [user("hello")]
    for number in range(3):
        messages = [*messages, chat.say(messages, f"<think>he</think>answer {number}"), user(f"q{number}")]
    assert len(chat.check()) == 1


def test_an_empty_thought_that_the_opening_holds_does_not_cut_the_segment():
    chat = Chat("qwen3", options={"enable_thinking": False})
    messages = [user("hello")]
    for number in range(3):
        messages = [*messages, chat.say(messages, f"answer {number}"), user(f"q{number}")]
    assert len(chat.check()) == 1


def test_thinking_in_a_field_of_its_own_must_come_back_for_the_branch_to_continue():
    chat = Chat("qwen3")
    shown = {"role": "assistant", "content": "so", "reasoning_content": "he", "tool_calls": [call(0, x=1)]}
    chat.say([user("hello")], "<think>\nhe\n</think>\n\nso", message=shown)
    without = {k: v for k, v in shown.items() if k != "reasoning_content"}
    chat.say([user("hello"), shown, tool("1")], "kept")
    chat.say([user("hello"), without, tool("1")], "left out")
    assert [len(s.action_spans) for s in chat.check()] == [2, 1]


def test_white_space_that_templates_trim_does_not_cut_the_segment():
    chat = Chat("llama3")
    reply = chat.say([user("hello")], "\n\n the answer \n")
    chat.say([user("hello"), reply, user("and")], "lo")
    stripped = reply | {"content": reply["content"].strip()}
    chat.say([user("hello"), stripped, user("and")], "lo lo")
    segments = chat.check()
    assert len(segments) == 2 and all("\n\n the answer \n" in chat.dialect.text(s.token_ids.tolist()) for s in segments)


def test_a_reply_that_was_cut_gets_its_end_of_turn_from_the_template_outside_the_mask():
    chat = Chat("chatml")
    reply = chat.say([user("hello")], "the ans", cut=True)
    chat.say(messages := [user("hello"), reply, user("go on")], "wer")
    assert chat.prompt_text() == chat.dialect.render(messages)
    segment = chat.check()[0]
    assert segment.action_mask().sum() == sum(len(ids) for _, ids in chat.seen)


def test_another_end_of_turn_than_the_templates_opens_a_segment():
    chat = Chat("chatml")
    reply = chat.say([user("hello")], "the answer", end="<|endoftext|>")
    chat.say(messages := [user("hello"), reply, user("and")], "lo")
    assert chat.prompt_text() == chat.dialect.render(messages) and len(chat.check()) == 2


def test_an_edited_reply_and_a_compacted_history_open_segments():
    chat = Chat("chatml")
    reply = chat.say([user("hello")], "the answer")
    second = chat.say([user("hello"), reply, user("and")], "lo")
    chat.say([user("hello"), reply | {"content": "another answer"}, user("and")], "so")
    chat.say([user("summary of hello"), second, user("then")], "he")
    assert [len(s.action_spans) for s in chat.check()] == [2, 1, 1]


def test_asking_again_branches_and_both_replies_can_be_continued():
    chat = Chat("chatml")
    opening = chat.say([user("hello")], "the answer")
    messages = [user("hello"), opening, user("and")]
    one, two = chat.say(messages, "he"), chat.say(messages, "lo")
    chat.say([*messages, two, user("so")], "12")
    chat.say([*messages, one, user("so")], "21")
    segments = chat.check()
    assert [len(s.action_spans) for s in segments] == [3, 2] and len(segments[0].token_ids) == len(segments[1].token_ids)


def test_interleaved_conversations_each_keep_one_segment():
    chat = Chat("chatml")
    main, side = [user("main")], [{"role": "system", "content": "helper"}, user("side")]
    for number in range(4):
        main = [*main, chat.say(main, f"m{number}"), user("on")]
        side = [*side, chat.say(side, f"s{number}"), user("on")]
    assert len(chat.check()) == 2


def test_replies_of_different_temperatures_do_not_share_a_segment():
    chat = Chat("chatml")
    reply = chat.say([user("hello")], "he", temperature=1.0)
    again = chat.say([user("hello"), reply, user("and")], "lo", temperature=0.5)
    chat.say([user("hello"), reply, user("and"), again, user("so")], "12", temperature=1.0)
    assert [(s.temperature, len(s.action_spans)) for s in chat.check()] == [(1.0, 2), (0.5, 1)]


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_prompt_must_leave_room_for_one_token(spare):
    length = len(Chat().session.plan([user("hello")]).context)
    chat = Chat(limit=length + 1 + spare)
    if spare >= 0:
        assert chat.session.plan([user("hello")]).length == length
    else:
        with pytest.raises(ContextOverflow, match=f"the prompt has {length} tokens and the context holds {length}"):
            chat.session.plan([user("hello")])
        assert chat.session.nodes == []


def test_what_the_template_refuses_is_a_typed_error():
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        Chat("gemma").session.plan([user("hello"), user("again")])


def test_plain_text_continues_what_it_begins_with():
    chat = Chat()
    plan = chat.session.plan_text("hello the")
    chat.session.commit(plan, turn_of(chat.dialect.ids(" answer")), 1.0)
    longer = chat.session.plan_text("hello the answer is he")
    assert longer.parent is chat.session.nodes[0]
    assert longer.prompt_ids() == plan.context + chat.dialect.ids(" answer") + chat.dialect.ids(" is he")
    assert chat.session.plan_text("hello other").parent is None


def test_the_cost_of_a_turn_does_not_grow_with_the_history():
    """Counted in characters that are rendered and tokens that are tokenised."""
    chat = Chat("qwen3")
    counted = []
    render, ids = chat.dialect.render, chat.dialect.ids
    chat.dialect.render = lambda *a, **k: counted.append(len(text := render(*a, **k))) or text
    chat.dialect.ids = lambda text: counted.append(len(text)) or ids(text)
    messages, costs = [user("hello " * 50)], []
    for _ in range(40):
        counted.clear()
        messages = [*messages, chat.say(messages, "the answer"), user("and")]
        costs.append(sum(counted))
    assert max(costs[2:]) == min(costs[2:]) < 400


# any interleaving, against a model without a tree ------------------------------------------

TEXTS = st.sampled_from(["hello", "he", "llo", "the answer is", "12", " lo ", "\n"])
KINDS = st.sampled_from(["extend", "extend", "extend", "resend", "rewrite", "edit", "fail", "begin"])
STEP = st.tuples(KINDS, st.integers(0, 7), TEXTS, TEXTS, st.booleans(), st.sampled_from([1.0, 1.0, 0.7]))
STEPS = st.lists(STEP, min_size=1, max_size=14)


class PlainModel:
    """Keeps every conversation with its tokens in a flat list and finds the longest one that the messages begin with."""

    def __init__(self, ids):
        self.ids, self.known = ids, []

    def prompt(self, messages):
        """The tokens a ChatML engine should see, by string formatting alone."""
        best = None
        for conversation, tokens, ended in self.known:
            sent = messages[:len(conversation)]
            if len(sent) == len(conversation) and all(a["role"] == b["role"] and a["content"].strip() == b["content"].strip()
                                                      if a["role"] == "assistant" else a == b for a, b in zip(sent, conversation)):
                if best is None or len(conversation) >= len(best[0]):
                    best = (conversation, tokens, ended)
        lines = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[len(best[0]) if best else 0:])
        opening = "<|im_start|>assistant\n"
        if best is None:
            return self.ids(lines + opening)
        return best[1] + self.ids(("\n" if best[2] else "<|im_end|>\n") + lines + opening)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_any_interleaving_trains_what_the_engine_saw_once(steps):
    chat = Chat("chatml")
    model = PlainModel(chat.dialect.ids)
    conversations = [[user("hello")]]
    asked = []
    for kind, which, said, answered, cut, temperature in steps:
        messages = conversations[which % len(conversations)]
        if kind == "begin":
            messages = [user(said), user(answered)]
        elif kind == "resend" and asked:
            messages = asked[which % len(asked)]
        elif kind == "rewrite" and len(messages) > 1:
            messages = [user("short " + said), *messages[2:]]
        elif kind == "edit" and len(messages) > 1:
            messages = [messages[0], {"role": "assistant", "content": "edited " + said}, *messages[2:]]
        expected = model.prompt(messages)
        assert chat.session.plan(messages).prompt_ids() == expected
        if kind == "fail":
            continue  # planned, sent to an engine that failed, never recorded
        reply = chat.say(messages, answered, cut=cut, temperature=temperature)
        assert chat.seen[-1][0] == expected
        asked.append(messages)
        model.known.append(([*messages, reply], expected + chat.seen[-1][1], not cut))
        conversations.append([*messages, reply, user(said)])
    if chat.seen:
        chat.check()
        sampled = sum(len(ids) for _, ids in chat.seen)
        assert sum(int(s.action_mask().sum()) for s in chat.session.segments()) == sampled


def dense(text):
    return "".join(text.split())


REPLIES = {"plain": ("the answer", {}), "thinks": ("<think>\nhe llo\n</think>\n\nso it is", {}),
           "calls": ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', {"content": "", "tool_calls": [call(0, x=1)]}),
           "thinks and calls": ('<think>\nlo he\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
                                {"content": "<think>\nlo he\n</think>\n\n", "tool_calls": [call(0, x=1)]})}


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["chatml", "qwen3"]),
       st.lists(st.tuples(st.sampled_from(sorted(REPLIES)), st.integers(1, 2)), min_size=1, max_size=7), st.booleans())
def test_every_prompt_reads_as_the_template_renders_the_whole_conversation(template, turns, enable):
    """Up to white space; the stand-ins from which seams and kept thinking are learned know nothing of this conversation."""
    chat = Chat(template, options=None if enable else {"enable_thinking": False})
    messages = [user("hello")]
    for kind, results in turns:
        text, shown = REPLIES[kind]
        message = {"role": "assistant", "content": text} | shown
        chat.say(messages, text, message=message)
        rendered = dense(chat.dialect.render(messages, options=chat.options))
        assert dense(chat.prompt_text()).replace("<think></think>", "") == rendered.replace("<think></think>", "")
        asked = [tool(f"r{n}") for n in range(results)] if "calls" in kind else [user(f"q{n}") for n in range(results)]
        messages = [*messages, message, *asked]
    chat.check()
