"""A real run whose vLLM servers are killed and stopped before, in and after a weight transfer, and whose rollout role dies: it goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from molt_hpc.broker.client import BrokerClient
from molt_hpc.guard import descendants
from molt_hpc.observe.metrics import read_metrics
from tests.e2e.test_main_job import find_victim, processes_of, start
from tests.process_run import ECHO_AGENT, small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

TIMEOUT = 10.0
UNHURRIED = "import time\n" + ECHO_AGENT.replace("        return", "        time.sleep(1.0)  # the cores are for starting servers\n        return")


class Observer:
    """Watches a run from outside: its log, its metrics and the broker's status."""

    def __init__(self, config, folder):
        self.config, self.run = config, Path(config.output_dir)
        self.process = start(config, folder)
        self.log = self.run / "logs" / "attempt_1" / "broker.log"

    def until(self, condition, what: str, seconds: float = 240.0, pause: float = 0.2):
        def look():
            try:
                return condition()
            except TimeoutError:  # of a broker that does not answer: the assertions below say why, if its run has ended
                return None

        deadline = time.monotonic() + seconds
        while not (value := look()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}; the broker's log:\n{self.log.read_text()[-3000:]}"
            time.sleep(pause)
        return value

    def engines(self) -> dict[str, str]:
        endpoint = json.loads((self.run / "endpoint.json").read_text())
        client = BrokerClient(self.run, endpoint["address"], "tool", "test", 1)
        try:
            workers = client.request("status")["workers"]
        finally:
            client.close()
        return {name: state for worker in workers.values() for name, state in worker["engines"].items()}

    def both_serve(self) -> None:
        self.until(lambda: sum(state.startswith("serves") for state in self.engines().values()) == 2, "both engines to serve")

    def wait_for(self, when: str) -> None:
        """Until just before the next update (its batch is there), until its transfer begins, or until it is over."""
        if when == "before":
            known = len(list((self.run / "trajectories").glob("step_*")))
            self.until(lambda: len(list((self.run / "trajectories").glob("step_*"))) > known, "the next batch", pause=0.005)
        else:
            text, start = {"in": "sending version", "after": "engines serve version"}[when], self.log.stat().st_size
            self.until(lambda: text in self.log.read_text()[start:], f"{text!r} in the log", pause=0.005)

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def lost(self) -> list[str]:
        return [text for record in read_metrics(self.run) for text in record["engines_lost"]]

    def server(self, index: int) -> int:
        """The process of engine `index`'s HTTP server; the engines differ by their seed."""
        seed = self.config.train.seed + index
        lines = [line for line in processes_of(self.run)
                 if f"--seed {seed} " in line and "vllm_launch serve" in line and "molt_hpc.guard" not in line]
        return min(int(line.split()[0]) for line in lines)

    def core(self, index: int) -> int:
        """The process that holds its model; a server may have others for a moment."""
        return next(pid for pid in descendants(self.server(index)) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture
def observer(tmp_path, tiny_models):
    config = small_config(tmp_path, tiny_models("qwen3", hidden=512, layers=4), prompts=4000, agent=UNHURRIED)
    config.train.num_episodes, config.actor.adam.lr = 10, 1e-4
    config.vllm.num_engines, config.vllm.max_restarts, config.vllm.stall_timeout = 2, 10, TIMEOUT
    config.weights.timeout, config.weights.bucket_bytes = TIMEOUT, 1 << 20
    config.launch.socket_dir = str(tmp_path / "sockets")
    (tmp_path / "sockets").mkdir()
    made = Observer(config, tmp_path)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGTERM)
    made.process.communicate(timeout=120)
    assert processes_of(made.run) == [] and os.listdir(config.launch.socket_dir) == []


def test_engines_that_are_killed_or_stopped_come_back_and_the_run_goes_on(observer):
    # beside the transfer, whoever asks the engine first finds out: a request of a rollout or the next update's pause
    doing = {"before": ("serving", "pausing"), "in": ("transferring",), "after": ("serving", "pausing")}
    for turn, (when, number) in enumerate((when, number) for when in doing for number in (signal.SIGKILL, signal.SIGSTOP)):
        observer.until(lambda: observer.steps() >= 1, "the first step")
        observer.both_serve()
        name, known, pid = f"rollout_n0_e{turn % 2}", len(observer.lost()), observer.core(turn % 2)
        observer.wait_for(when)
        os.kill(pid, number)
        text = observer.until(lambda known=known: observer.lost()[known:], f"{name} to be lost", 6 * TIMEOUT)[0]
        assert text.startswith(tuple(f"{name} while {phase} version " for phase in doing[when])), (when, number, text)
        steps = observer.steps()
        observer.until(lambda steps=steps: observer.steps() >= steps + 2, "two more steps", 6 * TIMEOUT)
        if when == "in":  # the other one is told that nothing more will come, and goes on
            assert all(text.startswith(name) for text in observer.lost()[known:]), observer.lost()[known:]
    observer.both_serve()
    os.kill(find_victim(observer.run, "rollout"), signal.SIGKILL)
    observer.until(lambda: len(observer.engines()) < 2, "the role's end")
    observer.both_serve()
    steps = observer.steps()
    observer.until(lambda: observer.steps() >= steps + 2, "two more steps")
    records = read_metrics(observer.run)
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert all(r["staleness_max"] == 0 and r["ledger_balance"] == 0 and r["logprob_gap_max"] < 1e-4 for r in records)
    assert max(r["engines_serving"] for r in records) == 2 and min(r["engines_serving"] for r in records) == 1
