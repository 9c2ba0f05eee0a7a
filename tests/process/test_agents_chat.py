"""The chat server with the real openai and anthropic clients; the engine is scripted where a reply must say something."""

from __future__ import annotations

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from molt_hpc.rollout.chat_anthropic import parse_messages
from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import ChatServer
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import EngineError
from molt_hpc.rollout.reply_parsing import ReplyParser
from molt_hpc.rollout.sampling import Unsupported
from tests.chat_templates import make_tokenizer
from tests.scripted_model import ScriptedEngine, chat_config, failing, lease_of

WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city",
                                            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
TWO_CALLS = ('looking<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
             '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>')
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def dialects():
    return {name: Dialect(make_tokenizer(name)) for name in ("chatml", "qwen3")}


@pytest.mark.parametrize("name, reply, content", [
    ("hermes", 'hi<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>', "hi"),
    ("qwen3_coder", "hi<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>", "hi"),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Bern"}}', ""), ("pythonic", '[weather(city="Bern")]', ""),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Bern"}'
                "<|tool_call_end|><|tool_calls_section_end|>", "")])
def test_vllms_parsers_find_the_calls_of_each_family(dialects, name, reply, content):
    tokenizer = make_tokenizer("qwen3")
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<|python_tag|>"])
    message = ReplyParser(tokenizer, name).parse(reply, [WEATHER])
    assert message["content"] == content
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "weather", "arguments": {"city": "Bern"}}]
    with pytest.raises(ValueError, match="agent.tool_parser: vLLM's parser 'no such'"):
        ReplyParser(tokenizer, "no such")


def test_a_forced_call_becomes_a_grammar_of_the_form_that_the_parser_finds(parsers):
    choice = parse_messages({"messages": USER, "max_tokens": 5, "tool_choice": {"type": "tool", "name": "weather"}}).tool_choice
    assert parse_messages({"messages": USER, "max_tokens": 5, "tool_choice": {"type": "any"}}).tool_choice == "required"
    for forced in (choice, "required"):
        tag = parsers["hermes"].grammar([WEATHER], forced)["structural_tag"]
        assert "<tool_call>" in tag and "weather" in tag
    for parser, tools, forced in (("hermes", [WEATHER], {"type": "function", "function": {"name": "other"}}), ("hermes", None, "required"),
                                  ("", [WEATHER], "required")):
        with pytest.raises(Unsupported):
            parsers[parser].grammar(tools, forced)


@pytest.fixture(scope="module")
def parsers(dialects):
    return {"": ReplyParser(dialects["qwen3"].tokenizer), "hermes": ReplyParser(dialects["qwen3"].tokenizer, "hermes"),
            "think": ReplyParser(dialects["qwen3"].tokenizer, "hermes", "deepseek_r1")}


class Room:
    """A running chat server with one rollout let in, and clients for it."""

    def __init__(self, server, episode, engine, url):
        self.server, self.episode, self.engine, self.url = server, episode, engine, url
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=episode.key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=episode.key, max_retries=0)
        self.judge = openai.AsyncOpenAI(base_url=f"{url}/judge/v1", api_key=episode.key, max_retries=0)

    def chat(self, messages=USER, client=None, **fields):
        return (client or self.openai).chat.completions.create(model="policy", messages=messages, **fields)

    def check(self):
        """What the engine sampled is recorded, all of it once."""
        spans = [(s.token_ids[:a].tolist(), s.token_ids[a:b].tolist()) for s in self.episode.session.segments() for a, b in s.action_spans]
        assert sorted(spans) == sorted((prompt, ids) for prompt, _, ids in self.engine.calls)
        return self.episode.session.segments()


@pytest.fixture
def room(dialects, parsers):
    """`room(body, script)` runs `await body(room)`; a script may be a text."""

    def run(body, script="fine", template="qwen3", parser="", latency=0.0, max_len=4096, timeout=60.0):
        async def main():
            dialect = dialects[template]
            engine = ScriptedEngine(dialect, (lambda prompt, sampling: script) if isinstance(script, str) else script, latency)
            server = ChatServer(dialect, parsers[parser])
            await server.start()
            episode = ChatEpisode(lease_of(timeout=timeout), chat_config(max_len), dialect, engine, None, server=server)
            made = Room(server, episode, engine, server.open(episode))
            try:
                return await body(made)
            finally:
                await asyncio.gather(made.openai.close(), made.anthropic.close(), made.judge.close())
                await server.close()

        return asyncio.run(main())

    return run


