"""The Python-tool agent on the Anthropic client. Needs agent.tool_parser."""

import asyncio

from anthropic import AsyncAnthropic, BadRequestError
from grading import grade

from molt_hpc.agents import ChatAgent, Result
from molt_hpc.agents.python_tool import SCHEMA, run_python

TOOL = {"name": "python", "description": SCHEMA["function"]["description"], "input_schema": SCHEMA["function"]["parameters"]}
MAX_TURNS = 8


class PythonToolAgent(ChatAgent):
    async def run(self, ctx):
        system = "\n".join(m["content"] for m in ctx.messages if m["role"] == "system")
        messages = [m for m in ctx.messages if m["role"] != "system"]
        asked = {"model": ctx.model_name, "tools": [TOOL], "max_tokens": ctx.sampling_params.max_tokens or ctx.max_length}
        text, calls, finished = "", 0, False
        async with AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key, timeout=3600) as client:
            while not finished and calls < MAX_TURNS:
                try:
                    answer = await client.messages.create(messages=messages, **asked, **({"system": system} if system else {}))
                except BadRequestError as error:
                    if "prompt is too long" not in error.message or not calls:
                        raise
                    break
                text = "".join(block.text for block in answer.content if block.type == "text")
                uses = [block for block in answer.content if block.type == "tool_use"]
                calls, finished = calls + len(uses), not uses
                outputs = await asyncio.gather(*(asyncio.to_thread(run_python, str(use.input.get("code", ""))) for use in uses))
                messages = [*messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": use.id, "content": output} for use, output in zip(uses, outputs)]}]
        found = await asyncio.to_thread(grade, text, ctx.label)
        return Result(reward=found["reward"], info={"calls": calls, "answered": found["answered"]}, truncated=not finished)
