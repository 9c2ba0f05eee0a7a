"""Several turns with a Python tool, the loop driven by the framework.

The policy calls the tool as <tool_call>{"name": "python", "arguments": {"code": ...}}</tool_call>, the form that Qwen's template
teaches for the row's `tools` (molt_hpc.agents.python_tool.SCHEMA), and ends with \\boxed{...}.
"""

import asyncio
import json
import re

from grading import boxed, grade

from molt_hpc.agents import Env, Result
from molt_hpc.agents.python_tool import run_python

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
MAX_CALLS = 8


class PythonToolEnv(Env):
    def __init__(self):
        self.calls = 0

    async def step(self, state):
        text = state["reply_text"]
        codes = [code_of(call) for call in CALL.findall(text)]
        self.calls += len(codes)
        if boxed(text) is not None or not codes or self.calls > MAX_CALLS:
            found = await asyncio.to_thread(grade, text, state["label"])
            info = {"calls": self.calls, "answered": found["answered"]}
            return Result(reward=found["reward"], info=info, truncated=self.calls > MAX_CALLS)
        outputs = [await asyncio.to_thread(run_python, code) if code is not None else "this is not a call of python" for code in codes]
        return Result(observation=[{"role": "tool", "name": "python", "content": output} for output in outputs], terminated=False)


def code_of(call):
    try:
        return str(json.loads(call)["arguments"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