def test_openai_completion_has_text_usage_and_is_recorded(room):
    async def body(room):
        answer = await room.chat(max_completion_tokens=50, seed=3, user="me", metadata={"a": "b"})
        assert answer.choices[0].message.content == "fine" and answer.choices[0].finish_reason == "stop"
        prompt, sampling, ids = room.engine.calls[0]
        assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(ids)
        assert sampling["max_tokens"] == 50 and sampling["seed"] == 3 and sampling["temperature"] == 1.0
        assert sampling["top_p"] == 1.0 and sampling["top_k"] == 0
        cut = await room.chat(max_tokens=1)
        assert cut.choices[0].finish_reason == "length"
        assert [m.id async for m in room.openai.models.list()] == ["policy"]
        assert (await room.openai.models.retrieve("policy")).id == "policy"
        room.check()

    room(body)


def test_openai_stream_says_the_same_as_the_whole_answer(room):
    async def body(room):
        stream = await room.chat(stream=True, stream_options={"include_usage": True}, tools=[WEATHER], logprobs=True)
        text, calls, finish, usage, logprobs = "", {}, None, None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish, logprobs = choice.finish_reason or finish, choice.logprobs or logprobs
                for call in choice.delta.tool_calls or []:
                    entry = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                    entry["arguments"] += call.function.arguments
        assert text == "looking" and finish == "tool_calls" and usage.total_tokens == sum(len(part) for part in room.engine.calls[0][::2])
        assert [json.loads(c["arguments"]) for c in calls.values()] == [{"city": "Bern"}, {"city": "Rome"}]
        assert "".join(t.token for t in logprobs.content) == TWO_CALLS and {t.logprob for t in logprobs.content} == {-0.5}
        async with room.openai.chat.completions.stream(model="policy", messages=USER, tools=[WEATHER]) as helper:
            final = await helper.get_final_completion()
        assert [c.function.name for c in final.choices[0].message.tool_calls] == ["weather", "weather"]

    room(body, TWO_CALLS, parser="hermes")


LONG = "a reply of some words, with an umlaut \u00e4 and a sign \U0001f600, that takes its time; Observation: never seen"


def test_text_is_streamed_while_it_is_sampled_and_a_stop_string_never_shows(room):
    async def body(room):
        texts, before = [], 0
        async for chunk in await room.chat(stream=True, stop=["Observation:"], logprobs=True):
            before += not room.engine.calls and bool(chunk.choices[0].delta.content)
            texts.append(chunk.choices[0].delta.content or "")
        async with room.anthropic.messages.stream(model="policy", max_tokens=200, messages=USER, stop_sequences=["Observation:"]) as stream:
            pieces = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        completion = await room.openai.completions.create(model="policy", prompt="x", max_tokens=99, stream=True)
        prompt = [chunk.choices[0].text async for chunk in completion]
        assert before > 0 and len(pieces) > 2 and final.stop_reason == "stop_sequence"
        assert "".join(texts) == "".join(pieces) == final.content[0].text == LONG.split("Observation:")[0] and "".join(prompt) == LONG
        assert len(room.check()) == 3

    room(body, LONG, latency=0.02)


def test_openai_tool_loop_with_parallel_calls_is_one_segment(room):
    def script(prompt, sampling):
        return "it is warm" if "tool_response" in prompt else TWO_CALLS

    async def body(room):
        messages = list(USER)
        first = (await room.chat(messages, tools=[WEATHER])).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.content == "looking"
        messages.append(first.message.model_dump())  # with all the fields that the SDK adds
        messages += [{"role": "tool", "tool_call_id": c.id, "content": f"{c.function.arguments} warm"} for c in first.message.tool_calls]
        second = (await room.chat(messages, tools=[WEATHER])).choices[0]
        assert second.message.content == "it is warm" and second.finish_reason == "stop"
        await room.chat([*messages, second.message.model_dump(exclude_none=True), {"role": "user", "content": "thanks"}], tools=[WEATHER])
        assert len(room.check()) == 1
        prompt = room.engine.dialect.text(room.engine.calls[1][0])
        assert prompt.count("<tool_response>") == 2 and prompt.index("Bern") < prompt.index("Rome")

    room(body, script, parser="hermes")


