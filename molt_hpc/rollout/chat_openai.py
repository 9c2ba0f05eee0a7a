"""The OpenAI wire: chat completions and completions, from JSON to a request and from replies to JSON or events. Pure.

Every field is honoured, is a label without meaning for sampling, or is refused by name.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from molt_hpc.data.media import parts_of
from molt_hpc.rollout.dialect import Message
from molt_hpc.rollout.reply_parsing import arguments
from molt_hpc.rollout.sampling import NEUTRAL, Unsupported

LABELS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"}
"""Fields that say nothing about the reply."""
SAMPLING = {"temperature", "seed", "stop", "stop_token_ids", *NEUTRAL}
PIECE = 24
"""Characters of one streamed piece."""


@dataclass
class Request:
    """What a client asks for, whatever wire it came on. prompt: a completion's text; parse_calls: tool calls are looked for."""

    messages: list[Message]
    sampling: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    usage_event: bool = False
    logprobs: bool = False
    parse_calls: bool = True
    tool_choice: Any = "auto"
    prompt: str | list[int] | None = None


@dataclass
class Reply:
    """One sampled reply as the client sees it. tokens: (text, log-prob) of each sampled token but the one that ended it."""

    message: Message
    finish: str
    stopped_by: str | None
    tokens: list[tuple[str, float]]
    sampled: int


def parse_chat(body: dict[str, Any]) -> Request:
    """Raises Unsupported or ValueError."""
    body = asked(body, LABELS)
    messages = [_message(m) for m in take_messages(body)]
    request = Request(messages, _sampling(body), options=dict(body.pop("chat_template_kwargs", {})))
    for name in ("max_tokens", "max_completion_tokens"):
        if name in body:
            request.sampling["max_tokens"] = body.pop(name)
    if "reasoning_effort" in body:
        request.options["reasoning_effort"] = body.pop("reasoning_effort")
    request.tools = body.pop("tools", None) or None
    if not all(isinstance(t, dict) and t.get("type") == "function" and t.get("function", {}).get("name") for t in request.tools or ()):
        raise Unsupported("tools", "tools: expected a list of tools of type function, each with a name")
    request.tool_choice = body.pop("tool_choice", "auto")
    request.parse_calls = request.tool_choice != "none"
    if body.pop("parallel_tool_calls", True) is not True:
        raise Unsupported("parallel_tool_calls", "parallel_tool_calls=false cannot be guaranteed")
    kind = body.pop("response_format", {"type": "text"})
    if kind.get("type") != "text":
        request.sampling["structured_outputs"] = _grammar(kind)
    request.logprobs = bool(body.pop("logprobs", False))
    if body.pop("top_logprobs", 0):
        raise Unsupported("top_logprobs", "top_logprobs is not supported: logprobs gives those of the sampled tokens")
    return _common(request, body)


def parse_completion(body: dict[str, Any]) -> Request:
    """Raises Unsupported or ValueError."""
    body = asked(body, LABELS)
    prompt = body.pop("prompt", None)
    prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)) else prompt
    if not prompt or not (isinstance(prompt, str) or all(isinstance(i, int) for i in prompt)):
        raise Unsupported("prompt", "prompt: expected one text or one list of token ids")
    sampling = _sampling(body) | {"max_tokens": body.pop("max_tokens", 16)}
    request = Request([], sampling, parse_calls=False, prompt=prompt)
    request.logprobs = body.pop("logprobs", None) is not None
    for name, value in (("echo", False), ("best_of", 1), ("suffix", "")):
        if body.pop(name, value) != value:
            raise Unsupported(name, f"{name} is not supported")
    return _common(request, body)


def _common(request: Request, body: dict[str, Any]) -> Request:
    request.n, request.stream = body.pop("n", 1), bool(body.pop("stream", False))
    request.usage_event = bool(body.pop("stream_options", {}).get("include_usage"))
    if not isinstance(request.n, int) or not 1 <= request.n <= 128:
        raise Unsupported("n", f"n={request.n!r}: expected 1..128")
    refuse_rest(body)
    return request


def asked(body: dict[str, Any], labels: set[str]) -> dict[str, Any]:
    """The fields of a request that say something."""
    return {k: v for k, v in body.items() if v is not None and k not in labels and k != "model"}


def refuse_rest(body: dict[str, Any]) -> None:
    """Raises Unsupported for what no part of the parser has taken out of `body`."""
    if body:
        raise Unsupported(next(iter(body)), f"{next(iter(body))!r} is not supported by this server")


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body.pop(name) for name in SAMPLING if name in body}


def _grammar(kind: dict[str, Any]) -> dict[str, Any]:
    if kind.get("type") == "json_object":
        return {"json_object": True}
    if kind.get("type") == "json_schema":
        return {"json": kind["json_schema"]["schema"]}
    raise Unsupported("response_format", f"response_format {kind.get('type')!r} is not known")


def take_messages(body: dict[str, Any]) -> list[Any]:
    value = body.pop("messages", None)
    if not isinstance(value, list) or not value:
        raise Unsupported("messages", "messages: expected a list that is not empty")
    return value


KEPT = {"system": {"name"}, "user": {"name"}, "tool": {"tool_call_id", "name"}, "assistant": {"name"}}


