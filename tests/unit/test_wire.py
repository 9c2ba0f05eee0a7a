"""Frames: what goes in comes out, and nothing else gets in."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from molt_hpc import wire

DTYPES = st.sampled_from(["<i4", "<f4", "<i8", "|u1", "<i2", "|b1"])


@given(st.dictionaries(st.text(max_size=5), arrays.arrays(DTYPES, arrays.array_shapes(max_dims=3, min_side=0, max_side=4)), max_size=4))
def test_arrays_survive_the_round_trip(values):
    message = wire.decode([bytes(f) for f in wire.encode("test", {"a": 1}, values)])
    assert message.kind == "test" and message.fields == {"a": 1}
    for name, array in message.arrays().items():
        assert array.dtype == values[name].dtype and array.shape == values[name].shape
        assert array.tobytes() == values[name].tobytes()


def test_a_relayed_message_is_the_same_message():
    original = wire.decode(wire.encode("rollout", {"reward": 1.0}, {"ids": np.arange(5, dtype=np.int32)}))
    again = wire.decode(wire.relay_frames(original))
    assert again.fields == original.fields and (again.arrays()["ids"] == np.arange(5)).all()


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes_are_refused(frames):
    with pytest.raises(wire.WireError):
        wire.decode(frames)


def test_pickle_bytes_are_refused_and_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    with pytest.raises(wire.WireError):
        wire.decode([pickle.dumps(Bomb())])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("damage, text", [
    (lambda f: [f[0], f[1][:-1]], "should have 20 bytes, 19 came"),
    (lambda f: f[:1], "names 1 arrays, 0 frames"),
    (lambda f: [*f, b""], "names 1 arrays, 2 frames"),
])
def test_cut_messages_are_refused_with_the_reason(damage, text):
    frames = [bytes(f) for f in wire.encode("x", {}, {"ids": np.arange(5, dtype=np.int32)})]
    with pytest.raises(wire.WireError, match=text):
        wire.decode(damage(frames))


def test_a_flipped_bit_is_found_by_the_checksum():
    frames = [bytes(f) for f in wire.encode("x", {}, {"ids": np.arange(5, dtype=np.int32)})]
    frames[1] = bytes([frames[1][0] ^ 1]) + frames[1][1:]
    with pytest.raises(wire.WireError, match="ids is damaged"):
        wire.decode(frames).arrays()


def test_oversized_messages_name_the_limit():
    with pytest.raises(wire.WireError, match="limit is 10 "):
        wire.decode(wire.encode("x", {}, {"ids": np.zeros(100, np.uint8)}), max_bytes=10)


@pytest.mark.parametrize("fields", [{"a": np.float32(1)}, {"a": 2**64}, {"a": object()}])
def test_fields_that_msgpack_would_lose_are_refused(fields):
    with pytest.raises(wire.WireError, match="cannot travel"):
        wire.encode("x", fields)


def test_another_schema_is_refused():
    import msgpack

    header = msgpack.packb({"schema": 99, "kind": "x", "fields": {}, "arrays": []})
    with pytest.raises(wire.WireError, match="schema 99"):
        wire.decode([header])
