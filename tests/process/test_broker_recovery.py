"""A real broker process that is killed at random moments, flooded, ignored and fed with more than its memory."""

import random
import socket
import threading
import time
from collections import Counter

import msgpack
import numpy as np
import pytest

from molt_hpc import wire
from molt_hpc.broker.client import BrokerClient
from molt_hpc.config import dump
from tests.process_run import small_config
from tests.scripted import BrokerGone, BrokerProcess, RunStopped, made_rollout

MB = 1 << 20


@pytest.fixture
def started():
    """Makes a broker process from a configuration; ended with the test."""
    brokers = []

    def start(config):
        brokers.append(BrokerProcess(config))
        return brokers[-1].start()
    yield start
    for broker in brokers:
        broker.close()


def configured(folder, prompts, batch=4, samples=2, lag=1, **broker):
    config = small_config(folder, prompts=prompts)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.max_lag = batch, samples, lag
    config.rollout.min_group_size, config.logger.tensorboard = samples, False
    for name, value in broker.items():
        setattr(config.broker, name, value)
    config.check()
    return config


def content(rollouts):
    """What of a batch must be the same when it comes again."""
    return sorted((r.prompt.ordinal, r.sample, r.group_id, r.attempt, r.segments[0].token_ids.tobytes()) for r in rollouts)


def run_attempt(broker, batches, kill_after, **worker_options):
    """One attempt: a worker and an actor, and a kill some moments after the actor's n-th message (None: never). True if the run is done."""
    worker, actor = broker.worker(**worker_options), broker.actor()
    assert actor.version <= max(batches, default=0) and set(range(1, actor.version + 1)) <= batches.keys()
    killing = threading.Timer(random.uniform(0.0, 0.02), lambda: (broker.kill(), actor.gone.set()))
    actor.heard = lambda count: killing.start() if count == kill_after else None
    try:
        actor.begin()
        while (found := actor.next_batch()) is not None:
            step, rollouts = found
            assert step == actor.version + 1
            if step in batches:  # shipped before, never reported as trained
                assert content(rollouts) == content(batches[step])
            batches[step] = rollouts
            actor.trained(step)
        actor.call("finished")
        killing.cancel()
        return broker.process.wait(20) == 0
    except BrokerGone:
        return False
    finally:
        killing.cancel()
        worker.close()
        actor.close()


