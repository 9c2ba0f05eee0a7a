"""A long task in a short context: when the conversation fills most of it, the policy sums it up and goes on from the summary.

Every conversation between two summaries becomes a segment of its own; the summaries are trained like all other replies.
"""

import asyncio

from grading import boxed, grade
from openai import AsyncOpenAI

from molt_hpc.agents import ChatAgent, Result

FULL = 0.6
"""Share of the context after which the conversation is summed up."""
MAX_TURNS = 16
SUM_UP = "Sum up what you have found out so far and what remains to be done, as briefly as you can."
GO_ON = "Go on. Put the final answer into \\boxed{}."


class CompactingAgent(ChatAgent):
    async def run(self, ctx):
        messages, summaries, text = list(ctx.messages), 0, ""
        async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, timeout=None) as client:

            async def ask():
                limit = ctx.sampling_params.max_tokens or ctx.max_length // 8
                answer = await client.chat.completions.create(model=ctx.model_name, messages=messages, max_tokens=limit)
                return answer.choices[0].message, answer.usage.total_tokens

            for _ in range(MAX_TURNS):
                message, used = await ask()
                text = message.content or ""
                if boxed(text) is not None:
                    break
                messages.append(message)
                if used > FULL * ctx.max_length:
                    messages.append({"role": "user", "content": SUM_UP})
                    summary, _ = await ask()
                    summaries += 1
                    messages = [*ctx.messages, {"role": "assistant", "content": summary.content or "..."}]
                messages.append({"role": "user", "content": GO_ON})
        found = await asyncio.to_thread(grade, text, ctx.label)
        return Result(reward=found["reward"], info={"summaries": summaries}, truncated=not found["answered"])
