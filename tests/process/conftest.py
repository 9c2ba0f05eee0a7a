"""A fixture for whole rollouts: the user's file in a real agent process, a scripted engine, the record that comes out."""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path

import pytest

from molt_hpc.rollout.chat_episode import ChatEpisode
from molt_hpc.rollout.chat_server import chat_server
from molt_hpc.rollout.dialect import Dialect
from molt_hpc.rollout.engine import EngineError
from molt_hpc.rollout.episode import DataFault, EnvEpisode
from molt_hpc.rollout.isolation import AgentPool, AgentProcessGone
from tests.chat_templates import make_tokenizer
from tests.scripted_model import ScriptedEngine, chat_config, lease_of


@pytest.fixture(scope="session")
def dialect():
    return Dialect(make_tokenizer("qwen3"))


class Play:
    """What a rollout left behind: the record or the error, the engine's calls, the agent's process."""

    def __init__(self, outcome, engine, episode, dialect):
        self.outcome, self.engine, self.episode, self.dialect = outcome, engine, episode, dialect

    def text(self, segment=0):
        return self.dialect.text(self.outcome.segments[segment].token_ids.tolist())

    def prompt(self, call=-1):
        return self.dialect.text(self.engine.calls[call][0])


@pytest.fixture
def play(tmp_path, dialect):
    """`play(file, script)` runs one rollout; file: a Path or the text of one; agent, rollout: options of their sections; dialect: a fixture's."""
    plain = dialect

    def run(file, script="fine", agent=None, rollout=None, templated=True, latency=0.0, max_len=4096, lease=None, dialect=plain):
        path = file if isinstance(file, Path) else tmp_path / "agent.py"
        if path is not file:
            path.write_text(textwrap.dedent(file))
        config = chat_config(max_len, **(agent or {}))
        config.train.agent_path, config.data.apply_chat_template = str(path), templated
        for name, value in (rollout or {}).items():
            setattr(config.rollout, name, value)

        async def main():
            engine = ScriptedEngine(dialect, (lambda prompt, sampling: script) if isinstance(script, str) else script, latency)
            pool = AgentPool(config.train.agent_path, config.agent, 4, tmp_path, "test")
            server = None
            try:
                await pool.wait_ready()
                server = await chat_server(config, dialect, pool.kind)
                parts = (lease or lease_of(label="42"), config, dialect, engine, pool.pick())
                episode = ChatEpisode(*parts, server=server) if server else EnvEpisode(*parts)
                try:
                    outcome = await episode.run()
                except (DataFault, EngineError, TimeoutError, AgentProcessGone, ValueError) as error:
                    outcome = error
                return Play(outcome, engine, episode, dialect)
            finally:
                await asyncio.gather(pool.close(), *([server.close()] if server else []))

        return asyncio.run(main())

    return run
