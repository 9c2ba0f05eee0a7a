"""The demo's agent: one turn, scored by reasoning-gym's own scorer.

It serves any reasoning-gym task whose rows carry {"answer": ..., "metadata": {"source_dataset": ...}} as label.
"""

import re
from typing import Any

import reasoning_gym

from molt_hpc.agents import Env, Result

END_OF_TURN = re.compile(r"<\|(im_end|endoftext)\|>.*", re.DOTALL)
NUMBER = re.compile(r"[+-]?\d+")


class Agent(Env):
    """reward: the scorer's, in [0, 1]. score: 1 for an exact answer, else 0, so that pass_rate is the accuracy.

    info: `exact` as score, `number_only` 1 if the reply is a number and nothing else.
    """

    def step(self, state: dict[str, Any]) -> Result:
        entry = state["label"]
        reply = END_OF_TURN.sub("", state["action_text"]).strip()
        reward = float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(reply, entry))
        exact = float(reward == 1.0)
        return Result(reward=reward, score=exact, info={"exact": exact, "number_only": float(bool(NUMBER.fullmatch(reply)))})
