"""An engine's keeper with real processes: what it answers, and how a server that dies, stops or is dropped comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from molt_hpc import wire
from molt_hpc.guard import descendants
from molt_hpc.rollout.engine import Engine
from molt_hpc.rollout.keeper import Keeper
from molt_hpc.weights.plan import encode_plan
from tests.process_run import small_config

SERVER = Path(__file__).with_name("scripted_engine.py")


class ScriptedEngine(Engine):
    """The real engine around a server that only answers."""

    def command(self, seed):
        return [sys.executable, str(SERVER), str(self.socket)]

    def pid(self):
        return descendants(self.process.pid)[-1]


class Broker:
    """What the keeper told its broker, in order; `until` waits for the next message of a kind."""

    def __init__(self):
        self.messages = asyncio.Queue()

    async def send(self, kind, fields):
        await self.messages.put((kind, fields))

    async def until(self, kind):
        while True:
            found, fields = await asyncio.wait_for(self.messages.get(), 30)
            if found == kind:
                return fields


def with_keeper(tmp_path, body, **vllm):
    """Run `body(keeper, broker, update)` beside a keeper whose server is healthy."""
    config = small_config(tmp_path)
    config.weights.timeout = 3.0
    for name, value in vllm.items():
        setattr(config.vllm, name, value)

    async def main():
        broker = Broker()
        keeper = Keeper("e0", config, partial(ScriptedEngine, "e0", config, 0, 0, tmp_path / "engine.log"), broker.send)
        await keeper.engine.wait_healthy()
        life = asyncio.create_task(keeper.run())
        plan = wire.encode("transfer", {}, {"plan": encode_plan({"updates": [{"bucket": 1}]})})

        def tell(kind, epoch=1, version=5, **fields):
            fields |= {"engine": "e0", "version": version, "epoch": epoch, "join": False}
            keeper.command(kind, fields, wire.decode(plan))

        try:
            await body(keeper, broker, tell)
            return life
        finally:
            life.cancel()
            await keeper.close()

    return asyncio.run(main())


def files(keeper, name):
    return Path(f"{keeper.engine.socket}.{name}")


def test_a_whole_update_is_answered_step_by_step_and_the_engine_serves_only_in_between(tmp_path):
    async def body(keeper, broker, tell):
        for kind, answer in (("pause", "paused"), ("transfer", "applied"), ("resume", "resumed")):
            assert keeper.version is None
            tell(kind)
            fields = await broker.until("engine_answer")
            assert (fields["answer"], fields["version"], fields["epoch"]) == (answer, 5, 1)
            assert fields.get("checksum", "aa") == "aa"
        assert keeper.version == 5
        tell("pause", epoch=2, version=6)
        await broker.until("engine_answer")
        assert keeper.version is None

    with_keeper(tmp_path, body)


@pytest.mark.parametrize("how", ["killed", "dropped", "stopped"])
def test_a_server_that_is_lost_is_reported_and_comes_back_without_weights(tmp_path, how):
    async def body(keeper, broker, tell):
        first = keeper.engine
        if how == "dropped":
            tell("drop", reason="no answer within 3 s")
        else:
            os.kill(first.pid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "stopped":
            tell("drop", reason="no answer within 3 s")
        gone = await broker.until("engine_gone")
        assert gone["starting"] and ("exited with" if how == "killed" else "no answer within 3 s") in gone["reason"]
        assert (await broker.until("engine_ready"))["world_size"] == 1
        assert keeper.engine is not first and keeper.version is None and first.process.poll() is not None
        assert not first.socket.parent.exists()

    with_keeper(tmp_path, body)


def test_an_aborted_transfer_that_comes_free_is_answered_once_and_can_be_repeated(tmp_path):
    async def body(keeper, broker, tell):
        files(keeper, "hold").touch()
        tell("transfer")
        await asyncio.sleep(0.3)
        tell("abort")
        await asyncio.sleep(0.1)
        files(keeper, "hold").unlink()
        assert (await broker.until("engine_answer"))["answer"] == "aborted"
        tell("transfer", epoch=2)
        fields = await broker.until("engine_answer")
        assert (fields["answer"], fields["epoch"]) == ("applied", 2)

    with_keeper(tmp_path, body)


def test_a_server_that_does_not_come_free_of_an_aborted_transfer_is_killed_and_started_again(tmp_path):
    async def body(keeper, broker, tell):
        tell("transfer")
        os.kill(keeper.engine.pid(), signal.SIGSTOP)
        tell("abort")
        gone = await broker.until("engine_gone")
        assert "did not come free of the transfer of version 5 within 1 s" in gone["reason"]
        await broker.until("engine_ready")

    with_keeper(tmp_path, body)


def test_a_route_that_answers_500_fails_its_command_with_the_reason(tmp_path):
    async def body(keeper, broker, tell):
        for kind, route in (("pause", "pause"), ("transfer", "update_weights"), ("resume", "resume")):
            files(keeper, "fail").write_text(route)
            tell(kind)
            fields = await broker.until("engine_answer")
            assert fields["answer"] == "failed" and f"/{route}" in fields["reason"] and "HTTP 500: scripted" in fields["reason"]
        assert keeper.version is None

    with_keeper(tmp_path, body)


def test_a_server_that_keeps_dying_is_given_up(tmp_path):
    async def body(keeper, broker, tell):
        os.kill(keeper.engine.pid(), signal.SIGKILL)
        assert (await broker.until("engine_gone"))["starting"]
        await broker.until("engine_ready")
        os.kill(keeper.engine.pid(), signal.SIGKILL)
        assert not (await broker.until("engine_gone"))["starting"]

    with_keeper(tmp_path, body, max_restarts=1)


def test_an_update_that_lies_about_its_version_is_refused(tmp_path):
    async def body(keeper, broker, tell):
        tell("transfer")
        await broker.until("engine_answer")
        tell("resume", version=6)
        fields = await broker.until("engine_answer")
        assert fields["answer"] == "failed" and "serves version '5' after the update to 6" in fields["reason"]
        assert np.isscalar(fields["epoch"]) and keeper.version is None

    with_keeper(tmp_path, body)


def test_a_folder_too_long_for_a_socket_is_refused_by_name_before_a_server_is_started(tmp_path):
    config = small_config(tmp_path)
    deep = tmp_path / ("d" * 60) / ("e" * 40)
    deep.mkdir(parents=True)
    config.launch.socket_dir = str(deep)
    with pytest.raises(ValueError, match=f"{deep}.* bytes.*launch.socket_dir"):
        ScriptedEngine("rollout_n0_e0", config, 0, 0, tmp_path / "engine.log")
    assert not os.listdir(deep)
