"""Buckets and what is made of them: every tensor once, no bucket too large, every offset aligned; ranks that fit."""

import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.broker.updates import rank_offsets
from molt_hpc.config import WeightsConfig
from molt_hpc.weights import group
from molt_hpc.weights.plan import ALIGNMENT, ITEM_BYTES, TensorSpec, decode_plan, encode_plan, plan_buckets, transfer_rank
from molt_hpc.weights.publish import BucketSender, GlooSender, view
from tests.weight_source import TensorSource

SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=30)


def specs(raw):
    return [TensorSpec(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(raw)]


@given(SPECS, st.integers(1, 2000))
def test_buckets_hold_every_tensor_once_in_order_within_the_limit(raw, limit):
    tensors = specs(raw)
    buckets = plan_buckets(tensors, limit)
    assert [t.name for b in buckets for t in b.tensors] == [t.name for t in tensors]
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.tensors) == 1
        end = 0
        for tensor in bucket.tensors:
            assert tensor.offset % ALIGNMENT == 0 and tensor.offset >= end
            end = tensor.offset + tensor.nbytes
        assert end == bucket.nbytes
    for before, after in zip(buckets, buckets[1:]):
        # no bucket was closed early: the next tensor would not have fitted
        assert -(-before.nbytes // ALIGNMENT) * ALIGNMENT + after.tensors[0].nbytes > limit
    plan = decode_plan(encode_plan({"updates": [{"buckets": [b.describe() for b in buckets]}]}))
    assert sum(len(b["tensors"]) for b in plan["updates"][0]["buckets"]) == len(tensors)


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="tensor a would be sent twice"):
        plan_buckets([TensorSpec("a", "float32", (2,))] * 2, 100)


