"""Records: round trips, and rollouts that must not be trained on."""

import numpy as np
import pytest

from molt_hpc import wire
from molt_hpc.data.shards import Batch, build_batch, read_shard, write_shard
from molt_hpc.records import Lease, Prompt, Rollout, Segment


def segment(length=6, start=3, version=2):
    logprobs = np.zeros(length, np.float32)
    logprobs[start:] = -0.5
    return Segment(np.arange(length, dtype=np.int32), logprobs, np.array([[start, length]], np.int32),
                   np.array([[start, length, version]], np.int32), 0.7)


def rollout(ordinal=0, sample=0, reward=1.0, segments=1):
    return Rollout(ordinal, sample, 1, Prompt(ordinal, f"p{ordinal}", text="hi", label={"a": [1]}), [segment(5 + s) for s in range(segments)],
                   reward, reward, "terminated", True, False, 1, 0.5, {"x": 1.0})


def test_a_rollout_survives_the_wire():
    original = rollout(segments=3)
    message = wire.decode([bytes(f) for f in wire.encode("rollout", *original.to_wire())])
    again = Rollout.from_wire(message.fields, message.arrays())
    again.check()
    assert again.prompt == original.prompt and again.info == original.info and len(again.segments) == 3
    for a, b in zip(again.segments, original.segments):
        for name in ("token_ids", "logprobs", "action_spans", "version_spans"):
            assert (getattr(a, name) == getattr(b, name)).all()
        assert a.temperature == b.temperature


def test_a_lease_survives_the_wire():
    lease = Lease("1.2.3", 1, 2, 3, Prompt(1, "p", messages=[{"role": "user", "content": "x"}]), 7, 4, 60.0)
    assert Lease.from_header(wire.decode(wire.encode("lease", lease.to_header())).fields) == lease


def test_a_batch_survives_its_shard_and_opens_without_this_code(tmp_path):
    from safetensors.numpy import load_file

    batch = build_batch(3, 2, [rollout(1, 1), rollout(0, 0, segments=2), rollout(1, 0, reward=0.0)])
    path = write_shard(tmp_path, 3, batch.to_bytes())
    again = read_shard(tmp_path, 3)
    assert again.rollouts == batch.rollouts and (again.step, again.version) == (3, 2)
    assert all((getattr(again, name) == getattr(batch, name)).all() for name in ("token_ids", "logprobs", "versions", "segment_offsets"))
    raw = load_file(path)
    assert raw["rollout_reward"].tolist() == [1.0, 0.0, 1.0] and raw["group_ordinal"].tolist() == [0, 1]
    assert raw["segment_rollout"].tolist() == [0, 0, 1, 2]
    assert set(raw["versions"].tolist()) == {-1, 2} and ((raw["versions"] >= 0) == (raw["action_mask"] == 1)).all()


def test_a_shard_cut_short_is_refused_with_its_path(tmp_path):
    path = write_shard(tmp_path, 1, build_batch(1, 0, [rollout()]).to_bytes()[:50])
    with pytest.raises(ValueError, match=str(path)):
        read_shard(tmp_path, 1)
    with pytest.raises(ValueError, match="not a trajectory shard"):
        Batch.from_bytes(b"\x10\0\0\0\0\0\0\0{}")


@pytest.mark.parametrize("change, reason", [
    (lambda s: s.logprobs.__setitem__(4, np.nan), "not finite"),
    (lambda s: setattr(s, "action_spans", np.zeros((0, 2), np.int32)), "no sampled token"),
    (lambda s: setattr(s, "version_spans", np.array([[3, 5, 1]], np.int32)), "version spans"),
    (lambda s: setattr(s, "logprobs", s.logprobs[:-1]), "5 log-probs for 6 tokens"),
])
def test_segments_that_must_not_be_trained_on_are_refused(change, reason):
    bad = segment()
    change(bad)
    with pytest.raises(ValueError, match=reason):
        bad.check()


def test_extras_of_some_segments_survive_wire_and_shard():
    full, empty = rollout(0, 0, segments=2), rollout(1, 0)
    full.segments[1].extras = {"support": np.arange(9, dtype=np.int32), "routes": np.arange(24, dtype=np.uint8).reshape(6, 2, 2)}
    full.segments[0].extras = {"support": np.array([7], np.int32)}
    message = wire.decode([bytes(f) for f in wire.encode("rollout", *full.to_wire())])
    again = Rollout.from_wire(message.fields, message.arrays())
    assert [sorted(s.extras) for s in again.segments] == [["support"], ["routes", "support"]]
    batch = Batch.from_bytes(build_batch(1, 0, [again, empty]).to_bytes())
    assert batch.extra("support", 0).tolist() == [7] and batch.extra("support", 1).tolist() == list(range(9))
    assert batch.extra("routes", 0) is None and batch.extra("routes", 1).shape == (6, 2, 2)
    assert batch.extra("routes", 2) is None and batch.extra("other", 0) is None