def _message(message: Any) -> Message:
    """A message in the form that templates read and the token tree compares."""
    if not isinstance(message, dict):
        raise Unsupported("messages", f"messages: expected objects, got {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and isinstance(content, str) and role in ("user", "system"):
        return message
    role = "system" if role == "developer" else role
    if role not in KEPT:
        raise Unsupported("messages", f"messages: role {role!r} is not supported")
    clean: Message = {"role": role, "content": contents(content, role != "assistant")}
    for name, value in message.items():
        if name in ("role", "content") or value is None or value == []:
            continue
        if role == "assistant" and name == "tool_calls":
            clean["tool_calls"] = [_call(c) for c in value]
        elif role == "assistant" and name in ("reasoning_content", "reasoning"):
            clean["reasoning_content"] = value
        elif name in KEPT[role]:
            clean[name] = value
        else:
            raise Unsupported("messages", f"messages: field {name!r} of a message with role {role!r} is not supported")
    return clean


def contents(content: Any, images: bool = True) -> str | list[dict[str, Any]]:
    """A message's content as text, or as parts of text and images. Raises Unsupported."""
    try:
        parts = parts_of(content)
    except ValueError as error:
        raise Unsupported("messages", f"messages: {error}") from None
    if not images and not isinstance(parts, str):
        raise Unsupported("messages", "messages: a reply of the model holds no images")
    return parts


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    if call.get("type", "function") != "function" or not isinstance(function.get("name"), str):
        raise Unsupported("messages", "messages: tool_calls must be calls of functions")
    return {"id": call.get("id", ""), "type": "function",
            "function": {"name": function["name"], "arguments": arguments(function.get("arguments", "{}"))}}


# answers -----------------------------------------------------------------------------------


def _wire_message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if message.get("reasoning_content"):
        wire["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        wire["tool_calls"] = [c | {"function": {"name": c["function"]["name"], "arguments": _as_text(c["function"]["arguments"])}}
                              for c in message["tool_calls"]]
        wire["content"] = wire["content"] or None
    return wire


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _usage(prompt_tokens: int, replies: list[Reply]) -> dict[str, int]:
    sampled = sum(r.sampled for r in replies)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}


def _logprobs(reply: Reply) -> dict[str, Any]:
    tokens = [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in reply.tokens]
    return {"content": tokens, "refusal": None}


def chat_body(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> dict[str, Any]:
    choices = [{"index": i, "message": _wire_message(r.message), "finish_reason": r.finish,
                "logprobs": _logprobs(r) if request.logprobs else None}
               for i, r in enumerate(replies)]
    return _head(f"chatcmpl-{answer_id}", "chat.completion") | {"choices": choices, "usage": _usage(prompt_tokens, replies)}


def completion_body(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> dict[str, Any]:
    choices = [{"index": i, "text": r.message["content"], "finish_reason": r.finish,
                "logprobs": {"tokens": [t for t, _ in r.tokens], "token_logprobs": [p for _, p in r.tokens], "top_logprobs": None,
                             "text_offset": [*accumulate((len(t) for t, _ in r.tokens), initial=0)][:-1]} if request.logprobs else None}
               for i, r in enumerate(replies)]
    return _head(f"cmpl-{answer_id}", "text_completion") | {"choices": choices, "usage": _usage(prompt_tokens, replies)}


def _head(answer_id: str, kind: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": "policy"}


def pieces(text: str) -> Iterator[str]:
    return (text[i:i + PIECE] for i in range(0, len(text), PIECE))


def chat_events(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> Iterator[bytes]:
    """Server-sent events of a streamed chat completion."""
    base = _head(f"chatcmpl-{answer_id}", "chat.completion.chunk")
    for index, reply in enumerate(replies):
        wire = _wire_message(reply.message)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": p} for p in pieces(wire.get("reasoning_content") or "")]
        deltas += [{"content": p} for p in pieces(wire["content"] or "")]
        for at, call in enumerate(wire.get("tool_calls", [])):
            deltas.append({"tool_calls": [call | {"index": at, "function": call["function"] | {"arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": at, "function": {"arguments": p}}]} for p in pieces(call["function"]["arguments"])]
        for delta in deltas:
            yield event(base | {"choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}]})
        logprobs = _logprobs(reply) if request.logprobs else None
        yield event(base | {"choices": [{"index": index, "delta": {}, "finish_reason": reply.finish, "logprobs": logprobs}]})
    yield from _end(base, request, prompt_tokens, replies)


def completion_events(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> Iterator[bytes]:
    """Server-sent events of a streamed completion."""
    base = {k: v for k, v in completion_body(answer_id, request, prompt_tokens, replies).items() if k != "usage"}
    for choice in base["choices"]:
        for piece in pieces(choice["text"]):
            yield event(base | {"choices": [{"index": choice["index"], "text": piece, "finish_reason": None, "logprobs": None}]})
        yield event(base | {"choices": [choice | {"text": ""}]})
    yield from _end(base, request, prompt_tokens, replies)


def _end(base: dict[str, Any], request: Request, prompt_tokens: int, replies: list[Reply]) -> Iterator[bytes]:
    if request.usage_event:
        yield event(base | {"choices": [], "usage": _usage(prompt_tokens, replies)})
    yield b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