@pytest.mark.parametrize("engines", range(1, 65))
def test_transfer_ranks_are_a_bijection_for_every_layout_of_up_to_64_workers(engines):
    for tensor in range(1, 64 // engines + 1):
        for pipeline in range(1, 64 // engines // tensor + 1):
            for replicas in range(1, 64 // engines // tensor // pipeline + 1):
                size = tensor * pipeline
                offsets, world = rank_offsets({f"n{i}_e{i % 3}": size * replicas for i in range(engines)})
                ranks = [transfer_rank(offset, replica, size, rank)
                         for offset in offsets.values() for replica in range(replicas) for rank in range(size)]
                assert sorted(ranks) == list(range(1, world))


class Source(TensorSource):
    """Counts how many tensors were taken; `served`: dtypes that differ from the tensors' own."""

    def __init__(self, tensors, served=None):
        super().__init__(tensors)
        self.served, self.taken, self.gathered = served or {}, 0, [threading.Event() for _ in tensors]

    def metadata(self):
        return [(name, self.served.get(name, t.dtype), tuple(t.shape)) for name, t in self.tensors.items()]

    def __iter__(self):
        for item in self.tensors.items():
            self.gathered[self.taken % len(self.gathered)].set()
            self.taken += 1
            yield item


def random_tensors(seed, count=12):
    rng = np.random.default_rng(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
    values = [np.asarray(rng.normal(size=rng.integers(1, 9, rng.integers(0, 4))) * 100) for _ in range(count)]
    return {f"t{i}": torch.from_numpy(value).to(kinds[rng.integers(4)]) for i, value in enumerate(values)}


def receive(port, world, rank, buckets, out, stop_after=10**9):
    """A receiver of the test's own: plain broadcasts into fresh buffers."""
    member = group.join(group.open_store("127.0.0.1", port, world, False, 20), 1, rank, world, 20)
    for number, bucket in enumerate(buckets):
        if number == stop_after:
            return
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
        group.broadcast(member, buffer)
        out.append(buffer)


def transfer(sender, receivers=2, stop_after=10**9):
    """One update over real gloo groups in this process; returns each receiver's buffers and the sender's report."""
    _, port = sender.open(receivers + 1)
    outs = [[] for _ in range(receivers)]
    threads = [threading.Thread(target=receive, args=(port, receivers + 1, r + 1, sender.buckets(), outs[r], stop_after), daemon=True)
               for r in range(receivers)]
    for thread in threads:
        thread.start()
    sender.join(1, receivers + 1)
    report = sender.send()
    for thread in threads:
        thread.join(20)
    return outs, report


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(16, 4000), st.integers(0, 9000), st.booleans())
def test_what_arrives_is_what_the_source_holds_in_the_dtypes_of_the_plan(seed, bucket_bytes, stage_bytes, staged):
    source = Source(random_tensors(seed), served={"t0": torch.bfloat16, "t1": torch.float32})
    config = WeightsConfig(backend="gloo", timeout=20, bucket_bytes=bucket_bytes, stage_bytes=stage_bytes)
    sender = GlooSender(source, config, 0, "127.0.0.1")
    if staged:
        sender.stage()
    for _ in range(2):  # the second update reuses the buffers
        outs, report = transfer(sender, receivers=1)
        for buffers in outs:
            assert report.checksum == xxhash.xxh3_64_hexdigest(b"".join(b.numpy().tobytes() for b in buffers))
            for bucket, buffer in zip(sender.buckets(), buffers, strict=True):
                for t in bucket.tensors:
                    kind = getattr(torch, t.dtype)
                    assert torch.equal(view(buffer, t.dtype, t.shape, t.offset), source.tensors[t.name].to(kind))
        assert report.nbytes == sum(b.nbytes for b in sender.buckets())


def test_staging_takes_the_first_buckets_only_and_a_new_one_starts_from_the_front():
    source = Source({f"t{i}": torch.full((64,), float(i)) for i in range(10)})
    sender = GlooSender(source, WeightsConfig(backend="gloo", timeout=20, bucket_bytes=256, stage_bytes=3 * 256), 0, "127.0.0.1")
    sender.stage()
    assert source.taken == 3
    sender.stage()  # ranks that staged for nothing finish that walk, so that all stay in step
    assert source.taken == 10 + 3
    source.tensors = {name: t + 1 for name, t in source.tensors.items()}
    sender.stage()
    outs, _ = transfer(sender, receivers=1)
    assert [b.view(torch.float32)[0].item() for b in outs[0]] == [i + 1 for i in range(10)]


def test_buckets_are_gathered_and_packed_while_an_earlier_one_travels():
    source, late = Source({f"t{i}": torch.full((64,), float(i)) for i in range(10)}), []

    class ScriptedSender(BucketSender):
        """Delivers a bucket only once the tensor after the buffered ones is gathered."""

        def _deliver(self, bucket, buffer):
            number = int(bucket.tensors[0].name[1:])
            if not source.gathered[min(number + 1, 9)].wait(20):
                late.append(number)

    sender = ScriptedSender(source, WeightsConfig(backend="gloo", bucket_bytes=256), 0)
    sender.stage()
    sender.send()
    assert source.taken == 10 and not late


def test_a_receiver_that_leaves_fails_the_transfer_after_all_gathers_and_the_next_epoch_works():
    # more than the buffers of a socket take: the sender must notice
    source = Source({f"t{i}": torch.full((1 << 18,), float(i)) for i in range(40)})
    sender = GlooSender(source, WeightsConfig(backend="gloo", timeout=10, bucket_bytes=1 << 20), 0, "127.0.0.1")
    with pytest.raises(RuntimeError, match="the transfer failed"):
        transfer(sender, receivers=1, stop_after=3)
    assert source.taken == 40
    outs, _ = transfer(sender, receivers=2)
    assert len(outs[0]) == len(outs[1]) == 40 and source.taken == 80


def test_an_aborted_transfer_ends_and_has_gathered_everything():
    source = Source({f"t{i}": torch.full((1 << 20,), float(i)) for i in range(30)})
    sender = GlooSender(source, WeightsConfig(backend="gloo", timeout=60, bucket_bytes=4 << 20), 0, "127.0.0.1")
    _, port = sender.open(2)
    held, store = [], group.open_store("127.0.0.1", port, 2, False, 20)
    thread = threading.Thread(target=lambda: held.append(group.join(store, 1, 1, 2, 20)), daemon=True)
    thread.start()  # joins, and never takes a bucket
    sender.join(1, 2)
    thread.join(20)
    timer = threading.Timer(0.5, sender.abort)
    timer.start()
    with pytest.raises(RuntimeError, match="aborted|failed"):
        sender.send()
    assert source.taken == 30


def test_ranks_that_do_not_join_are_named_and_waiting_for_them_can_be_aborted():
    sender = GlooSender(Source({"a": torch.zeros(2)}), WeightsConfig(backend="gloo", timeout=0.2), 0, "127.0.0.1")
    sender.open(4)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2, 3\] of 1..3 did not join epoch 5 within"):
        sender.join(5, 4)
    sender.open(4)
    sender.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        sender.join(6, 4)


def test_other_ranks_gather_as_often_as_rank_0_and_hold_no_buffer():
    source = Source({f"t{i}": torch.zeros(100) for i in range(9)})
    sender = GlooSender(source, WeightsConfig(backend="gloo", timeout=20, bucket_bytes=800), 1, "127.0.0.1")
    sender.stage()
    assert source.taken == 4  # two buckets of two tensors, as on rank 0
    sender.send()
    assert source.taken == 9 and not sender._buffers


def test_a_source_that_disagrees_with_the_plan_is_named():
    source = Source({"a": torch.zeros(2)})
    sender = GlooSender(source, WeightsConfig(backend="gloo"), 0, "127.0.0.1")
    sender.buckets()
    source.tensors = {"b": torch.zeros(2)}
    with pytest.raises(ValueError, match="expects a .* gave b"):
        sender.stage()


@given(st.integers(0, 10**6), st.integers(1, 70))
def test_a_fingerprint_is_the_sum_of_odd_multiples_and_shows_every_changed_byte(seed, length):
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, length).astype(np.uint8)
    words = np.frombuffer(data.tobytes() + b"\0" * (-length % 8), "<u8")
    expected = sum((2 * i + 1) * int(w) for i, w in enumerate(words)) % 2**64
    found = int(group.fingerprint(torch.from_numpy(data), chunk=2)) % 2**64
    assert found == expected
    changed = data.copy()
    changed[rng.integers(length)] ^= 1 + rng.integers(255)
    assert int(group.fingerprint(torch.from_numpy(changed))) % 2**64 != expected


def test_fingerprints_notice_values_names_and_dtypes_but_not_the_order():
    def of(rows):
        result = group.Fingerprints()
        for name, tensor in rows:
            result.add(name, tensor)
        return result.hex()

    a, b = torch.arange(6.0), torch.arange(6.0).reshape(2, 3)
    assert of([("a", a), ("b", b)]) == of([("b", b), ("a", a)])
    assert len({of([("a", a), ("b", b)]), of([("a", b), ("b", a)]), of([("a", a + 1), ("b", b)]), of([("a", a), ("c", b)])}) == 4
