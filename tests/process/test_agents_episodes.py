"""Whole rollouts: the user's file in a real agent process, a scripted engine, the record that comes out."""

from __future__ import annotations

import asyncio
import json
import textwrap

import numpy as np
import pytest

from molt_hpc.rollout.engine import EngineError
from molt_hpc.rollout.episode import DataFault, EnvEpisode
from molt_hpc.rollout.isolation import AgentLate, AgentPool
from tests.process_run import small_config
from tests.scripted_model import ScriptedEngine, chat_config, failing, lease_of

GUESS = """
    from molt_hpc.agents import Env, Result

    class Guess(Env):
        def reset(self, state):
            self.tries = 0
            return state["observation"]

        def step(self, state):
            self.tries += 1
            if state["label"] in state["action_text"]:
                return Result(reward=1.0, info={"tries": self.tries})
            return Result(reward=-0.25, observation="no, again", terminated=self.tries == 3)
"""


def turn_rewards(rollout):
    assert all((s.extras["turn_rewards"][:, 0] == s.action_spans[:, 1] - 1).all() for s in rollout.segments)
    return [reward for segment in rollout.segments for reward in segment.extras["turn_rewards"][:, 1]]


def answers(*texts):
    left = list(texts)
    return lambda prompt, sampling: left.pop(0)


def test_an_env_gets_its_feedback_between_the_templates_seams(play):
    done = play(GUESS, answers("7", "it is 42"))
    rollout = done.outcome
    assert rollout.reward == 0.75 and rollout.info == {"tries": 2.0} and rollout.turns == 2 and turn_rewards(rollout) == [-0.25, 1.0]
    assert rollout.stop_reason == "terminated" and rollout.terminated and not rollout.truncated
    assert done.text() == ("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\nno, again<|im_end|>\n"
                           "<|im_start|>assistant\nit is 42<|im_end|>")
    segment = rollout.segments[0]
    sampled = [i for _, _, ids in done.engine.calls for i in ids]
    assert segment.token_ids[segment.action_mask()].tolist() == sampled and len(rollout.segments) == 1
    assert done.engine.calls[1][0] == segment.token_ids[:segment.action_spans[1][0]].tolist()


def test_an_env_without_a_template_appends_text_as_it_is(play):
    done = play(GUESS, answers("7", "42"), templated=False, lease=lease_of(label="42", text="how many? "))
    assert done.text() == "how many? 7<|im_end|>no, again42<|im_end|>"


def test_a_labs_molt_env_with_hand_written_seams_runs_after_one_rename(play):
    done = play("""
        import numpy
        from molt_hpc.agents import Env, Result, StepEnvRunner

        class Helper(Env):
            pass

        class GeoEnv(Env):
            def __init__(self):
                self.turn = 0

            async def reset(self, state):
                return {"observation": state["observation"]}

            async def step(self, state) -> Result:
                self.turn += 1
                assert state["sampling_params"].temperature == 1.0 and state["action_text"].endswith("<|im_end|>")
                reward = numpy.float32(self.turn)
                if self.turn == 2:
                    text = "\\n<|im_start|>user\\ndone<|im_end|>\\n"
                    return Result(reward=reward, observation=text, terminated=True, info={"r": reward, "s": "x"})
                text = "\\n<|im_start|>user\\n<tool_response>\\n5\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n<think>\\n"
                return Result(reward=reward, observation=text, terminated=False)

        class AgentRunner(StepEnvRunner):
            def __init__(self):
                super().__init__(GeoEnv)
    """)
    assert done.outcome.reward == 3.0 and done.outcome.info == {"r": 2.0}
    assert done.text().endswith("fine<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
                                "<|im_start|>assistant\n<think>\nfine<|im_end|>")


def test_observations_may_be_tool_messages_or_exact_tokens_and_reset_gets_seed_and_options(play):
    done = play("""
        from molt_hpc.agents import Env, Result

        class Tools(Env):
            def reset(self, state):
                assert state["seed"] == 5000 and state["options"] == {"level": 3} and state["messages"][0]["content"] == "hello"
                self.turn = 0
                return [{"role": "system", "content": "brief"}, *state["messages"]], {"info": 1}

            def step(self, state):
                self.turn += 1
                said = {1: [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}], 2: [40, 41, 42]}.get(self.turn, "")
                return Result(observation=said, terminated=self.turn == 3, sampling_params={"temperature": 0.5} if self.turn == 2 else None)
    """, lease=lease_of(number=5, options={"level": 3}))
    text = done.prompt()
    assert text.startswith("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\nhello")
    assert ("fine<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nfine") in text
    assert done.engine.calls[2][0][-3:] == [40, 41, 42]
    assert [s.temperature for s in done.outcome.segments] == [1.0, 0.5]
    done.outcome.check()


