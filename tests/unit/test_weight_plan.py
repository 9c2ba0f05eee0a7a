"""Buckets: every tensor once, no bucket too large, every offset aligned."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from molt_hpc.weights.plan import ALIGNMENT, ITEM_BYTES, TensorSpec, decode_plan, encode_plan, plan_buckets
from molt_hpc.weights.publish import pack

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
    assert sum(len(b["tensors"]) for b in decode_plan(encode_plan(buckets))) == len(tensors)


def test_a_packed_bucket_gives_back_every_tensor_in_its_dtype():
    from molt_hpc.weights.receive import _view

    values = [("a", torch.randn(3, 5).bfloat16()), ("b", torch.randn(7)), ("c", torch.arange(3)), ("d", torch.randn(2, 2).half())]
    plan = plan_buckets([TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in values], 1 << 20)
    buffer = pack(plan[0], values)
    for (_, dtype, shape, offset), (_, tensor) in zip(decode_plan(encode_plan(plan))[0]["tensors"], values):
        assert torch.equal(_view(buffer, dtype, shape, offset), tensor)


def test_a_source_that_disagrees_with_the_plan_is_named():
    plan = plan_buckets([TensorSpec("a", "float32", (2,))], 100)
    with pytest.raises(ValueError, match="expects a .* gave b"):
        pack(plan[0], [("b", torch.zeros(2))])


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="tensor a would be sent twice"):
        plan_buckets([TensorSpec("a", "float32", (2,))] * 2, 100)