@pytest.mark.slow
@pytest.mark.parametrize("batch, prompts, samples, lag", [(4, 80, 2, 0), (3, 62, 3, 1), (5, 99, 2, 2), (1, 33, 2, 1)])
def test_a_broker_killed_again_and_again_trains_every_rollout_exactly_once(started, tmp_path, batch, prompts, samples, lag):
    broker, batches, draw = started(configured(tmp_path, prompts, batch, samples, lag)), {}, random.Random(prompts)
    kills = 0
    while not run_attempt(broker, batches, draw.randrange(1, 50) if kills < 6 else None):
        kills += 1
        broker.start()
    assert broker.process.wait(20) == 0 and kills >= 2
    trained = Counter((r.prompt.ordinal, r.sample) for rollouts in batches.values() for r in rollouts)
    assert trained == Counter((o, s) for o in range(prompts) for s in range(samples))
    sizes = [len({r.group_id for r in batches[step]}) for step in sorted(batches)]
    assert sorted(batches) == list(range(1, len(sizes) + 1))
    assert sizes == [batch] * (prompts // batch) + [prompts % batch] * (prompts % batch > 0)
    for step, rollouts in batches.items():
        assert all(step - 1 - r.segments[0].versions().max() <= lag for r in rollouts)


def test_a_curriculum_is_the_same_after_every_kill(started, tmp_path):
    config = configured(tmp_path, prompts=30, batch=4)
    config.train.num_episodes, config.data.difficulty_sampling = 3, True
    config.data.easy_fraction = config.data.hard_fraction = 0.0
    config.check()
    broker, batches, kills = started(config), {}, 0

    def score(lease):  # a third of the prompts is too easy, a third too hard, and the rest passes half of the time
        return {0: 1.0, 1: 0.0}.get(int(lease["prompt"]["id"][1:]) % 3, float(lease["sample"]))
    while not run_attempt(broker, batches, 30 + kills if kills < 5 else None, score=score):
        kills += 1
        broker.start()
    assert kills >= 2
    trained = {(r.prompt.ordinal, r.sample): r.prompt.id for rollouts in batches.values() for r in rollouts}
    assert len(trained) == sum(map(len, batches.values()))
    total = len(trained) // 2
    assert sorted(trained) == [(o, s) for o in range(total) for s in (0, 1)]
    by_ordinal = [trained[o, 0] for o in range(total)]
    assert len(set(by_ordinal[:30])) == 30
    times = Counter(by_ordinal)
    useful = [f"p{i}" for i in range(2, 30, 3)]
    assert all(times[name] == 3 for name in useful)
    # prompts whose groups were still open when an epoch was chosen had no pass rate yet: a window of groups at most each time
    assert 50 <= total <= 50 + 2 * 8
    sizes = [len({r.group_id for r in batches[step]}) for step in sorted(batches)]
    assert sizes == [4] * (total // 4) + [total % 4] * (total % 4 > 0)


def test_a_batch_that_was_shipped_but_not_trained_comes_again_the_same(started, tmp_path):
    broker, seen = started(configured(tmp_path, prompts=12)), []
    for _ in range(4):
        worker, actor = broker.worker(), broker.actor()
        actor.begin()
        step, rollouts = actor.next_batch()
        seen.append((step, content(rollouts)))
        broker.kill()
        worker.close()
        actor.close()
        broker.start()
    assert seen[0][0] == 1 and len(seen[0][1]) == 8 and all(found == seen[0] for found in seen)
    batches = {}
    assert run_attempt(broker, batches, None) and content(batches[1]) == seen[0][1] and len(batches) == 3


def test_a_broker_killed_while_it_starts_loses_nothing(started, tmp_path):
    broker, batches = started(configured(tmp_path, prompts=40)), {}
    assert not run_attempt(broker, batches, 15)
    for _ in range(3):
        broker.start()
        broker.kill()
    broker.start()
    assert run_attempt(broker, batches, None)
    trained = Counter((r.prompt.ordinal, r.sample) for rollouts in batches.values() for r in rollouts)
    assert trained == Counter((o, s) for o in range(40) for s in (0, 1))


@pytest.mark.slow
def test_a_resumed_run_may_end_earlier_or_later_than_it_was_to(started, tmp_path):
    config, batches = configured(tmp_path, prompts=40), {}
    broker = started(config)
    assert not run_attempt(broker, batches, 45) and len(batches) > 2
    begun = len(batches)
    for config.train.max_steps, steps in ((1, begun), (8, 8), (0, 10)):
        (broker.run / "config.toml").write_text(dump(config))
        broker.start()
        assert run_attempt(broker, batches, None) and len(batches) == steps
    trained = Counter((r.prompt.ordinal, r.sample) for rollouts in batches.values() for r in rollouts)
    assert trained == Counter((o, s) for o in range(40) for s in (0, 1))


def test_an_earlier_attempts_worker_is_fenced_after_a_restart(started, tmp_path):
    broker = started(configured(tmp_path, prompts=4))
    broker.kill()
    broker.start()
    with pytest.raises(ValueError, match="this is attempt 2, not 1"):
        BrokerClient(broker.run, broker.address, "rollout", "rollout_n0", 1)
    assert broker.client().request("status")["phase"] == "roll_call"


# memory ------------------------------------------------------------------------------------


def test_rollouts_beyond_the_bound_are_read_back_from_the_journal_and_memory_stays_bounded(started, tmp_path):
    bound, count, tokens = 16 * MB, 48, 2 * MB // 8
    broker = started(configured(tmp_path, prompts=24, batch=24, lag=0, memory_bytes=bound))
    observer, before = broker.client(), broker.rss()
    worker, actor = broker.worker(tokens=lambda lease: tokens, linger=0.0), broker.actor()
    actor.begin()
    peak, status = 0, {}
    deadline = time.monotonic() + 60
    while status.get("groups", {}).get("complete", 0) < 24 and time.monotonic() < deadline:
        status = observer.request("status")
        peak = max(peak, broker.rss())
    assert status["groups"]["complete"] == 24 and 0 < status["cached_bytes"] <= bound
    # the cache, the worker's window on its way in, and what the allocator keeps: far from the 96 MB that have come
    assert worker.window == bound and peak - before < 2 * bound + 24 * MB
    step, rollouts = actor.next_batch()
    assert step == 1 and len(rollouts) == count
    assert max(peak, broker.rss()) - before < 3 * bound + 24 * MB  # the batch of 96 MB was never in the socket's queue at once
    for rollout in rollouts:
        lease = {"group_id": rollout.group_id, "sample": rollout.sample, "attempt": rollout.attempt, "prompt": rollout.prompt.to_header()}
        assert np.array_equal(rollout.segments[0].token_ids, made_rollout(lease, 0, 1.0, tokens).segments[0].token_ids)
    actor.trained(1)
    assert observer.request("status")["cached_bytes"] == 0 and actor.next_batch() is None


def payload_files(broker):
    return {path.name for path in (broker.run / "rollouts").glob("*")}


def test_files_of_payloads_are_removed_with_the_last_group_that_refers_to_them(started, tmp_path):
    config = configured(tmp_path, prompts=30, lag=1, inline_bytes=1000)
    config.algo.dynamic_filtering_enable = True
    broker = started(config)
    # every third prompt's rollouts agree: filtered
    broker.worker(score=lambda lease: float(lease["sample"] and lease["prompt"]["ordinal"] % 3 > 0), inline_bytes=1000,
                  tokens=lambda lease: 400 if lease["prompt"]["ordinal"] % 2 else 4)
    actor, trained, most = broker.actor(), [], 0
    actor.begin()
    while (found := actor.next_batch()) is not None:
        step, rollouts = found
        trained += [r.prompt.ordinal for r in rollouts]
        most = max(most, len(payload_files(broker)))
        actor.trained(step)
    assert sorted(set(trained)) == [o for o in range(30) if o % 3]
    # a file of the scripted worker holds one rollout; the file that it would append to next stays
    assert 1 < most <= 2 * 2 * 4 + 1 and len(payload_files(broker)) == 1
    actor.call("finished")
    assert broker.process.wait(20) == 0 and not payload_files(broker)


def test_payloads_by_reference_survive_a_kill_and_orphans_do_not(started, tmp_path):
    broker = started(configured(tmp_path, prompts=4, lag=0, inline_bytes=1000))
    worker, actor = broker.worker(inline_bytes=1000, tokens=lambda lease: 400), broker.actor()
    actor.begin()
    first = content(actor.next_batch()[1])
    broker.kill()
    worker.close()
    actor.close()
    (broker.run / "rollouts" / "rollout_n9_000001.bin").write_bytes(b"of groups that nobody knows")
    broker.start()
    assert len(payload_files(broker)) == len(first) == 8
    worker, actor = broker.worker(inline_bytes=1000, tokens=lambda lease: 400), broker.actor()
    actor.begin()
    assert content(actor.next_batch()[1]) == first
    actor.trained(1)
    assert len(payload_files(broker)) <= 1  # the kept batch's files are gone


# hostile and deaf peers --------------------------------------------------------------------


WORKER_KINDS = ("hello", "ready", "credits", "heartbeat", "rollout", "fault", "engine_answer", "lookup", "publish", "drain", "status",
                "nonsense")
FIELDS = ("request", "role", "name", "host", "attempt", "count", "progress", "group_id", "sample", "seconds", "score", "reference", "fault",
          "reason", "engine", "epoch", "version", "checksum", "answer", "key", "value", "engines", "lines_from")
VALUES = (None, -1, 0, 2**63, -2**63, 1e400, float("nan"), "", "x" * 300, b"\xff", [], [[1, 2, 3]], [[[], {}, 0]], {}, {"a": {"b": []}},
          True)


def fuzz(draw):
    """The frames of one message that nobody should send: noise, a damaged message, or a well-formed one with absurd fields."""
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
    fields = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randrange(8))}
    spec = {"name": "a", "dtype": draw.choice(VALUES), "shape": [0], "xxh3": 0}
    arrays = draw.choice([[], [], draw.choice(VALUES), [draw.choice(VALUES)], [spec]])
    named = fields | {"name": "fuzz", "role": draw.choice(["tool", 7, None])}
    frames = [msgpack.packb({"schema": wire.SCHEMA, "kind": draw.choice(WORKER_KINDS), "fields": named, "arrays": arrays})]
    frames += [b""] * (arrays != [] and draw.randrange(2))
    if kind == 1:
        header = bytearray(frames[0])
        for _ in range(draw.randrange(1, 4)):
            header[draw.randrange(len(header))] = draw.randrange(256)
        return [bytes(header)]
    return frames if kind == 2 else [frames[0][:draw.randrange(len(frames[0]))], b"tail"]


