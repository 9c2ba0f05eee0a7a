"""Weight updates through a real broker with engines that die, hang, fail, lie and come back: the run goes on and says who was lost."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from molt_hpc.broker.client import BrokerClient, RunStopped
from tests.process_run import BrokerThread, small_config
from tests.scripted import ENGINE_ANSWERS, ScriptedActor, ScriptedWorker

TIMEOUT = 2.0


class Unruly(ScriptedWorker):
    """Misbehaves once: at the `turn`-th command of the kind `when`, in the way `how`. A dropped engine is started again at once."""

    def __init__(self, broker, when: str, how: str, turn: int = 2, name: str = "rollout_n0"):
        self.when, self.how, self.turn, self.told = when, how, turn, []
        super().__init__(broker, name=name, linger=0.1)

    def _receive(self, message):
        if message.kind == "drop":
            self.told.append(("drop", message.fields["reason"]))
            self._restart("dropped")
        else:
            super()._receive(message)

    def _restart(self, reason, up=True):
        self.held.clear()
        self._send("engine_gone", {"engine": self.engine, "reason": reason, "starting": True})
        if up:
            self._send("engine_ready", {"engine": self.engine, "world_size": 1})

    def _command(self, kind, fields):
        self.told.append((kind, fields["epoch"]))
        self.turn -= kind == self.when
        if kind != self.when or self.turn != 0:
            super()._command(kind, fields)
            return
        answer = {"engine": self.engine, "version": fields["version"], "epoch": fields["epoch"], "checksum": "aa"}
        if self.how == "fails":
            self._send("engine_answer", answer | {"answer": "failed", "reason": "HTTP 500"})
        elif self.how == "lies":
            self._send("engine_answer", answer | {"answer": ENGINE_ANSWERS[kind], "checksum": "bb"})
        elif self.how == "is killed":
            self._restart("exited with -9")
        elif self.how == "vanishes":
            self.ended.set()
        elif self.how == "leaves":
            self._send("goodbye", {})
        elif self.how == "repeats itself":
            for epoch in (fields["epoch"], fields["epoch"] - 1, fields["epoch"], fields["epoch"] + 1):
                self._send("engine_answer", answer | {"answer": ENGINE_ANSWERS[kind], "epoch": epoch})
        else:
            assert self.how == "is silent"


class Fixture:
    """A broker on a thread and whatever was connected to it."""

    def __init__(self, folder, **options):
        config = small_config(folder, prompts=20)
        config.weights.timeout, config.vllm.start_timeout, config.broker.max_attempts = TIMEOUT, 2.0, 20
        config.broker.heartbeat_timeout = 3.0
        for name, value in options.items():
            setattr(config.broker, name, value)
        self.config, self.broker, self.ends = config, BrokerThread(config), []

    def add(self, end):
        self.ends.append(end)
        if isinstance(end, ScriptedWorker):
            threading.Thread(target=self._beat, args=(end,), daemon=True).start()
        return end

    def _beat(self, worker):
        while not worker.ended.wait(0.5) and worker.reason is None:
            worker._send("heartbeat", {"running": 0, "rollouts": 0, "sampled_tokens": 0, "progress": []})

    def train(self, actor) -> list[dict]:
        """The whole run; the records of its steps. Every token must be of the version before the step, and every prompt come once."""
        seen = Counter()
        actor.begin()
        while (found := actor.next_batch()) is not None:
            step, rollouts = found
            seen.update((r.prompt.ordinal, r.sample) for r in rollouts)
            assert {r.segments[0].versions().max() for r in rollouts} == {step - 1}
            actor.trained(step)
        assert seen == Counter((o, s) for o in range(20) for s in range(2))
        return self.broker.records

    def status(self):
        client = BrokerClient(self.broker.run, self.broker.address, "tool", "test", 1)
        try:
            return client.request("status")
        finally:
            client.close()

    def ready(self) -> int:
        return sum(worker["ready"] for worker in self.status()["workers"].values())

    def close(self):
        if self.broker.exit_code is None:
            client = BrokerClient(self.broker.run, self.broker.address, "tool", "teardown", 1)
            client.request("stop", {"reason": "the test is over"})
            client.close()
        self.broker.join(10)
        for end in self.ends:
            end.close()


@pytest.fixture
def made(tmp_path):
    fixtures = []

    def make(**options):
        fixtures.append(Fixture(tmp_path, **options))
        return fixtures[-1]

    yield make
    for fixture in fixtures:
        fixture.close()


WAYS = [(when, how) for when in ("pause", "transfer", "resume") for how in ("is silent", "fails", "is killed", "vanishes", "leaves")]


@pytest.mark.slow
@pytest.mark.parametrize("when, how", [*WAYS, ("transfer", "lies")])
def test_whatever_one_engine_does_in_an_update_the_run_goes_on_and_the_step_names_it(made, when, how):
    fixture = made()
    bad = fixture.add(Unruly(fixture.broker, when, how))
    good, actor = fixture.add(ScriptedWorker(fixture.broker, name="rollout_n1")), fixture.add(ScriptedActor(fixture.broker))
    deadline = time.monotonic() + 40
    while fixture.ready() < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    records = fixture.train(actor)
    assert time.monotonic() < deadline
    doing = {"pause": "pausing", "transfer": "transferring", "resume": "resuming"}[when]
    lost = [text for record in records for text in record["engines_lost"]]
    assert lost[0].startswith(f"rollout_n0_e0 while {doing} version 1: "), lost
    if how in ("vanishes", "leaves"):
        gone = fixture.status()["workers"].get("rollout_n0")
        assert gone is None or gone["engines"] == {"rollout_n0_e0": "starting"}
        return
    # it came back, was given the weights, and served again
    assert len(lost) == 1 and fixture.status()["workers"]["rollout_n0"]["engines"] == {"rollout_n0_e0": "serves 5"}
    assert records[-1]["engines_serving"] == 2 and good.sent
    if how != "is killed":
        assert [reason for kind, reason in bad.told if kind == "drop"]


def test_an_engine_lost_in_the_transfer_costs_one_epoch_and_the_trainer_is_told_to_stop(made):
    fixture = made()
    fixture.add(Unruly(fixture.broker, "transfer", "is killed"))
    fixture.add(ScriptedWorker(fixture.broker, name="rollout_n1"))
    actor = fixture.add(Slow(fixture.broker))
    while fixture.ready() < 2:
        time.sleep(0.02)
    actor.begin()
    first = actor.epochs[-1]
    actor.publish(1)
    assert actor.epochs == [first + 1, first + 2] and actor.stopped == [first + 1]
    assert actor.report["epoch"] == first + 2 and actor.report["seconds"]["aborting"] > 0


class Slow(ScriptedActor):
    """Sends until it is told to stop, or for half the deadline."""

    def __init__(self, broker):
        super().__init__(broker)
        self.stopped = []

    def transfer(self):
        deadline = time.monotonic() + TIMEOUT / 2
        while time.monotonic() < deadline:
            if word := self.client.notice("update_stop"):
                self.stopped.append(word["epoch"])
                return {"failed": "told to stop"}
            time.sleep(0.01)
        return {"checksum": "aa"}


def test_double_late_and_foreign_answers_change_nothing(made):
    fixture = made()
    for number, when in enumerate(("pause", "transfer", "resume")):
        fixture.add(Unruly(fixture.broker, when, "repeats itself", name=f"rollout_n{number}"))
    records = fixture.train(fixture.add(ScriptedActor(fixture.broker)))
    assert [record["engines_lost"] for record in records] == [[]] * 5


def test_the_only_engine_dies_in_a_transfer_comes_back_and_is_updated(made):
    fixture = made()
    worker = fixture.add(Unruly(fixture.broker, "transfer", "is killed"))
    records = fixture.train(fixture.add(ScriptedActor(fixture.broker)))
    assert records[0]["engines_lost"] == ["rollout_n0_e0 while transferring version 1: exited with -9"]
    assert worker.sent


def test_an_update_whose_engines_do_not_come_back_fails_with_the_reason(made):
    fixture = made(heartbeat_timeout=60.0)
    worker = Unruly(fixture.broker, "pause", "is silent")
    fixture.add(worker)
    worker._restart = lambda reason, up=True: worker._send("engine_gone", {"engine": worker.engine, "reason": reason, "starting": False})
    with pytest.raises(RunStopped, match="no engine is left, and none came back within 2 s; rollout_n0_e0 was lost while pausing: no answer"):
        fixture.train(fixture.add(ScriptedActor(fixture.broker)))
    assert fixture.broker.join() == 1


def test_an_engine_that_resumed_is_leased_to_while_another_still_resumes(made):
    fixture = made()
    slow = fixture.add(Unruly(fixture.broker, "resume", "is silent", turn=1))
    quick, actor = fixture.add(ScriptedWorker(fixture.broker, name="rollout_n1")), fixture.add(ScriptedActor(fixture.broker))
    while fixture.ready() < 2:
        time.sleep(0.02)
    publishing = threading.Thread(target=actor.begin)
    publishing.start()
    deadline = time.monotonic() + 3
    while not quick.sent and time.monotonic() < deadline:
        time.sleep(0.02)
    assert quick.sent and not slow.sent and publishing.is_alive()
    publishing.join(10)


def test_a_newcomer_is_given_the_weights_while_the_others_go_on_leasing(made):
    fixture = made()
    first, actor = fixture.add(ScriptedWorker(fixture.broker, credits=2)), fixture.add(ScriptedActor(fixture.broker))
    actor.begin()
    late = fixture.add(Unruly(fixture.broker, "nothing", "is silent", name="rollout_n7"))
    while (found := actor.next_batch()) is not None:
        actor.trained(found[0])
    assert fixture.status()["workers"]["rollout_n7"]["served"] == 5 and first.version == 5 and late.sent


def test_engines_that_serve_are_not_paused_for_a_newcomer(made):
    fixture = made()
    first = fixture.add(Unruly(fixture.broker, "nothing", "is silent"))
    actor = fixture.add(ScriptedActor(fixture.broker))
    actor.begin()
    first.hold.set()
    before = list(first.told)
    late = fixture.add(Unruly(fixture.broker, "nothing", "is silent", name="rollout_n7"))
    assert actor.call("next_batch").kind == "republish"
    actor.publish(0)
    assert [kind for kind, _ in late.told] == ["pause", "transfer", "resume"] and first.told == before
