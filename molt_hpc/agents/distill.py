"""The agent of on-policy distillation: one reply to each prompt; the teacher judges its tokens, so there is no reward."""

from molt_hpc.agents import Env, Result


class Reply(Env):
    def reset(self, state):
        return state["observation"]

    def step(self, state):
        return Result(reward=0.0)