def test_limits_of_turns_and_tokens_truncate(play):
    endless = GUESS.replace("self.tries == 3", "False")
    done = play(endless, "7", rollout={"max_turns": 4})
    assert (done.outcome.stop_reason, done.outcome.turns, done.outcome.truncated, done.outcome.terminated) == ("turn_limit", 4, True, False)
    done = play(endless, "7", max_len=60)
    assert done.outcome.stop_reason == "token_limit" and done.outcome.truncated
    assert len(done.outcome.segments[0].token_ids) == done.outcome.segments[0].action_spans[-1][1] <= 60
    assert isinstance(play(endless, max_len=5).outcome, DataFault)


CHAT = """
    from openai import AsyncOpenAI
    from molt_hpc.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

    class MathAgent(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            asked = ctx.sampling_params
            answer = await client.chat.completions.create(model=ctx.model_name, messages=list(ctx.messages),
                                                          max_tokens=asked.max_tokens, temperature=asked.temperature)
            verdict = await ctx.judge(f"is {answer.choices[0].message.content} right?", temperature=0)
            return Result(reward=float(ctx.label in answer.choices[0].message.content), info={"verdict": len(verdict)}, turn_rewards=[0.5])

    class AgentRunner(ChatAgentRunner):
        def __init__(self):
            super().__init__(MathAgent)
"""


def test_a_labs_molt_chat_agent_runs_and_its_judge_is_not_trained(play):
    done = play(CHAT, lambda prompt, sampling: "yes" if "right?" in prompt else "it is 42")
    assert done.outcome.reward == 1.0 and done.outcome.info == {"verdict": 3.0} and turn_rewards(done.outcome) == [0.5]
    assert done.text() == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nit is 42<|im_end|>" and len(done.engine.calls) == 2
    wrong = play(CHAT.replace("turn_rewards=[0.5]", "turn_rewards=[0.5, 1]")).outcome
    assert str(wrong) == "the agent gave 2 turn_rewards for 1 sampled replies"


def test_a_blocking_chat_agent_on_anthropic_runs_on_a_thread_and_is_closed(play, tmp_path):
    done = play(f"""
        import anthropic
        from molt_hpc.agents import ChatAgent, Result

        class Blocking(ChatAgent):
            def run(self, ctx):
                client = anthropic.Anthropic(base_url=ctx.session_url, api_key=ctx.api_key)
                for _ in range(2):
                    text = client.messages.create(model="policy", max_tokens=20, messages=ctx.messages).content[0].text
                return Result(reward=len(text))

            def close(self):
                open({str(tmp_path / "closed")!r}, "w")
    """)
    assert done.outcome.reward == 4 and len(done.outcome.segments) == 2 and (tmp_path / "closed").exists()


def test_a_harness_in_a_process_of_its_own_is_recorded(play):
    done = play("""
        import os, subprocess, sys
        from molt_hpc.agents import ChatAgent, Result

        PROGRAM = "import openai; asked = [{'role': 'user', 'content': 'hi'}]\\n" \\
                  "print(openai.OpenAI().chat.completions.create(model='policy', messages=asked).choices[0].message.content)"

        class Harness(ChatAgent):
            def run(self, ctx):
                words, env = [sys.executable, "-c", PROGRAM], os.environ | ctx.environment()
                said = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout
                return Result(reward=float(said == "fine\\n"))
    """)
    assert done.outcome.reward == 1.0 and done.text() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>"


def test_what_goes_wrong_in_a_chat_agent_is_a_fault_of_the_one_whose_fault_it_is(play):
    failed = play(CHAT.replace("return Result(", "raise KeyError('mine')\n            return Result("))
    assert isinstance(failed.outcome, DataFault) and "KeyError: 'mine'" in str(failed.outcome) and "agent.py" in failed.outcome.traceback
    assert isinstance(play(CHAT, failing(9, "")).outcome, EngineError)
    silent = "from molt_hpc.agents import ChatAgent, Result\nclass A(ChatAgent):\n    def run(self, ctx): return Result()\n"
    assert "without one reply" in str(play(silent).outcome)
    assert "A.run must return a Result, it returned int" in str(play(silent.replace("Result()", "5")).outcome)


