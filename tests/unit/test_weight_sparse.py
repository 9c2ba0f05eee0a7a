"""Sparse updates up to the collective: patches that lead an engine's copy to the trainer's weights, and what is announced."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_hpc.config import WeightsConfig
from molt_hpc.weights.publish import make_sender
from tests.weight_source import TensorSource


def sender(source, bucket_bytes=64, rank=0):
    return make_sender(WeightsConfig(backend="sparse_nccl", bucket_bytes=bucket_bytes), source, rank, "127.0.0.1", None)


def sent(by_patches):
    """What the back end does after its broadcasts have succeeded."""
    by_patches._changed = {name: torch.empty(0, dtype=torch.int32) for name in by_patches._held}


def apply(by_patches, copy):
    """An engine's copy after the announced patches; returns how many elements were written."""
    written = 0
    for body in by_patches.plan()["updates"]:
        for name, shape, dtype, count in zip(body["names"], body["shapes"], body["dtype_names"], body["num_updates_list"], strict=True):
            indices, values = by_patches.patch(name)
            assert indices.dtype == torch.int32 and len(indices) == len(values) == count > 0
            flat = copy.setdefault(name, torch.full(shape, 7.0).to(getattr(torch, dtype))).flatten()
            flat[indices.long()] = values
            copy[name] = flat.reshape(shape)
            written += count
    return written


@given(st.integers(0, 10**6), st.integers(1, 400))
def test_patches_lead_the_copy_to_the_trainers_weights_and_hold_only_what_differs(seed, bucket_bytes):
    rng = np.random.default_rng(seed)
    source = TensorSource({"a": torch.randn(4, 5).bfloat16(), "b": torch.randn(33), "c": torch.randn(2, 3).half()})
    by_patches, copy = sender(source, bucket_bytes), {}
    by_patches.stage()
    assert apply(by_patches, copy) == 20 + 33 + 6
    sent(by_patches)
    for _ in range(4):
        changed = set()
        for _ in range(int(rng.integers(1, 3))):  # a stage that is followed by another one was for nothing
            source.tensors = {name: t.clone() for name, t in source.tensors.items()}
            for name, tensor in source.tensors.items():
                for i in rng.integers(tensor.numel(), size=rng.integers(0, 4)):
                    tensor.view(-1)[i] += 1
                    changed.add((name, int(i)))
            by_patches.stage()
        assert apply(by_patches, copy) == len(changed)
        sent(by_patches)
        assert all(torch.equal(copy[name], t) for name, t in source.tensors.items())


def test_engines_that_join_get_everything_and_others_nothing_if_nothing_changed():
    source = TensorSource({"a": torch.zeros(3), "b": torch.tensor([0.0, float("nan")])})
    by_patches = sender(source)
    by_patches.stage()
    sent(by_patches)
    by_patches.stage()
    assert by_patches.plan() == {"updates": []}
    by_patches._changed = dict.fromkeys(by_patches._held)  # as `open` leaves it, which needs vLLM's search for a port
    assert apply(by_patches, {}) == 5
    source.tensors = {"a": torch.tensor([0.0, -0.0, 0.0]), "b": source.tensors["b"]}
    sent(by_patches)
    by_patches.stage()
    assert by_patches.patch("a")[0].tolist() == [1]


def test_integers_are_refused_and_other_ranks_hold_nothing():
    with pytest.raises(ValueError, match="tensor a has dtype torch.int64"):
        sender(TensorSource({"a": torch.zeros(3, dtype=torch.int64)})).stage()
    other = sender(TensorSource({"a": torch.zeros(3)}), rank=1)
    other.stage()
    assert not other._held and other.send().checksum == ""
