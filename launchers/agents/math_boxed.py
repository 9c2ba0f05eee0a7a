"""One turn of mathematics: the reply's last \\boxed{...} is graded against the label."""

import asyncio

from grading import grade

from molt_hpc.agents import Env, Result


class MathEnv(Env):
    async def step(self, state):
        found = await asyncio.to_thread(grade, state["reply_text"], state["label"])
        return Result(reward=found["reward"], info={"answered": found["answered"]})
