"""Tasks of reasoning-gym: `prompt_rows` writes the prompt file, `ReasoningGymEnv` is the agent that scores replies to it.

    from molt_hpc.agents.adapters.reasoning_gym import ReasoningGymEnv

    class Agent(ReasoningGymEnv):
        pass
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import reasoning_gym

from molt_hpc.agents.base import Env, Result


def prompt_rows(dataset: str, size: int, seed: int, **config: Any) -> Iterator[str]:
    """JSON lines for a prompt file, one for each task of a procedural dataset."""
    for entry in reasoning_gym.create_dataset(dataset, size=size, seed=seed, **config):
        yield json.dumps({"prompt": entry["question"], "label": {"dataset": dataset, "entry": entry}, "source": dataset}, default=str)


@functools.cache
def _scorer(dataset: str) -> Any:
    return reasoning_gym.create_dataset(dataset, size=1, seed=0)


class ReasoningGymEnv(Env):
    """One turn, scored in [0, 1] by the dataset's own rule."""

    def answer(self, text: str) -> str:
        """The part of a reply that is the answer; the default is what stands in the last <answer> tags, or all of it."""
        return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()

    def step(self, state: dict[str, Any]) -> Result:
        label = state["label"]
        return Result(float(_scorer(label["dataset"]).score_answer(self.answer(state["reply_text"]), label["entry"])))
