"""A fleet that comes and goes, through a real broker process: nothing is lost when workers join, drain, vanish or keep failing."""

import time
from collections import Counter

import pytest

from molt_hpc.broker.client import RunStopped
from tests.process_run import small_config
from tests.scripted import BrokerProcess, ScriptedWorker


@pytest.fixture
def started(request):
    made = []

    def start(config):
        made.append(BrokerProcess(config).start())
        return made[-1]

    yield start
    for broker in made:
        broker.close()


class FailingWorker(ScriptedWorker):
    """Reports an infrastructure fault for every lease."""

    def _send_rollout(self, lease):
        self._send("fault", {k: lease[k] for k in ("group_id", "sample", "attempt")} | {"fault": "infrastructure", "reason": "the disk is full",
                             "credits": 1})
        return True


class StumblingWorker(FailingWorker):
    """Fails all that it is given at first, like a worker whose engine drops every connection once."""

    stumbling = 6

    def _send_rollout(self, lease):
        self.stumbling -= 1
        return FailingWorker._send_rollout(self, lease) if self.stumbling >= 0 else ScriptedWorker._send_rollout(self, lease)


def train_all(actor):
    seen = Counter()
    while (found := actor.next_batch()) is not None:
        step, rollouts = found
        seen.update((r.prompt.ordinal, r.sample) for r in rollouts)
        assert {r.segments[0].versions().max() for r in rollouts} == {step - 1}
        actor.trained(step)
    return seen


def expected(prompts, samples=2):
    return Counter((o, s) for o in range(prompts) for s in range(samples))


def test_a_worker_that_joins_late_gets_the_weights_at_once_and_then_leases(started, tmp_path):
    broker = started(small_config(tmp_path, prompts=24))
    first, actor = broker.worker(), broker.actor()
    actor.begin()
    first.hold.set()
    late = broker.worker(name="rollout_n7")
    deadline = time.monotonic() + 20
    observer = broker.client()
    # the actor waits for its batch; meanwhile the broker has it send the weights again, for the newcomer's sake
    while late.version < 0 and time.monotonic() < deadline:
        reply = actor.call("next_batch") if late.version < 0 else None
        if reply is not None and reply.kind == "republish":
            actor.publish(actor.version)
    assert late.version == 0
    assert observer.request("status")["workers"]["rollout_n7"]["served"] == 0
    first.hold.clear()
    assert train_all(actor) == expected(24)
    assert first.sent and late.sent


def test_a_draining_worker_finishes_what_it_has_and_its_place_is_taken_by_others(started, tmp_path):
    broker = started(small_config(tmp_path, prompts=40))
    leaving, _, actor = broker.worker(name="rollout_n0"), broker.worker(name="rollout_n1"), broker.actor()
    actor.begin()
    step, _ = actor.next_batch()
    actor.trained(step)
    leaving._send("drain", {})
    observer = broker.client()
    while not observer.request("status")["workers"].get("rollout_n0", {}).get("draining"):
        pass
    held = len(leaving.held)
    while leaving.held or leaving.sizes:
        time.sleep(0.01)
    sent = len(leaving.sent)
    leaving._send("goodbye", {})
    seen = train_all(actor)
    assert len(leaving.sent) == sent and held <= leaving.credits
    assert sum(seen.values()) == 2 * 36  # the four groups of the first batch were taken above
    assert "rollout_n0" not in observer.request("status", timeout=5)["workers"] or broker.process.poll() is not None


@pytest.mark.slow
def test_a_worker_that_vanishes_costs_no_rollout(started, tmp_path):
    config = small_config(tmp_path, prompts=24)
    config.broker.heartbeat_timeout = 6.0
    broker = started(config)
    doomed, steady, actor = broker.worker(name="rollout_n0"), broker.worker(name="rollout_n1", credits=2), broker.actor()
    doomed.hold.set()
    steady.hold.set()
    actor.begin()
    while not doomed.held:
        time.sleep(0.01)
    doomed.close()
    steady.hold.clear()
    keep_alive(steady)
    # an update with the vanished engine would fail; it is noticed before the batch is complete
    assert train_all(actor) == expected(24)


def keep_alive(worker):
    """A worker without traffic of its own sends heartbeats, as the real one does."""
    import threading

    def beat():
        while not worker.ended.wait(0.5) and worker.reason is None:
            worker._send("heartbeat", {"running": 0, "rollouts": 0, "sampled_tokens": 0, "progress": []})

    threading.Thread(target=beat, daemon=True).start()


def test_a_worker_that_keeps_failing_gets_no_more_leases_and_status_says_why(started, tmp_path):
    config = small_config(tmp_path, prompts=24)
    config.broker.max_worker_faults, config.broker.max_attempts = 3, 50
    broker = started(config)
    bad = broker._opened(FailingWorker(broker, broker.attempt, name="rollout_n1"))
    # its engine may serve first: with as many credits as there are leases it would take and hold them all
    good, actor = broker.worker(name="rollout_n0", credits=2), broker.actor()
    good.hold.set()
    observer = broker.client()
    while sum(worker["ready"] for worker in observer.request("status")["workers"].values()) < 2:
        time.sleep(0.02)
    actor.begin()
    deadline = time.monotonic() + 20
    while not (barred := observer.request("status")["workers"]["rollout_n1"]["barred"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "3 infrastructure faults in a row" in barred and "the disk is full" in barred
    good.hold.clear()
    assert train_all(actor) == expected(24)
    assert not bad.sent


def test_a_worker_that_fails_many_leases_at_one_moment_is_kept(started, tmp_path):
    config = small_config(tmp_path, prompts=24)
    config.broker.max_worker_faults = 3
    broker = started(config)
    broker._opened(StumblingWorker(broker, broker.attempt, credits=StumblingWorker.stumbling, linger=0.0))
    actor = broker.actor()
    actor.begin()
    assert train_all(actor) == expected(24)


def test_when_no_worker_can_be_used_the_run_ends_with_the_reason(started, tmp_path):
    config = small_config(tmp_path, prompts=24)
    config.broker.max_worker_faults, config.broker.max_attempts = 3, 50
    broker = started(config)
    broker._opened(FailingWorker(broker, broker.attempt))
    actor = broker.actor()
    actor.begin()
    with pytest.raises(RunStopped, match="no worker can be given leases.*the disk is full"):
        actor.next_batch()


def test_a_group_past_its_deadline_goes_on_without_its_slow_rollout(started, tmp_path):
    config = small_config(tmp_path, prompts=4)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.min_group_size = 4, 3, 2
    config.rollout.group_timeout = 1.0
    broker = started(config)
    worker, actor = broker.worker(credits=12, linger=0.0), broker.actor()
    stuck = []
    send = worker._send_rollout
    worker._send_rollout = lambda lease: stuck.append(lease["id"]) or False if lease["sample"] == 2 else send(lease)
    actor.begin()
    _, rollouts = actor.next_batch()
    assert Counter((r.prompt.ordinal, r.sample) for r in rollouts) == Counter((o, s) for o in range(4) for s in range(2))
    actor.trained(1)
    status = broker.client().request("status")
    assert status["lease_ends"] == {"trained": 8, "dropped": 4} and stuck
    assert status["reasons"] == {"the group's deadline passed": 4}
