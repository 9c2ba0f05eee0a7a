"""The update protocol: no mixed weights are ever resumed, no phase waits without a deadline."""

from hypothesis import given
from hypothesis import strategies as st

from molt_hpc.broker.updates import Phase, WeightUpdate, rank_offsets

ENGINES = ["e0", "e1", "e2"]


def make():
    return WeightUpdate(5, 2, frozenset(ENGINES), timeout=10.0, started=0.0)


def answer_all(update, kind, checksum="aa"):
    for engine in ENGINES:
        update.answer(kind, engine, 5, 2, 1.0, checksum)


def test_a_whole_update_passes_through_its_phases():
    update = make()
    answer_all(update, "paused")
    assert update.phase == Phase.TRANSFERRING and update.missing() == [*ENGINES, "trainer"]
    answer_all(update, "applied")
    assert update.missing() == ["trainer"]
    assert update.sent(5, 2, "aa", 2.0) and update.phase == Phase.RESUMING
    answer_all(update, "resumed")
    assert update.phase == Phase.DONE


def test_a_wrong_checksum_fails_the_update_and_names_the_engine():
    update = make()
    answer_all(update, "paused")
    update.answer("applied", "e1", 5, 2, 1.0, "bb")
    answer_all(update, "applied")
    update.checksums["e1"] = "bb"
    update.sent(5, 2, "aa", 2.0)
    assert update.phase == Phase.FAILED and "e1 has bb" in update.reason


def test_a_silent_engine_fails_its_phase_at_the_deadline_and_is_named():
    update = make()
    update.answer("paused", "e0", 5, 2, 1.0)
    assert not update.expire(9.9)
    assert update.expire(10.0)
    assert "e1, e2" in update.reason and "pausing" in update.reason


def test_answers_of_another_update_change_nothing():
    update = make()
    for version, epoch in ((4, 2), (5, 1), (6, 2)):
        assert not update.answer("paused", "e0", version, epoch, 1.0)
    assert not update.answer("applied", "e0", 5, 2, 1.0, "aa")
    assert not update.answer("paused", "stranger", 5, 2, 1.0)
    assert update.missing() == ENGINES


EVENTS = st.lists(st.tuples(st.sampled_from(["paused", "applied", "resumed", "sent", "failed", "time"]), st.sampled_from([*ENGINES, "x"]),
                            st.sampled_from([4, 5]), st.sampled_from(["aa", "aa", "aa", "bb"])), max_size=60)


@given(EVENTS)
def test_under_any_order_of_events_only_equal_checksums_are_resumed_and_every_path_ends(events):
    update, now = make(), 0.0
    for kind, engine, version, checksum in events:
        now += 0.1
        if kind == "sent":
            update.sent(version, 2, checksum, now)
        elif kind == "failed":
            if checksum == "bb":
                update.failed(engine, "test")
        elif kind == "time":
            now += 1.0
            update.expire(now)
        else:
            update.answer(kind, engine, version, 2, now, checksum)
        if update.phase in (Phase.RESUMING, Phase.DONE):
            assert set(update.checksums) == set(ENGINES) and set(update.checksums.values()) == {update.sent_checksum}
        assert update.ended or update.missing()
    update.expire(now + 10.0)
    assert update.ended


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 8), min_size=1, max_size=8))
def test_engine_ranks_are_a_bijection_onto_one_to_world_size(sizes):
    offsets, world = rank_offsets(sizes)
    ranks = [offsets[e] + local for e in sizes for local in range(sizes[e])]
    assert sorted(ranks) == list(range(1, world))
