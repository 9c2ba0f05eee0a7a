"""Agent processes: whatever user code does, it is bounded, reported, and the pool is whole again."""

import asyncio
import os
import time

import pytest

from molt_hpc.config import AgentConfig
from molt_hpc.rollout.isolation import AgentFault, AgentLate, AgentPool, AgentProcessGone

AGENT = '''
import ctypes, os, subprocess, sys, time
from molt_hpc.agents import Env, Result

class Agent(Env):
    def reset(self, state):
        if state["label"] == "raise":
            raise KeyError("no such label")
        return {"observation": state["observation"] + "!"}

    def step(self, state):
        word = state["action_text"]
        if word == "hang":
            time.sleep(1000)
        if word == "hang in C":
            ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock: nothing else runs in this process
        if word == "exit":
            os._exit(3)
        if word == "sys.exit":
            sys.exit(4)
        if word == "memory":
            return Result(info={"size": len(bytearray(64 << 30))})
        if word == "bomb":
            for _ in range(6):
                if os.fork() == 0:
                    os.setsid()
                    os.fork()
                    time.sleep(1000)
            time.sleep(1000)
        if word == "child":
            return Result(info={"pid": subprocess.Popen(["sleep", "1000"], start_new_session=True).pid})
        if word == "text":
            return "not a Result"
        return Result(reward=0.5, observation=word, terminated=False, info={"length": len(word), "note": "dropped"})
'''


def with_pool(tmp_path, body, agent=AGENT, **options):
    (tmp_path / "agent.py").write_text(agent)

    async def main():
        pool = AgentPool(str(tmp_path / "agent.py"), AgentConfig(**options), 4, tmp_path, "test")
        try:
            await pool.wait_ready()
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(main())


def ask(pool, op, state, timeout=20.0, rollout="r"):
    return pool.pick().call(op, rollout, state, timeout)


async def opened(pool, rollout="r"):
    await ask(pool, "reset", {"observation": "hi", "label": None}, rollout=rollout)


def test_reset_step_and_close_reach_the_users_class(tmp_path):
    async def body(pool):
        assert await ask(pool, "reset", {"observation": "hi", "label": None}) == "hi!"
        result = await ask(pool, "step", {"action_text": "abc"})
        assert result["reward"] == 0.5 and result["observation"] == "abc" and result["info"] == {"length": 3.0}
        assert await ask(pool, "close", None) is None

    with_pool(tmp_path, body)


def test_an_exception_comes_back_with_the_users_traceback(tmp_path):
    async def body(pool):
        with pytest.raises(AgentFault, match="no such label") as error:
            await ask(pool, "reset", {"observation": "hi", "label": "raise"})
        assert "agent.py" in error.value.traceback
        await opened(pool)
        with pytest.raises(AgentFault, match="must return a Result, it returned str"):
            await ask(pool, "step", {"action_text": "text"})

    with_pool(tmp_path, body)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["hang", "hang in C", "bomb"])
def test_a_hanging_step_is_bounded_and_its_process_replaced_with_all_it_started(tmp_path, word):
    async def body(pool):
        await opened(pool)
        await opened(pool, "other")
        hanging = pool.pick()
        bystander = asyncio.ensure_future(hanging.call("step", "other", {"action_text": "hang"}, 60.0))
        await asyncio.sleep(0.1)
        with pytest.raises(AgentLate, match="step did not return") as late:
            await hanging.call("step", "r", {"action_text": word}, 1.0)
        assert late.value.hung
        started = descendants(hanging.process.pid)
        pool.replace(hanging)
        with pytest.raises(AgentProcessGone, match="a rollout hung"):
            await bystander
        await opened(pool)
        assert (await ask(pool, "step", {"action_text": "ab"}))["observation"] == "ab"
        assert len(pool._processes) == 1 and pool.pick() is not hanging
        await asyncio.to_thread(hanging.process.wait)
        return [pid for pid in started if alive(pid)]

    assert with_pool(tmp_path, body) == []


def descendants(pid):
    found = [pid]
    for one in found:
        try:
            found += [int(child) for child in open(f"/proc/{one}/task/{one}/children").read().split()]
        except FileNotFoundError:
            pass
    return found


def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_late_call_of_async_code_is_cancelled_and_its_process_lives_on(tmp_path):
    agent = '''
import asyncio
from molt_hpc.agents import Env, Result

class Agent(Env):
    async def step(self, state):
        await asyncio.sleep(1000 if state["action_text"] == "hang" else 0)
        return Result()
'''

    async def body(pool):
        await opened(pool)
        process = pool.pick()
        with pytest.raises(AgentLate, match="step did not return") as late:
            await process.call("step", "r", {"action_text": "hang"}, 0.5)
        assert not late.value.hung and (await ask(pool, "step", {"action_text": "go"}))["terminated"]
        assert pool.pick() is process

    with_pool(tmp_path, body, agent=agent)


def test_memory_is_limited_and_sys_exit_is_an_error_like_others(tmp_path):
    async def body(pool):
        await opened(pool)
        for word, error in (("memory", "MemoryError"), ("sys.exit", "SystemExit: 4")):
            with pytest.raises(AgentFault, match=error) as fault:
                await ask(pool, "step", {"action_text": word})
            assert "agent.py" in fault.value.traceback
        assert (await ask(pool, "step", {"action_text": "ab"}))["observation"] == "ab"

    with_pool(tmp_path, body, memory_mb=4096)


def test_an_exit_in_user_code_ends_its_calls_and_the_pool_recovers(tmp_path):
    async def body(pool):
        await opened(pool)
        dead = pool.pick()
        with pytest.raises(AgentProcessGone):
            await dead.call("step", "r", {"action_text": "exit"}, 20.0)
        with pytest.raises(AgentProcessGone, match="the agent process ended"):
            await dead.call("close", "r", None, 1000.0)  # at once, not at its deadline
        for _ in range(100):
            if pool._processes[0].process.poll() is not None:
                break
            await asyncio.sleep(0.1)
        await opened(pool)
        assert (await ask(pool, "step", {"action_text": "x"}))["reward"] == 0.5

    with_pool(tmp_path, body)


def test_children_that_user_code_left_behind_end_with_the_pool(tmp_path):
    async def body(pool):
        await opened(pool)
        return int((await ask(pool, "step", {"action_text": "child"}))["info"]["pid"])

    pid = with_pool(tmp_path, body)
    for _ in range(50):
        if not os.path.exists(f"/proc/{pid}"):
            break
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_file_that_cannot_be_imported_is_a_clear_error(tmp_path):
    async def body(pool):
        pass

    with pytest.raises(RuntimeError, match="defines none"):
        with_pool(tmp_path, body, agent="x = 1\n")
