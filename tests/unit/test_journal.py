"""The journal: what was written comes back; a crash costs the cut record only; other damage is an error."""

import pytest

from molt_hpc.broker.journal import Journal, JournalError, read_segment, segment_path, segments


def write(folder, records=5):
    journal = Journal(folder, 1, {"x": 0})
    places = [journal.append({"kind": "finish", "n": i}, [b"head", bytes([i]) * (10 + i), b""]) for i in range(records)]
    journal.append({"kind": "trained", "step": 1})
    journal.close()
    return journal, places


def read(folder, last=True):
    return [(record, place) for number in segments(folder) for record, place in read_segment(folder, number, last)]


def test_records_and_frames_come_back(tmp_path):
    journal, places = write(tmp_path)
    found = read(tmp_path)
    assert [r["kind"] for r, _ in found] == ["snapshot", *["finish"] * 5, "trained"]
    assert [p for _, p in found][1:6] == places
    assert journal.read(places[3]) == [b"head", b"\x03" * 13, b""]


def test_a_file_cut_anywhere_gives_back_every_whole_record(tmp_path):
    write(tmp_path)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    counts = set()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        counts.add(len(read(tmp_path)))
    assert counts == set(range(7))


def test_zeros_behind_the_last_record_are_a_crash_not_damage(tmp_path):
    write(tmp_path)
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert len(read(tmp_path)) == 7


def test_damage_in_the_middle_is_an_error_that_names_file_and_byte(tmp_path):
    write(tmp_path)
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    places = [p for _, p in read(tmp_path)]
    for at in (places[2].offset - 3, 1, 5):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match=f"{path}: damaged at byte"):
            read(tmp_path)


def test_a_cut_segment_that_is_not_the_last_is_an_error(tmp_path):
    write(tmp_path)
    path = segment_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match="not the last segment"):
        read(tmp_path, last=False)


def test_segments_follow_each_other_and_old_ones_are_dropped(tmp_path):
    journal = Journal(tmp_path, 1, {"n": 1})
    place = journal.append({"kind": "finish"}, [b"abc"])
    journal.start_segment(2, {"n": 2})
    assert journal.read(place) == [b"abc"]
    journal.drop_before(2)
    assert segments(tmp_path) == [2]
    assert [r["state"]["n"] for r, _ in read(tmp_path)] == [2]
    journal.close()
