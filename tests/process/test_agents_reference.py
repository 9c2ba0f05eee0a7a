"""The reference agents and the adapters, each with the real package it is for; an agent framework that nobody here wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scripted_model import lease_of

AGENTS = Path(__file__).parents[2] / "launchers" / "agents"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'


def solver(prompt, sampling):
    """Calls the tool once, then answers with what it printed."""
    if "<tool_response>" not in prompt:
        return CALL
    return "it is \\boxed{" + prompt.rsplit("<tool_response>\n", 1)[1].partition("\n")[0] + "}"


def test_boxed_mathematics(play):
    assert play(AGENTS / "math_boxed.py", r"so \boxed{42.0}").outcome.reward == 1.0
    done = play(AGENTS / "math_boxed.py", "dunno").outcome
    assert done.reward == 0.0 and done.info == {"answered": 0.0}


@pytest.mark.parametrize("name, parser", [("python_tool_env", ""), ("python_tool_openai", "hermes"), ("python_tool_anthropic", "hermes")])
def test_the_three_python_tool_agents_see_the_same_tokens(play, name, parser):
    from molt_hpc.agents.python_tool import SCHEMA

    done = play(AGENTS / f"{name}.py", solver, agent={"tool_parser": parser}, lease=lease_of(label="42", tools=[SCHEMA]))
    assert done.outcome.reward == 1.0 and done.outcome.info == {"calls": 1.0, "answered": 1.0}, done.outcome
    assert len(done.outcome.segments) == 1 and len(done.outcome.segments[0].action_spans) == 2
    conversation = done.text().partition("<|im_start|>user")[2]
    assert conversation == (f"\nhello<|im_end|>\n<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n"
                            "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\nit is \\boxed{42}<|im_end|>")


@pytest.mark.parametrize("name, parser", [("python_tool_env", ""), ("python_tool_openai", "hermes"), ("python_tool_anthropic", "hermes")])
def test_a_python_tool_agent_that_fills_the_context_is_truncated(play, name, parser):
    done = play(AGENTS / f"{name}.py", CALL.replace("6 * 7", "'7' * 1000"), agent={"tool_parser": parser}, max_len=400).outcome
    assert done.truncated and done.reward == 0.0 and done.turns == 1


def test_the_compacting_agent_leaves_a_segment_for_each_stretch(play):
    def script(prompt, sampling):
        if "Sum up" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return "short"
        return r"\boxed{42}" if prompt.count("short") and prompt.count("Go on") > 1 else "thinking " * 12

    done = play(AGENTS / "compacting.py", script, max_len=700)
    rollout = done.outcome
    assert rollout.reward == 1.0 and rollout.info["summaries"] >= 1 and len(rollout.segments) == rollout.info["summaries"] + 1
    assert max(len(s.token_ids) for s in rollout.segments) < 700
    sampled = sum(len(ids) for _, _, ids in done.engine.calls)
    assert sum(int(s.action_mask().sum()) for s in rollout.segments) == sampled


@pytest.mark.slow
def test_a_smolagents_agent_runs_unchanged_and_the_replies_that_it_edits_open_segments(play):
    pytest.importorskip("smolagents")

    def script(prompt, sampling):
        turn = prompt.count("<|im_start|>assistant")
        return ('Thought: add\n<code>\nprint(add(40, 2))\n</code>', 'Thought: done\n<code>\nfinal_answer(42)\n</code>')[min(turn, 2) - 1]

    done = play("""
        from smolagents import CodeAgent, OpenAIServerModel, tool
        from molt_hpc.agents import ChatAgent, Result

        @tool
        def add(a: int, b: int) -> int:
            '''Adds.

            Args:
                a: one number
                b: another
            '''
            return a + b

        class Smol(ChatAgent):
            def run(self, ctx):
                model = OpenAIServerModel("policy", api_base=ctx.base_url, api_key=ctx.api_key)
                agent = CodeAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
                return Result(reward=float(str(agent.run(ctx.prompt)) == ctx.label))
    """, script, max_len=60_000)
    assert done.outcome.reward == 1.0, done.outcome
    assert done.outcome.turns == 2 and "Calling tools:" in done.prompt() and "Execution logs:\n42" in done.prompt()
    assert [s.token_ids[s.action_mask()].tolist() for s in done.outcome.segments] == [ids for _, _, ids in done.engine.calls]


LAKE = """
    from molt_hpc.agents.adapters.gymnasium import GymnasiumEnv

    class Lake(GymnasiumEnv):
        env_id = "FrozenLake-v1"

        def action(self, text):
            return {"left": 0, "down": 1, "right": 2, "up": 3}.get(text.strip())

        def text(self, observation):
            return f"You stand on field {int(observation)}."
"""


def test_a_gymnasium_environment_is_played_in_text(play):
    pytest.importorskip("gymnasium")
    moves = iter(["fly", "down", "down", "right", "right", "down", "right"])
    done = play(LAKE, lambda prompt, sampling: next(moves), lease=lease_of(options={"make": {"is_slippery": False}}))
    assert done.outcome.reward == 1.0 and done.outcome.terminated and done.outcome.turns == 7
    text = done.text()
    assert text.startswith("<|im_start|>user\nhello\n\nYou stand on field 0.<|im_end|>")
    assert "not a valid action" in text and "field 14" in text
    fallen = iter(["down", "right"])
    assert play(LAKE, lambda prompt, sampling: next(fallen), lease=lease_of(options={"make": {"is_slippery": False}})).outcome.reward == 0.0


def test_a_reasoning_gym_task_is_scored_by_its_own_rule(play):
    pytest.importorskip("reasoning_gym")
    from molt_hpc.agents.adapters.reasoning_gym import prompt_rows

    row = json.loads(next(prompt_rows("chain_sum", size=1, seed=3)))
    agent = "from molt_hpc.agents.adapters.reasoning_gym import ReasoningGymEnv\n\nclass Agent(ReasoningGymEnv):\n    pass\n"
    right = row["label"]["entry"]["answer"]
    for reply, reward in ((right, 1.0), (f"so <answer> {right} </answer>", 1.0), ("dunno", 0.0)):
        done = play(agent, reply, lease=lease_of([{"role": "user", "content": row["prompt"]}], label=row["label"]))
        assert done.outcome.reward >= reward if reward else done.outcome.reward < 1.0


@pytest.mark.slow
def test_a_verifiers_task_is_played_by_its_own_harness_and_scored_by_its_own_rule(play, tmp_path, request):
    if find_spec("verifiers") is None:
        python = Path(sys.prefix, "verifiers", "bin", "python")  # tests/run.sh makes this environment
        if not python.exists():
            pytest.skip("verifiers is not installed here")
        done = subprocess.run([python, "-m", "pytest", f"{__file__}::{request.node.originalname}"], capture_output=True, text=True, timeout=300)
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        return
    (tmp_path / "sums_taskset.py").write_text('''
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(5):
            yield SumTask(SumData(prompt=f"What is {i} + {i}?", answer=str(2 * i)), self.config.task)

__all__ = ["SumTaskset"]
''')
    agent = "from molt_hpc.agents.adapters.verifiers import VerifiersAgent\n\nclass Agent(VerifiersAgent):\n    taskset = 'sums_taskset'\n"
    for reply, reward in (("it is 4", 1.0), ("dunno", 0.0)):
        done = play(agent, reply, lease=lease_of(label=2, timeout=120.0))
        assert done.outcome.reward == reward, done.outcome
        assert done.text() == f"<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>"