@pytest.mark.parametrize("style", ["async", "blocking"])
def test_the_deadline_ends_a_chat_agent_without_costing_its_process(play, style):
    wait = {"async": "async def run(self, ctx):\n        import asyncio; await asyncio.sleep(1000)",
            "blocking": "def run(self, ctx):\n        import openai\n"
                        "        client = openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key)\n"
                        "        while True: client.chat.completions.create(model='policy', messages=ctx.messages)"}[style]
    file = f"from molt_hpc.agents import ChatAgent, Result\nclass A(ChatAgent):\n    {wait}\n"
    done = play(file, latency=0.2, lease=lease_of(timeout=1.0))
    assert isinstance(done.outcome, TimeoutError) and not done.episode.hung
    assert isinstance(done.outcome, AgentLate) == (style == "async")


def test_the_deadline_passes_while_the_engine_samples(play):
    done = play(CHAT, latency=30.0, lease=lease_of(label="42", timeout=1.0))
    assert str(done.outcome) == "the engine was still generating" and not isinstance(done.outcome, AgentLate) and not done.episode.hung


def test_one_process_runs_no_more_rollouts_than_it_may(tmp_path, dialect):
    (tmp_path / "agent.py").write_text(textwrap.dedent("""
        import asyncio
        from molt_hpc.agents import Env, Result

        class Count(Env):
            now = most = 0

            async def step(self, state):
                Count.now += 1
                Count.most = max(Count.most, Count.now)
                await asyncio.sleep(0.05)
                Count.now -= 1
                return Result(reward=Count.most)
    """))
    config = chat_config(concurrency=3, processes=1)

    async def main():
        pool = AgentPool(str(tmp_path / "agent.py"), config.agent, 12, tmp_path, "test")
        try:
            await pool.wait_ready()
            engine = ScriptedEngine(dialect, lambda prompt, sampling: "fine")
            return await asyncio.gather(*(EnvEpisode(lease_of(number=i), config, dialect, engine, pool.pick()).run() for i in range(12)))
        finally:
            await pool.close()

    assert max(r.reward for r in asyncio.run(main())) == 3


def test_settings_that_would_do_nothing_are_errors(play):
    with pytest.raises(ValueError, match="agent.tool_parser, agent.reasoning_parser and agent.image_folder have no effect"):
        play(GUESS, agent={"tool_parser": "hermes"})
    with pytest.raises(ValueError, match="needs data.apply_chat_template"):
        play(CHAT, templated=False)


def test_a_record_with_branches_survives_the_wire(play):
    from molt_hpc.records import Rollout

    done = play(CHAT.replace("turn_rewards=[0.5]", "turn_rewards=[1, 2, 3]").replace("max_tokens=", "n=3, max_tokens="))
    back = Rollout.from_wire(*done.outcome.to_wire())
    assert turn_rewards(back) == [1.0, 2.0, 3.0] and len(back.segments) == 3
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(back.segments, done.outcome.segments))


def test_prompt_rows_may_bring_tools_and_options(tmp_path):
    from molt_hpc.config import DataConfig
    from molt_hpc.data.prompts import read_files

    tools = [{"type": "function", "function": {"name": "f"}}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x", "tools": t, "options": {"level": 2}}) + "\n" for t in (tools, json.dumps(tools))))
    assert [(r["tools"], r["options"]) for r in read_files(DataConfig(prompt_dataset=str(path)))[0]] == [(tools, {"level": 2})] * 2
    path.write_text(json.dumps({"prompt": "x", "tools": "[" }) + "\n")
    with pytest.raises(ValueError, match="prompts.jsonl:1: 'tools' is neither"):
        read_files(DataConfig(prompt_dataset=str(path)))


def test_agent_processes_must_have_room_for_what_a_worker_keeps_in_flight(tmp_path):
    config = small_config(tmp_path)
    config.agent.processes, config.agent.concurrency, config.rollout.concurrency = 2, 8, 17
    with pytest.raises(ValueError, match="agent.concurrency: 2 processes x 8 are fewer than rollout.concurrency 17"):
        config.check()
    config.rollout.concurrency = 16
    config.check()
