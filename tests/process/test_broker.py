"""A real broker on real sockets: who gets in, what bad frames do, and a whole run with scripted ends."""

import os
import threading
import time

import numpy as np
import pytest
import zmq

from molt_hpc import wire
from molt_hpc.broker.client import BrokerClient, Refused, RunStopped, create_keys, read_keys
from molt_hpc.records import Prompt, Rollout, Segment
from tests.process_run import BrokerThread, small_config


@pytest.fixture
def broker(tmp_path):
    started = BrokerThread(small_config(tmp_path, prompts=6))
    yield started
    if started.exit_code is None and started._thread.is_alive():
        client = BrokerClient(started.run, started.address, "tool", "teardown", 1)
        client.request("stop", {"reason": "the test is over"})
        client.close()
    started.join(10)


def made_rollout(lease, version, tokens=4):
    ids = np.arange(3 + tokens, dtype=np.int32)
    logprobs = np.zeros(3 + tokens, np.float32)
    logprobs[3:] = -1.0
    segment = Segment(ids, logprobs, np.array([[3, 3 + tokens]], np.int32), np.array([[3, 3 + tokens, version]], np.int32), 1.0)
    return Rollout(lease["group_id"], lease["sample"], lease["attempt"], Prompt(**lease["prompt"]), [segment], 1.0, 1.0, "terminated",
                   True, False, 1, 0.1)


class ScriptedWorker(threading.Thread):
    """Stands in for a rollout node: answers leases and updates at once; `fault` makes every lease fail."""

    def __init__(self, broker, fault=None):
        super().__init__(daemon=True)
        self.client = BrokerClient(broker.run, broker.address, "rollout", "rollout_n0", 1)
        self.fault, self.reason = fault, None
        self.start()

    def run(self):
        socket = self.client._socket

        def send(kind, fields, arrays=None):
            socket.send_multipart(wire.encode(kind, fields, arrays))

        send("ready", {"engines": {"e0": 1}})
        send("credits", {"credits": 3})
        version = -1
        while True:
            if not socket.poll(20_000):
                return
            message = wire.decode(socket.recv_multipart())
            fields = message.fields
            if message.kind == "stop":
                self.reason = fields["reason"]
                return
            if message.kind in ("pause", "transfer", "resume"):
                version = fields["version"]
                answer = {"pause": "paused", "transfer": "applied", "resume": "resumed"}[message.kind]
                send("engine_answer", {"answer": answer, "engine": "e0", "version": version, "epoch": fields["epoch"], "checksum": "aa"})
            for lease in fields.get("leases", ()):
                if self.fault:
                    send("fault", {k: lease[k] for k in ("group_id", "sample", "attempt")} |
                         {"fault": self.fault, "reason": "scripted", "credits": 1})
                else:
                    header, arrays = made_rollout(lease, version).to_wire()
                    send("rollout", header | {"credits": 1}, arrays)


def publish(client, version):
    begin = client.request("update_begin", {"version": version}, timeout=20)
    epoch = {"version": version, "epoch": begin["epoch"]}
    client.call("update_transfer", epoch | {"master_address": "x", "master_port": 1, "backend": "gloo"}, {"plan": np.zeros(2, np.uint8)})
    return begin, client.request("update_sent", epoch | {"checksum": "aa"})


def actor(broker):
    client = BrokerClient(broker.run, broker.address, "actor", "actor", 1)
    client.request("ready")
    return client


def test_a_run_trains_every_prompt_once_and_ends_by_itself(broker):
    worker, client, seen, version = ScriptedWorker(broker), actor(broker), [], 0
    publish(client, 0)
    while (reply := client.call("next_batch", timeout=20)).kind == "batch":
        for _ in range(reply.fields["rollouts"]):
            part = client.receive("rollout", 5)
            rollout = Rollout.from_wire(part.fields, part.arrays())
            assert rollout.segments[0].versions().max() == version
            seen.append((rollout.prompt.ordinal, rollout.sample))
        version = reply.fields["step"]
        client.request("trained", {"step": version})
        publish(client, version)
        client.request("step_done", {"metrics": {"step": version, "version": version}})
    client.request("finished")
    assert sorted(seen) == [(o, s) for o in range(6) for s in range(2)]
    assert broker.join() == 0 and worker.join(5) is None and worker.reason == "the run is done"
    assert [r["groups_trained"] for r in broker.records] == [4, 2]
    assert all(r["ledger_balance"] == 0 for r in broker.records)


