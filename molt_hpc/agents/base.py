"""Env and Result: the whole interface of a step-wise agent.

The framework owns the loop: it shows the prompt, samples a turn, hands the text to `step`, appends
the observation that comes back and goes on until the environment has ended. The shape is
labs-molt's, so that an agent file written for it runs after `molt.agents` is renamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """What one step gives back.

    reward: added to the rollout's reward. observation: text that the policy sees next, appended as it
    is. terminated: the task is over; truncated: it was cut short by a limit of the environment. info:
    numbers become metrics (`info_<name>`, mean per rollout). score: the rollout's quality
    for pass rates; unset, it is the reward.
    """

    reward: float = 0.0
    observation: str = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: float | None = None


class Env:
    """A task for one rollout; a fresh instance is made for each, and `close` is always called.

    Methods may be plain or `async`. They run in an agent process of their own, so blocking
    code holds up only the rollouts of that process.
    """

    def reset(self, state: dict[str, Any]) -> str:
        """Called once with {observation: the rendered prompt text, label, seed}.

        The string that is returned becomes the prompt's text; the default keeps it as it is.
        """
        return state["observation"]

    def step(self, state: dict[str, Any]) -> Result:
        """Called after each turn with {observation_text, action_text, label, turn}."""
        raise NotImplementedError(f"{type(self).__name__}.step(state) -> Result is missing")

    def close(self) -> None:
        """Called once at the end, also after an error."""
