"""Gymnasium environments that are played in text.

    class Lake(GymnasiumEnv):
        env_id = "FrozenLake-v1"

        def action(self, text):
            return {"left": 0, "down": 1, "right": 2, "up": 3}.get(text.strip().lower())

The prompt row's `options` may hold `make` (arguments of gymnasium.make); the whole of it goes to the environment's reset.
"""

from typing import Any

import gymnasium

from molt_hpc.agents.base import Env, Result


class GymnasiumEnv(Env):
    """One episode of `env_id`: the first observation is put behind the prompt's last message, each reply is an action."""

    env_id = ""
    invalid = "That is not a valid action."
    """What the policy is told, at no cost, when `action` gives None."""

    def make(self, options: dict[str, Any]) -> gymnasium.Env:
        return gymnasium.make(self.env_id, **options.get("make", {}))

    def action(self, text: str) -> Any:
        """The environment's action for a reply, None if it is none."""
        return text.strip()

    def text(self, observation: Any) -> str:
        return str(observation)

    def reset(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        options = state["options"] or {}
        self.env = self.make(options)
        observation, _ = self.env.reset(seed=state["seed"], options=options or None)
        *before, last = state["messages"]
        return [*before, last | {"content": f"{last['content']}\n\n{self.text(observation)}"}]

    def step(self, state: dict[str, Any]) -> Result:
        action = self.action(state["reply_text"])
        if action is None:
            return Result(observation=self.invalid, terminated=False)
        observation, reward, terminated, truncated, info = self.env.step(action)
        return Result(reward, self.text(observation), terminated, truncated, info)

    def close(self) -> None:
        if hasattr(self, "env"):
            self.env.close()