def test_n_and_repeated_requests_are_branches_with_their_own_seeds(room):
    async def body(room):
        answer = await room.chat(n=3)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        await room.chat()
        assert len({c[1]["seed"] for c in room.engine.calls}) == 4 and len(room.check()) == 4
        texts = []
        async for chunk in await room.chat(n=2, stream=True):
            texts += [(c.index, c.delta.content) for c in chunk.choices if c.delta.content]
        assert {i for i, _ in texts} == {0, 1}

    room(body)


def test_stop_strings_end_the_text_and_stay_in_the_tokens(room):
    async def body(room):
        answer = await room.chat(stop=["Observation:"])
        assert answer.choices[0].message.content == "act. " and answer.choices[0].finish_reason == "stop"
        reply = answer.choices[0].message
        await room.chat([*USER, reply.model_dump(), {"role": "user", "content": "42"}])
        back = {"role": "assistant", "content": "act. Observation:"}  # some put it back
        await room.chat([*USER, back, {"role": "user", "content": "43"}])
        segments = room.check()
        assert len(segments) == 2 and "Observation:" in room.engine.dialect.text(segments[0].token_ids.tolist())

    room(body, lambda prompt, sampling: "act. Observation: 42" if sampling["stop"] else "so")


def test_the_temperature_of_a_request_is_recorded_and_what_biases_log_probs_is_refused(room):
    async def body(room):
        await room.chat(temperature=0.7)
        assert [s.temperature for s in room.check()] == [0.7]
        fields = {"temperature": 0, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 1, "logit_bias": {"5": 10},
                  "top_logprobs": 3, "response_format": {"type": "json_object"}, "tool_choice": "required",
                  "parallel_tool_calls": False, "prediction": {"type": "content"}}
        for name, value in fields.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await room.chat(**{name: value})
            assert refused.value.param == name and name in refused.value.message
        for name, value in {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "made_up": 1, "temperature": "nan", "stop": [""]}.items():
            with pytest.raises(openai.BadRequestError, match=name):
                await room.chat(extra_body={name: value})
        await room.chat(top_p=1, n=1, presence_penalty=0, response_format={"type": "text"}, tool_choice="auto")
        assert len(room.engine.calls) == 2

    room(body)


def test_judged_replies_are_not_recorded_and_may_ask_for_anything(room):
    async def body(room):
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        answer = await room.chat(client=room.judge, temperature=0, top_p=0.5, response_format=schema)
        assert answer.choices[0].message.content == "fine" and room.episode.session.nodes == []
        sampling = room.engine.calls[0][1]
        assert sampling["temperature"] == 0 and sampling["top_p"] == 0.5 and sampling["structured_outputs"] == {"json": {"type": "object"}}

    room(body)


