"""Rollouts by reference: what a producer writes is what a reader gets, and a file lives as long as somebody needs it."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt_hpc import wire
from molt_hpc.broker.referred import Referred
from molt_hpc.data.references import FOLDER, Producer, resolve


def message(number, size):
    return wire.encode("rollout", {"number": number}, {"a": np.full(size, number % 100, np.int32), "b": np.arange(3.0)})


def test_payloads_written_by_many_threads_are_read_back_whole(tmp_path):
    producer, found = Producer(tmp_path, "rollout_n0", file_bytes=1500), []

    def write(first):
        for number in range(first, first + 20):
            found.extend(producer.put([message(number, number + 1), message(number + 1000, 2)]))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = [resolve(tmp_path, wire.decode(frames)) for frames in found]
    assert sorted(m.fields["number"] for m in read) == sorted([*range(60), *range(1000, 1060)])
    for m in read:
        number, arrays = m.fields["number"], m.arrays()
        assert len(arrays["a"]) == (number + 1 if number < 1000 else 2) and (arrays["a"] == number % 100).all()
    assert 1 < len(list((tmp_path / FOLDER).iterdir())) < 30


def test_a_payload_that_is_cut_damaged_or_gone_is_an_error_that_names_the_file(tmp_path):
    (referring,) = Producer(tmp_path, "rollout_n0").put([message(7, 100)])
    (path,) = (tmp_path / FOLDER).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(wire.WireError, match=f"{path.name}: 423 bytes at 0, expected 424"):
        resolve(tmp_path, wire.decode(referring))
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(wire.WireError, match="array a is damaged"):
        resolve(tmp_path, wire.decode(referring)).arrays()
    path.unlink()
    with pytest.raises(wire.WireError, match="is not there"):
        resolve(tmp_path, wire.decode(referring))


def test_a_reference_never_leads_out_of_the_folder(tmp_path):
    (tmp_path / "secret").write_bytes(b"12345678")
    spec = {"name": "a", "dtype": "|u1", "shape": [8], "xxh3": 0}
    outside = wire.encode("rollout", {"reference": {"file": "../secret", "offset": 0, "lengths": [8], "specs": [spec]}})
    with pytest.raises(wire.WireError, match="is not there"):
        resolve(tmp_path, wire.decode(outside))


@given(st.lists(st.tuples(st.sampled_from(["write", "late", "next", "end", "gone"]), st.integers(0, 1), st.integers(0, 5)), max_size=60))
def test_a_file_exists_exactly_while_a_group_or_its_producer_needs_it(tmp_path_factory, moves):
    run = tmp_path_factory.mktemp("run")
    (run / FOLDER).mkdir()
    referred, current, count, groups = Referred(run), {}, 0, {}
    for kind, producer, group in moves:
        if kind in ("write", "late", "next"):
            if kind == "next" or producer not in current:
                current[producer], count = f"f{count}.bin", count + 1
                (run / FOLDER / current[producer]).write_bytes(b"x")
            referred.seen(b"%d" % producer, {"file": current[producer]})
            if kind != "late":
                referred.add(group, {"file": current[producer]})
                groups.setdefault(group, set()).add(current[producer])
        elif kind == "end":
            referred.ended(group)
            groups.pop(group, None)
        elif producer in current:
            referred.gone(b"%d" % producer)
            del current[producer]
        needed = set(current.values()).union(*groups.values())
        assert {path.name for path in (run / FOLDER).iterdir()} == needed
