"""Tool calls and thinking in a sampled reply, found by vLLM's own parsers, as its chat route would."""

import json
import logging
from typing import Any

from molt_hpc.rollout.sampling import Unsupported

log = logging.getLogger(__name__)


class ReplyParser:
    """tool_parser, reasoning_parser: vLLM's names; empty: replies are not searched. Importing vLLM takes seconds: make it on a thread.

    Raises ValueError for a name that vLLM does not know or that does not suit the tokenizer.
    """

    def __init__(self, tokenizer: Any, tool_parser: str = "", reasoning_parser: str = ""):
        self.tokenizer, self._tools, self._reasoning, self._request = tokenizer, None, None, None
        if not tool_parser and not reasoning_parser:
            return
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self._request = ChatCompletionRequest
        for option, name, manager in (("tool_parser", tool_parser, ToolParserManager.get_tool_parser),
                                      ("reasoning_parser", reasoning_parser, ReasoningParserManager.get_reasoning_parser)):
            try:
                found = manager(name) if name else None
                if found is not None:
                    found(tokenizer)
            except Exception as error:  # whatever a parser raises about this tokenizer is the user's to see
                raise ValueError(f"agent.{option}: vLLM's parser {name!r} cannot be used: {error}") from error
            setattr(self, "_tools" if option == "tool_parser" else "_reasoning", found)

    @property
    def finds_tools(self) -> bool:
        return self._tools is not None

    def changes(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether a reply's text may look different once it is parsed."""
        return self._reasoning is not None or bool(self._tools is not None and tools)

    def parse(self, text: str, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The assistant message for a reply's text (without its end token); arguments of calls are objects where they are JSON."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        try:
            if self._reasoning is not None:
                reasoning, content = self._reasoning(self.tokenizer).extract_reasoning(text, self._body(tools))
                message["content"] = content or ""
                message |= {"reasoning_content": reasoning} if reasoning else {}
            if self._tools is not None and tools:
                body = self._body(tools)
                found = self._tools(self.tokenizer, body.tools).extract_tool_calls(message["content"], body)
                if found.tools_called:
                    message |= {"content": found.content or "", "tool_calls": [_call(c) for c in found.tool_calls]}
        except Exception as error:  # a malformed reply is the policy's business: it goes to the agent as it is
            log.warning("a reply could not be parsed: %s: %s", type(error).__name__, error)
            return {"role": "assistant", "content": text}
        return message

    def grammar(self, tools: list[dict[str, Any]] | None, choice: Any) -> dict[str, Any]:
        """The engine's field structured_outputs for a reply that calls what OpenAI's `tool_choice` names, in the form that the parser finds.

        Raises Unsupported if the parser has no grammar for its form, or the choice names no tool of the request.
        """
        tag = None
        if self._tools is not None and tools:
            try:
                body = self._body(tools, choice)
                tag = self._tools(self.tokenizer, body.tools).get_structural_tag(body)
            except Exception as error:  # whatever vLLM says of the choice is the client's to see
                raise Unsupported("tool_choice", f"tool_choice: {error}") from None
        if tag is None:
            raise Unsupported("tool_choice", "a forced call needs tools and an agent.tool_parser for which vLLM has a grammar")
        return {"structural_tag": tag.model_dump_json()}

    def _body(self, tools: list[dict[str, Any]] | None, choice: Any = None) -> Any:
        forced = {"tool_choice": choice} if choice else {}
        return self._request(model="policy", messages=[{"role": "user", "content": ""}], tools=tools or None, **forced)


def _call(call: Any) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments(call.function.arguments)}}


def arguments(text: Any) -> Any:
    """A call's arguments as an object if they are one; the text itself if the model wrote something else."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text