def flood(broker, count, seed, ended):
    """Send so many messages, some of them as bytes that are not even ZeroMQ."""
    draw, peer = random.Random(seed), broker.raw_socket(sndhwm=1000)
    peer.send_multipart(wire.encode("hello", {"request": 1, "role": "tool", "name": "fuzz", "host": "h", "attempt": 1}))
    host, port = broker.address.removeprefix("tcp://").rsplit(":", 1)
    for number in range(count):
        peer.send_multipart(fuzz(draw))
        while peer.poll(0):
            peer.recv_multipart()
        if number % 1000 == 0:
            with socket.create_connection((host, int(port)), 10) as plain:
                plain.sendall(draw.randbytes(500))
    deadline = time.monotonic() + 60
    while peer.poll(0) or time.monotonic() < deadline and not ended.is_set():
        peer.recv_multipart() if peer.poll(20) else ended.set()


def test_a_hundred_thousand_random_messages_do_not_disturb_a_run(started, tmp_path):
    broker, ended = started(configured(tmp_path, prompts=400, batch=4)), threading.Event()
    _, actor = broker.worker(), broker.actor()
    actor.begin()
    flooding = threading.Thread(target=flood, args=(broker, 100_000, 1, ended), daemon=True)
    flooding.start()
    seen, steps_during = Counter(), 0
    while (found := actor.next_batch()) is not None:
        step, rollouts = found
        seen.update((r.prompt.ordinal, r.sample) for r in rollouts)
        actor.trained(step)
        steps_during += flooding.is_alive()
    flooding.join(120)
    assert not flooding.is_alive() and steps_during > 0
    status = broker.client().request("status", timeout=60)
    assert status["phase"] == "running" and status["bad_frames"] > 50_000
    assert seen == Counter((o, s) for o in range(400) for s in range(2))
    actor.call("finished")
    assert broker.process.wait(20) == 0