def test_before_a_stop_the_actor_saves_once_and_gets_no_other_batch(broker):
    worker, client, supervisor, answers = ScriptedWorker(broker), actor(broker), BrokerClient(broker.run, broker.address, "tool", "t", 1), []
    publish(client, 0)
    asking = threading.Thread(target=lambda: answers.append(supervisor.request("save", timeout=20)))
    reply = client.call("next_batch", timeout=20)
    for _ in range(reply.fields["rollouts"]):
        client.receive("rollout", 5)
    asking.start()
    time.sleep(0.3)
    client.request("trained", {"step": 1})
    publish(client, 1)
    assert client.call("next_batch", timeout=20).kind == "save"
    assert not answers
    with pytest.raises(TimeoutError):
        client.call("next_batch", timeout=1)
    asking.join(5)
    assert answers[0]["step"] == 1
    supervisor.request("stop", {"reason": "the time is over"})
    with pytest.raises(RunStopped, match="the time is over"):
        client.call("next_batch", timeout=5)
    assert broker.join() == 1 and worker.join(5) is None
    supervisor.close()


def test_there_is_nothing_to_save_before_the_run_has_begun(broker):
    supervisor = BrokerClient(broker.run, broker.address, "tool", "t", 1)
    with pytest.raises(Refused, match="roll_call: there is nothing to save"):
        supervisor.request("save", timeout=5)
    supervisor.close()


def test_an_agent_that_always_fails_stops_the_run_with_its_reason(tmp_path):
    broker = BrokerThread(small_config(tmp_path, prompts=100))
    ScriptedWorker(broker, fault="data")
    client = actor(broker)
    publish(client, 0)
    with pytest.raises(RunStopped, match="16 of the last 16 rollouts failed.*scripted"):
        client.call("next_batch", timeout=20)
    assert broker.join() == 1
    assert len((broker.run / "quarantine.jsonl").read_text().splitlines()) >= 16


def test_a_checksum_that_differs_stops_the_run_and_names_the_engine(broker):
    ScriptedWorker(broker)
    client = actor(broker)
    epoch = {"version": 0, "epoch": client.request("update_begin", {"version": 0}, timeout=20)["epoch"]}
    client.call("update_transfer", epoch | {"master_address": "x", "master_port": 1, "backend": "gloo"}, {"plan": np.zeros(2, np.uint8)})
    with pytest.raises(RunStopped, match="e0 has aa"):
        client.request("update_sent", epoch | {"checksum": "bb"})
    assert broker.join() == 1


def test_a_peer_without_the_runs_keys_is_not_heard(broker, tmp_path):
    (tmp_path / "other").mkdir()
    create_keys(tmp_path / "other")
    with pytest.raises(TimeoutError, match="no answer to 'hello'"):
        BrokerClient(tmp_path / "other", broker.address, "actor", "actor", 1, timeout=1.0)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(broker.address)
    plain.send_multipart(wire.encode("hello", {"request": 1, "role": "actor", "name": "actor", "attempt": 1}))
    assert not plain.poll(1000)
    plain.close()
    assert BrokerClient(broker.run, broker.address, "tool", "test", 1).request("status")["missing"] == ["actor", "rollout_n0"]


def test_keys_that_others_can_read_are_refused(broker):
    os.chmod(broker.run / "keys.json", 0o644)
    with pytest.raises(ValueError, match="readable by others"):
        read_keys(broker.run)
    os.chmod(broker.run / "keys.json", 0o600)


def test_a_process_of_another_attempt_is_fenced(broker):
    with pytest.raises(Refused, match="this is attempt 1, not 2"):
        BrokerClient(broker.run, broker.address, "rollout", "rollout_n0", 2)


def test_random_and_wrong_frames_are_counted_and_harm_nobody(broker):
    client = BrokerClient(broker.run, broker.address, "tool", "test", 1)
    random = np.random.default_rng(0)
    for _ in range(2000):
        client._socket.send_multipart([random.bytes(int(random.integers(0, 60))) for _ in range(int(random.integers(1, 4)))])
    with pytest.raises(Refused, match="unknown message 'nonsense'"):
        client.request("nonsense")
    with pytest.raises(Refused, match="bad field"):
        client.request("lookup")
    assert client.request("status")["phase"] == "roll_call"
    assert client.request("status")["bad_frames"] >= 2000


def test_whoever_has_not_said_hello_is_refused(broker):
    client = BrokerClient(broker.run, broker.address, "tool", "test", 1)
    fresh = client._context.socket(zmq.DEALER)
    keys = read_keys(broker.run)
    fresh.curve_serverkey, fresh.curve_publickey, fresh.curve_secretkey = keys["broker_public"], keys["role_public"], keys["role_secret"]
    fresh.linger = 0
    fresh.connect(broker.address)
    fresh.send_multipart(wire.encode("status", {"request": 1}))
    assert fresh.poll(5000)
    assert wire.decode(fresh.recv_multipart()).kind == "refused"
    fresh.close()