def test_every_mistake_raises_the_sdks_own_class(room):
    async def body(room):
        with pytest.raises(openai.BadRequestError) as overflow:
            await room.chat([{"role": "user", "content": "hello " * 300}])
        assert overflow.value.code == "context_length_exceeded" and "maximum context length is 200" in overflow.value.message
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await room.anthropic.messages.create(model="policy", max_tokens=5, messages=[{"role": "user", "content": "hello " * 300}])
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await room.openai.chat.completions.create(model="gpt-4", messages=USER)
        with pytest.raises(openai.AuthenticationError):
            await room.chat(client=room.openai.with_options(api_key="other"))
        with pytest.raises(anthropic.AuthenticationError):
            await room.anthropic.with_options(api_key="other").messages.create(model="policy", max_tokens=5, messages=USER)
        with pytest.raises(openai.BadRequestError, match="agent.tool_parser"):
            await room.chat(tools=[WEATHER])
        with pytest.raises(openai.BadRequestError, match="tools of type function"):
            await room.chat(tools=[{"type": "custom", "custom": {"name": "weather"}}])
        with pytest.raises(openai.BadRequestError, match="expected token ids from 0 to"):
            await room.openai.completions.create(model="policy", prompt=[5, -1])
        with pytest.raises(openai.BadRequestError, match="sees no images"):
            await room.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}])
        with pytest.raises(openai.BadRequestError, match="no such switch"):
            await room.chat(reasoning_effort="low")
        with pytest.raises(anthropic.BadRequestError, match="field required"):
            await room.anthropic.messages.create(model="policy", max_tokens=5, messages=USER, extra_body={"max_tokens": None})
        async with httpx.AsyncClient() as client:
            headers = {"x-api-key": room.episode.key}
            for content, words in ((b"{", "not JSON"), (b"[" * 100_000, "not JSON"), (b"[]", "not a JSON object"), (b"{}", "messages")):
                answer = await client.post(f"{room.url}/v1/chat/completions", content=content, headers=headers)
                assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        room.server.shut(room.episode)
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await room.chat()
        assert room.episode.session.nodes == []

    room(body, max_len=200)


def test_a_failed_engine_is_an_error_that_the_sdk_retries_without_a_trace(room):
    async def body(room):
        with pytest.raises(openai.InternalServerError, match="the server is gone"):
            await room.chat()
        assert isinstance(room.episode.engine_error, EngineError)
        answer = await room.chat(client=room.openai.with_options(max_retries=2))
        assert answer.choices[0].message.content == "at last"
        assert room.episode.engine_error is None and len(room.check()) == 1

    room(body, failing(2, "at last"))


def test_streams_of_slow_replies_begin_with_signs_of_life_and_carry_errors(room):
    async def body(room):
        room.server.ping = 0.05
        headers = {"x-api-key": room.episode.key}
        async with httpx.AsyncClient(headers=headers) as client:
            request = {"messages": USER, "stream": True}
            lines = (await client.post(f"{room.url}/v1/chat/completions", json=request)).text.splitlines()
            assert lines[0] == ": waiting" and lines[-2] == "data: [DONE]"
        async with room.anthropic.messages.stream(model="policy", max_tokens=50, messages=USER) as stream:
            assert await stream.get_final_text() == "fine"
        with pytest.raises(openai.APIError, match="the server is gone"):
            async for _ in await room.chat([{"role": "user", "content": "break"}], stream=True):
                pass
        with pytest.raises(anthropic.APIStatusError, match="the server is gone"):
            broken = [{"role": "user", "content": "break"}]
            async with room.anthropic.messages.stream(model="policy", max_tokens=50, messages=broken) as stream:
                await stream.get_final_text()
        asked = asyncio.ensure_future(room.chat())
        await asyncio.sleep(0.1)
        room.server.shut(room.episode)
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await asked
        assert len(room.check()) == 2

    room(body, lambda prompt, sampling: EngineError("the server is gone") if "break" in prompt else "fine", latency=0.3)


def test_a_client_that_goes_away_leaves_no_trace(room):
    async def body(room):
        with pytest.raises(openai.APITimeoutError):
            await room.chat(timeout=0.1)
        await asyncio.sleep(0.6)
        assert room.engine.calls == [] and room.episode.session.nodes == [] and room.episode.generating == 0

    room(body, latency=0.4)


def test_an_answer_that_got_lost_is_not_sampled_again(room):
    async def body(room):
        first = await room.chat(extra_headers={"Idempotency-Key": "a"})
        again = await room.chat(extra_headers={"Idempotency-Key": "a"})
        retried = await room.chat(extra_headers={"x-stainless-retry-count": "1"}, user="first time")
        assert first.choices[0].message.content == again.choices[0].message.content == "fine" == retried.choices[0].message.content
        assert len(room.engine.calls) == 2 == len(room.check())

    room(body)


def test_the_deadline_of_the_rollout_ends_what_is_being_sampled(room):
    async def body(room):
        with pytest.raises(openai.PermissionDeniedError, match="deadline"):
            await room.chat()
        assert room.episode.engine_late and room.episode.session.nodes == []

    room(body, latency=30.0, timeout=0.5)