def test_a_peer_that_never_reads_does_not_block_the_others(started, tmp_path):
    broker = started(configured(tmp_path, prompts=48, batch=24, lag=0, memory_bytes=8 * MB))
    deaf = broker.raw_socket(rcvhwm=1, rcvbuf=4096)
    deaf.send_multipart(wire.encode("hello", {"request": 1, "role": "tool", "name": "deaf", "host": "h", "attempt": 1}))
    for number in range(5000):
        deaf.send_multipart(wire.encode("status", {"request": number}))
    broker.worker(tokens=lambda lease: 2 * MB // 8, linger=0.0)
    # an actor that asks for its batch, 96 MB, and takes none of it
    reader = broker.raw_socket(rcvhwm=1, rcvbuf=4096)
    reader.send_multipart(wire.encode("hello", {"request": 1, "role": "actor", "name": "actor", "host": "h", "attempt": 1}))
    actor = broker.actor()
    actor.begin()
    reader.send_multipart(wire.encode("next_batch", {"request": 2}))
    observer, status, answers = broker.client(), {}, 0
    deadline = time.monotonic() + 60
    while status.get("groups", {}).get("shipped", 0) < 24 and time.monotonic() < deadline:
        status, answers = observer.request("status", timeout=30), answers + 1
    assert status["groups"]["shipped"] == 24 and answers > 1
    for _ in range(20):
        status = observer.request("status", timeout=30)
    assert status["phase"] == "running"
    reader.close()
    step, rollouts = actor.next_batch()  # the batch is still there for an actor that reads
    assert step == 1 and len(rollouts) == 48


def test_a_stopped_run_tells_its_worker_and_its_actor_why(started, tmp_path):
    broker = started(configured(tmp_path, prompts=8))
    worker, actor = broker.worker(), broker.actor()
    actor.begin()
    broker.client().request("stop", {"reason": "enough"})
    with pytest.raises(RunStopped, match="enough"):
        while actor.next_batch():
            pass
    worker.join(10)
    assert worker.reason == "enough" and broker.process.wait(20) == 1


def test_rollouts_of_64_mb_travel_by_reference_and_the_broker_never_holds_them(started, tmp_path):
    tokens = 64 * MB // 8  # int32 ids and float32 log-probs
    broker = started(configured(tmp_path, prompts=2, batch=2, lag=0, memory_bytes=64 * MB))
    before = broker.rss()
    broker.worker(tokens=lambda lease: tokens, linger=0.0, inline_bytes=8 * MB)
    actor = broker.actor()
    actor.begin()
    step, rollouts = actor.next_batch()
    assert step == 1 and len(rollouts) == 4
    assert broker.rss() - before < 32 * MB
    for rollout in rollouts:
        lease = {"group_id": rollout.group_id, "sample": rollout.sample, "attempt": rollout.attempt, "prompt": rollout.prompt.to_header()}
        assert np.array_equal(rollout.segments[0].token_ids, made_rollout(lease, 0, 1.0, tokens).segments[0].token_ids)
    actor.trained(1)
    assert actor.next_batch() is None and len(payload_files(broker)) == 1
