"""Several turns with a Python tool, as an agent that owns its loop, on the OpenAI client. Needs agent.tool_parser."""

import asyncio
import json

from grading import grade
from openai import AsyncOpenAI, BadRequestError

from molt_hpc.agents import ChatAgent, Result
from molt_hpc.agents.python_tool import SCHEMA, run_python

MAX_TURNS = 8


class PythonToolAgent(ChatAgent):
    async def run(self, ctx):
        messages, text, calls = list(ctx.messages), "", 0
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, timeout=None) as client:
            for _ in range(MAX_TURNS):
                try:
                    answer = await client.chat.completions.create(model=ctx.model_name, messages=messages, tools=[SCHEMA],
                                                                  max_tokens=ctx.sampling_params.max_tokens)
                except BadRequestError as error:
                    if error.code != "context_length_exceeded" or not calls:
                        raise
                    return await self.graded(ctx, text, calls, truncated=True)
                message = answer.choices[0].message
                text = message.content or ""
                if not message.tool_calls:
                    return await self.graded(ctx, text, calls)
                calls += len(message.tool_calls)
                outputs = await asyncio.gather(*(asyncio.to_thread(run_python, code_of(c.function.arguments)) for c in message.tool_calls))
                messages += [message, *({"role": "tool", "tool_call_id": c.id, "content": o} for c, o in zip(message.tool_calls, outputs))]
        return await self.graded(ctx, text, calls, truncated=True)

    async def graded(self, ctx, text, calls, truncated=False):
        found = await asyncio.to_thread(grade, text, ctx.label)
        return Result(reward=found["reward"], info={"calls": calls, "answered": found["answered"]}, truncated=truncated)


def code_of(arguments):
    try:
        return str(json.loads(arguments)["code"])
    except (ValueError, KeyError, TypeError) as error:
        return f"raise SystemExit('this is not a call of python with code: ' + {type(error).__name__!r})"
