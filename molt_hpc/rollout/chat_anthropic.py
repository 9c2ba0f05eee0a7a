"""The Anthropic wire: messages, from JSON to the common request and from a reply to JSON or events. Pure.

`thinking` is honoured through the chat template's enable_thinking; its budget is bounded by max_tokens alone.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from molt_hpc.rollout.chat_openai import Reply, Request, asked, contents, pieces, refuse_rest, take_messages
from molt_hpc.rollout.dialect import Message
from molt_hpc.rollout.sampling import Unsupported

LABELS = {"metadata", "service_tier", "cache_control"}
ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


def parse_messages(body: dict[str, Any], counting: bool = False) -> Request:
    """Raises Unsupported or ValueError. counting: max_tokens may be missing."""
    body = asked(body, LABELS)
    system, turns = body.pop("system", ""), take_messages(body)
    if turns[-1].get("role") == "assistant":
        raise Unsupported("messages", "messages: a reply cannot be begun by the client: the last message must be the user's")
    messages: list[Message] = [{"role": "system", "content": _text(system)}] if system else []
    for turn in turns:
        messages += _user(turn) if turn.get("role") == "user" else [_assistant(turn)]
    if "max_tokens" not in body and not counting:
        raise Unsupported("max_tokens", "max_tokens: field required")
    sampling = {name: body.pop(name) for name in ("temperature", "top_p", "top_k", "max_tokens") if name in body}
    sampling |= {"stop": body.pop("stop_sequences")} if "stop_sequences" in body else {}
    choice = body.pop("tool_choice", {"type": "auto"})
    if choice.get("type") not in ("auto", "none", "any", "tool") or choice.get("disable_parallel_tool_use"):
        raise Unsupported("tool_choice", f"tool_choice {choice} is not supported: expected auto, none, any or tool, with parallel calls allowed")
    request = Request(messages, sampling, [_tool(t) for t in body.pop("tools", [])] or None, stream=bool(body.pop("stream", False)),
                      parse_calls=choice["type"] != "none", tool_choice=_choice(choice))
    if "thinking" in body:
        kind = body.pop("thinking").get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise Unsupported("thinking", f"thinking of type {kind!r} is not supported")
        request.options["enable_thinking"] = kind != "disabled"
    refuse_rest(body)
    return request


def _choice(choice: dict[str, Any]) -> Any:
    """In OpenAI's words."""
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if choice["type"] == "any" else choice["type"]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "input_schema" not in tool:
        raise Unsupported("tools", f"tools: {tool.get('type')!r} tools are not supported, only those with an input_schema of their own")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _blocks(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])


def _text(content: Any, between: str = "\n") -> str:
    blocks = _blocks(content)
    kinds = {b.get("type") for b in blocks} - {"text"}
    if kinds:
        raise Unsupported("messages", f"messages: content blocks of type {', '.join(map(str, kinds))} are not supported here")
    return between.join(b["text"] for b in blocks)


def _seen(content: Any) -> Any:
    """The content of a message that may hold images."""
    blocks = _blocks(content)
    if all(block.get("type") != "image" for block in blocks):
        return _text(blocks)
    return contents([{"type": "image", "image": _address(b.get("source") or {})} if b.get("type") == "image" else b for b in blocks])


def _address(source: dict[str, Any]) -> str | None:
    return f"data:{source['media_type']};base64,{source['data']}" if source.get("type") == "base64" else source.get("url")


def _user(turn: dict[str, Any]) -> list[Message]:
    """Results of tools become messages of their own, in their order; text stays the user's."""
    messages, texts = [], []
    for block in _blocks(turn.get("content")):
        if block.get("type") == "tool_result":
            shown = _seen(block.get("content"))
            if block.get("is_error"):
                shown = contents([{"type": "text", "text": "Error: "}, *_blocks(shown)])
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": shown})
        else:
            texts.append(block)
    return messages + ([{"role": "user", "content": _seen(texts)}] if texts or not messages else [])


def _assistant(turn: dict[str, Any]) -> Message:
    if turn.get("role") != "assistant":
        raise Unsupported("messages", f"messages: role {turn.get('role')!r} is not supported")
    blocks = _blocks(turn.get("content"))
    calls = [{"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": b["input"]}}
             for b in blocks if b.get("type") == "tool_use"]
    thoughts = "".join(b["thinking"] for b in blocks if b.get("type") == "thinking")
    message: Message = {"role": "assistant", "content": _text([b for b in blocks if b.get("type") not in ("tool_use", "thinking")], "")}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


# answers -----------------------------------------------------------------------------------


def _content(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": hashlib.sha256(thought.encode()).hexdigest()})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", []):
        given = call["function"]["arguments"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                       "input": given if isinstance(given, dict) else {"arguments": given}})
    return blocks


def _head(answer_id: str, prompt_tokens: int, reply: Reply) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reply.finish, "stop_sequence" if reply.stopped_by else "end_turn")
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": "policy", "content": _content(reply.message),
            "stop_reason": reason, "stop_sequence": reply.stopped_by,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": reply.sampled}}


def message_body(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> dict[str, Any]:
    return _head(answer_id, prompt_tokens, replies[0])


def message_events(answer_id: str, request: Request, prompt_tokens: int, replies: list[Reply]) -> Iterator[bytes]:
    """Server-sent events of a streamed message."""
    whole = _head(answer_id, prompt_tokens, replies[0])
    usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
    yield event("message_start", message=whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})
    for index, block in enumerate(whole["content"]):
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[block["type"]]
        yield event("content_block_start", index=index, content_block=block | empty)
        for delta in _deltas(block):
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta={k: whole[k] for k in ("stop_reason", "stop_sequence")}, usage={"output_tokens": replies[0].sampled})
    yield event("message_stop")


def _deltas(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "tool_use":
        yield from ({"type": "input_json_delta", "partial_json": p} for p in pieces(json.dumps(block["input"])))
    elif block["type"] == "text":
        yield from ({"type": "text_delta", "text": p} for p in pieces(block["text"]))
    else:
        yield from ({"type": "thinking_delta", "thinking": p} for p in pieces(block["thinking"]))
        yield {"type": "signature_delta", "signature": block["signature"]}


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind} | fields)}\n\n".encode()


def error_body(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}
