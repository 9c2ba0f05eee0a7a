"""A real rollout role whose broker falls silent without closing its connection, as when the broker's node vanishes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.process_run import small_config
from tests.scripted import BrokerProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SILENCE = 6.0


def test_a_worker_ends_when_its_broker_falls_silent_and_not_when_it_has_nothing_to_say(tmp_path, tiny_qwen3):
    config = small_config(tmp_path, tiny_qwen3)
    config.broker.heartbeat_timeout = SILENCE
    broker = BrokerProcess(config)
    try:
        broker.start()
        (broker.run / "logs" / "attempt_1").mkdir(parents=True)
        words = [sys.executable, "-m", "molt_hpc", "rollout", str(broker.run), "--broker", broker.address, "--attempt", "1", "--node-rank", "0"]
        worker = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            observer = broker.client()
            while not (workers := observer.request("status")["workers"]) or not workers["rollout_n0"]["ready"]:
                assert worker.poll() is None, worker.communicate()[0]
                time.sleep(0.2)
            time.sleep(2 * SILENCE)  # without an actor there is nothing to do
            assert worker.poll() is None
            os.kill(broker.pid(), signal.SIGSTOP)
            assert worker.wait(120) == 1
            assert "the broker has been silent for 6 s (broker.heartbeat_timeout)" in worker.communicate()[0]
        finally:
            worker.kill()
            worker.wait(20)
    finally:
        broker.close()