def test_text_completions_continue_each_other(room):
    async def body(room):
        first = await room.openai.completions.create(model="policy", prompt="once", max_tokens=40)
        await room.openai.completions.create(model="policy", prompt="once" + first.choices[0].text + "<|im_end|> and", max_tokens=40)
        stream = await room.openai.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=40, stream=True)
        assert "".join([c.choices[0].text async for c in stream]) == "fine"
        assert [len(s.action_spans) for s in room.check()] == [2, 1]
        assert (await room.openai.completions.create(model="policy", prompt="x", logprobs=1)).choices[0].logprobs.token_logprobs[0] == -0.5

    room(body)


def test_anthropic_message_with_system_usage_and_counted_tokens(room):
    async def body(room):
        asked = {"model": "policy", "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}], "messages": USER}
        message = await room.anthropic.messages.create(max_tokens=60, stop_sequences=["never"], **asked)
        prompt, sampling, ids = room.engine.calls[0]
        assert message.content[0].text == "fine" and message.stop_reason == "end_turn"
        assert (message.usage.input_tokens, message.usage.output_tokens) == (len(prompt), len(ids))
        assert "<|im_start|>system\nbe brief<|im_end|>" in room.engine.dialect.text(prompt) and sampling["stop"] == ["never"]
        assert (await room.anthropic.messages.count_tokens(**asked)).input_tokens == len(prompt)
        same = await room.chat([{"role": "system", "content": "be brief"}, *USER])
        assert same.usage.prompt_tokens == len(prompt) and room.engine.calls[1][0] == prompt
        assert (await room.anthropic.messages.create(max_tokens=1, **asked)).stop_reason == "max_tokens"
        room.check()

    room(body)


def test_anthropic_tool_loop_with_thinking_streamed_is_one_segment(room):
    def script(prompt, sampling):
        return "<think>\nthen\n</think>\n\nit is warm" if "tool_response" in prompt else f"<think>\nfirst\n</think>\n\n{TWO_CALLS}"

    async def body(room):
        schema = {"type": "object", "properties": {"city": {"type": "string"}}}
        tools = [{"name": "weather", "description": "of a city", "input_schema": schema}]
        asked = {"model": "policy", "max_tokens": 300, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        async with room.anthropic.messages.stream(messages=USER, **asked) as stream:
            first = await stream.get_final_message()
        assert [b.type for b in first.content] == ["thinking", "text", "tool_use", "tool_use"] and first.stop_reason == "tool_use"
        assert first.content[0].thinking.strip() == "first" and [b.input["city"] for b in first.content[2:]] == ["Bern", "Rome"]
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": f"warm in {b.input['city']}"} for b in first.content[2:]]
        messages = [*USER, {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
                    {"role": "user", "content": results}]
        second = await room.anthropic.messages.create(messages=messages, **asked)
        assert second.content[-1].text.strip() == "it is warm" and second.stop_reason == "end_turn"
        assert len(room.check()) == 1
        messages += [{"role": "assistant", "content": [b.model_dump() for b in second.content]}, {"role": "user", "content": "thanks"}]
        await room.anthropic.messages.create(messages=messages, **asked)
        assert len(room.check()) == 2  # the template drops thinking in front of a new question

    room(body, script, parser="think")


def test_anthropic_stop_sequences_and_refusals(room):
    async def body(room):
        message = await room.anthropic.messages.create(model="policy", max_tokens=50, messages=USER, stop_sequences=["END"])
        assert message.stop_reason == "stop_sequence" and message.stop_sequence == "END" and message.content[0].text == "so "
        for fields in ({"temperature": 0}, {"top_p": 0.5}, {"top_k": 5}, {"tool_choice": {"type": "any"}}, {"container": "x"},
                       {"tools": [{"type": "bash_20250124", "name": "bash"}]}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(fields))):
                await room.anthropic.messages.create(model="policy", max_tokens=50, messages=USER, extra_body=fields)
        with pytest.raises(anthropic.BadRequestError, match="begun by the client"):
            await room.anthropic.messages.create(model="policy", max_tokens=50, messages=[*USER, {"role": "assistant", "content": "I"}])

    room(body, "so END of")
