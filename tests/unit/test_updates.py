"""The update protocol: whatever engines and trainer do, it ends in time, and nothing serves weights that it has not proved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from molt_hpc.broker.updates import RETURNS, Phase, WeightUpdate, rank_offsets

ENGINES = ["e0", "e1", "e2"]
TIMEOUT = 10.0


def make(engines=tuple(ENGINES), **options):
    return WeightUpdate(5, 2, set(engines), TIMEOUT, 0.0, **options)


def answer_all(update, kind, checksum="aa", now=1.0):
    for engine in sorted(update.members):
        update.answer(kind, engine, 5, update.epoch, now, checksum)


def actions(update, kind):
    return [engine for action, engine in update.take() if action == kind]


def to_transfer(**options):
    update = make(**options)
    answer_all(update, "paused")
    update.take()
    assert update.phase == Phase.TRANSFERRING
    return update


def to_resume():
    update = to_transfer()
    answer_all(update, "applied")
    update.sent(5, 2, "aa", 1.0)
    assert update.phase == Phase.RESUMING
    return update


def finish(update, epoch):
    """Everybody that is left does its part from the transfer on."""
    assert update.epoch == epoch and update.phase == Phase.TRANSFERRING
    answer_all(update, "applied")
    assert update.sent(5, epoch, "aa", 2.0)
    answer_all(update, "resumed")
    assert update.phase == Phase.DONE


def test_a_whole_update_passes_through_its_phases():
    update = make()
    assert actions(update, "pause") == ENGINES
    answer_all(update, "paused")
    assert update.take() == [("go", "")] and update.missing() == [*ENGINES, "trainer"]
    answer_all(update, "applied")
    assert update.missing() == ["trainer"] and update.take() == []
    assert update.sent(5, 2, "aa", 2.0) and actions(update, "resume") == ENGINES
    update.answer("resumed", "e1", 5, 2, 2.0)
    assert update.take() == [("serve", "e1")] and update.phase == Phase.RESUMING
    answer_all(update, "resumed")
    assert update.phase == Phase.DONE and update.served == set(ENGINES) and not update.dropped


@pytest.mark.parametrize("how", ["lost", "failed", "late"])
def test_an_engine_that_misses_the_pause_is_dropped_and_the_others_go_on(how):
    update = make()
    for engine in ("e0", "e2"):
        update.answer("paused", engine, 5, 2, 1.0)
    if how == "late":
        update.expire(TIMEOUT)
    elif how == "failed":
        update.failed("e1", "HTTP 500", 5, 2, 1.0)
    else:
        update.lost("e1", "killed", 1.0)
    assert actions(update, "drop") == ["e1"] and update.dropped[0].phase == "pausing"
    finish(update, 2)
    assert update.served == {"e0", "e2"}


def test_an_engine_that_dies_in_the_transfer_costs_one_epoch():
    update = to_transfer()
    update.answer("applied", "e0", 5, 2, 1.0, "aa")
    update.lost("e1", "killed", 1.0)
    assert update.take() == [("drop", "e1"), ("stop", ""), ("abort", "e0"), ("abort", "e2")]
    update.answer("aborted", "e0", 5, 2, 2.0)
    update.answer("aborted", "e2", 5, 2, 2.0)
    assert update.missing() == ["trainer"] and update.take() == []
    assert update.sent(5, 2, None, 2.0, "told to stop")
    assert update.take() == [("go", "")] and update.join and update.checksums == {}
    assert not update.answer("applied", "e0", 5, 2, 3.0, "aa")
    finish(update, 3)
    assert [(d.engine, d.phase) for d in update.dropped] == [("e1", "transferring")]


def abort_ends(update):
    for engine in sorted(update.members):
        update.answer("aborted", engine, 5, update.epoch, 3.0)
    update.sent(5, update.epoch, None, 3.0, "told to stop")


def test_of_two_that_fail_in_the_transfer_the_one_that_is_dead_is_to_blame():
    update = to_transfer()
    update.failed("e0", "connection closed by peer", 5, 2, 1.0)
    update.lost("e1", "killed", 2.0)
    abort_ends(update)
    finish(update, 3)
    assert update.served == {"e0", "e2"}


def test_one_that_fails_in_the_transfer_while_nobody_is_lost_is_dropped():
    update = to_transfer()
    update.failed("e0", "HTTP 500", 5, 2, 1.0)
    abort_ends(update)
    finish(update, 3)
    assert update.served == {"e1", "e2"} and update.dropped[0].reason == "HTTP 500"


def test_a_transfer_that_hangs_drops_those_that_do_not_come_free():
    update = to_transfer()
    update.expire(1.0 + TIMEOUT)
    assert actions(update, "stop") == [""]
    update.answer("aborted", "e0", 5, 2, 12.0)
    update.answer("aborted", "e2", 5, 2, 12.0)
    update.sent(5, 2, None, 12.0, "told to stop")
    assert update.phase == Phase.ABORTING
    update.expire(11.0 + TIMEOUT)
    finish(update, 3)
    assert update.dropped[0].engine == "e1" and "no answer within 10 s" in update.dropped[0].reason


def test_an_engine_whose_transfer_times_out_as_the_broker_gives_it_up_is_not_to_blame_for_the_one_that_hangs():
    update = to_transfer()
    update.expire(TIMEOUT + 1.0, 0.0)
    assert update.phase == Phase.ABORTING
    update.failed("e0", "timed out", 5, 2, TIMEOUT + 1.0)  # sent before it was told to stop
    assert update.members == set(ENGINES)
    update.sent(5, 2, None, TIMEOUT + 1.1, "aborted")
    for engine in ("e0", "e2"):
        update.answer("aborted", engine, 5, 2, TIMEOUT + 1.2)
    update.lost("e1", "did not come free", TIMEOUT + 4.0)
    assert [d.engine for d in update.dropped] == ["e1"]
    finish(update, 3)


def test_an_engine_that_hangs_after_everything_was_sent_is_dropped_without_a_repeat():
    update = to_transfer()
    for engine in ("e0", "e1"):
        update.answer("applied", engine, 5, 2, 1.0, "aa")
    update.sent(5, 2, "aa", 1.0)
    update.expire(1.0 + TIMEOUT)
    assert update.phase == Phase.RESUMING and update.epoch == 2
    answer_all(update, "resumed")
    assert update.served == {"e0", "e1"}


def test_one_wrong_checksum_drops_that_engine_all_of_them_fail_the_update():
    update = to_transfer()
    for engine, checksum in zip(ENGINES, ("aa", "bb", "aa")):
        update.answer("applied", engine, 5, 2, 1.0, checksum)
    update.sent(5, 2, "aa", 2.0)
    assert actions(update, "resume") == ["e0", "e2"]
    assert update.dropped[0].engine == "e1" and "(bb) are not those sent (aa)" in update.dropped[0].reason
    update = to_transfer()
    answer_all(update, "applied", "bb")
    update.sent(5, 2, "aa", 2.0)
    assert update.phase == Phase.FAILED and "e0 has bb" in update.reason


def test_an_engine_that_dies_while_resuming_is_dropped_even_after_it_served():
    update = to_resume()
    update.answer("resumed", "e0", 5, 2, 1.0)
    update.lost("e0", "killed", 1.0)
    update.failed("e1", "HTTP 500", 5, 2, 1.0)
    update.answer("resumed", "e2", 5, 2, 1.0)
    assert update.phase == Phase.DONE and update.served == {"e2"}


def test_an_update_that_loses_all_its_engines_waits_for_one_and_begins_anew():
    update = to_transfer()
    for engine in ENGINES:
        update.lost(engine, "killed", 1.0)
    update.sent(5, 2, None, 1.0, "told to stop")
    assert update.phase == Phase.WAITING
    update.take()
    update.came_back({"e1"}, 5.0)
    assert update.take() == [("pause", "e1")] and update.epoch == 3
    answer_all(update, "paused")
    finish(update, 3)


def test_an_update_without_engines_fails_after_its_deadline_which_a_starting_engine_extends():
    update = make(())
    assert update.phase == Phase.WAITING
    update.expire(TIMEOUT, extra=50.0)
    assert update.phase == Phase.WAITING
    update.expire(TIMEOUT)
    assert update.phase == Phase.FAILED and "no engine is left, and none came back within 10 s" in update.reason


def test_newcomers_that_are_lost_do_not_fail_an_update_whose_version_others_serve():
    update = make(["e1"], others_serve=True)
    update.lost("e1", "killed", 1.0)
    assert update.phase == Phase.DONE and not update.served


def test_a_sender_that_keeps_failing_fails_the_update_with_its_reason():
    update = to_transfer()
    for epoch in (2, 3):
        update.sent(5, epoch, None, 1.0, "RuntimeError: no such tensor")
        answer_all(update, "aborted")
    assert update.phase == Phase.FAILED and "RuntimeError: no such tensor" in update.reason


def test_a_trainer_that_does_not_stop_fails_the_update():
    update = to_transfer()
    update.lost("e0", "killed", 1.0)
    answer_all(update, "aborted")
    update.expire(1.0 + TIMEOUT)
    assert update.phase == Phase.FAILED and "the trainer did not stop sending" in update.reason


def test_the_transfer_group_is_kept_only_while_nobody_left_it():
    assert not to_transfer(group=frozenset(ENGINES)).join
    assert to_transfer(group=frozenset(["e0", "e1"])).join
    update = make(group=frozenset(ENGINES))
    update.lost("e2", "restarted", 0.5)
    answer_all(update, "paused")
    assert update.join


def test_answers_of_another_update_or_epoch_change_nothing():
    update = make()
    for version, epoch in ((4, 2), (5, 1), (6, 2)):
        assert not update.answer("paused", "e0", version, epoch, 1.0)
        update.failed("e0", "late", version, epoch, 1.0)
    assert not update.answer("applied", "e0", 5, 2, 1.0, "aa")
    assert not update.answer("paused", "stranger", 5, 2, 1.0)
    assert update.missing() == ENGINES and not update.dropped


class ModelledEngine:
    """What an engine really does. `holds` is the version of its weights, None while they are mixed."""

    def __init__(self):
        self.alive, self.holds, self.runs, self.task = True, 4, True, None


class Protocol(RuleBasedStateMachine):
    """Every interleaving of deaths, errors, silence, restarts, joins and late, double or foreign messages.

    Engines and trainer here act only on what the update tells them; messages wait in `wire`
    and arrive in any order, several times or never. `serving` is what the broker would believe.
    """

    def __init__(self):
        super().__init__()
        self.engines = {name: ModelledEngine() for name in ENGINES}
        self.serving: dict[str, int] = {}
        self.wire: list[tuple] = []
        self.now, self.sender, self.reached = 0.0, None, set()
        self.comebacks = 0

    @initialize(others=st.booleans(), count=st.integers(0, 3))
    def begin(self, others, count):
        self.update = WeightUpdate(5, 2, set(ENGINES[:count]), TIMEOUT, 0.0, others_serve=others)
        self.obey()

    def obey(self):
        """Engines and trainer hear what they are told; whether they do it is another rule's choice."""
        for action, name in self.update.take():
            if action == "go":
                assert self.sender is None
                self.sender, self.reached = self.update.epoch, set()
            elif action == "stop":
                self.wire.append(("sent", self.sender, None))
            elif action == "serve":
                self.serving[name] = self.update.version
                assert self.engines[name].runs and self.engines[name].holds == 5
            elif action == "drop":
                self.serving.pop(name, None)
                self.engines[name].runs = False
            elif action == "resume":
                assert self.engines[name].holds == 5, "an engine with mixed weights is told to resume"
                self.engines[name].task = ("resume", self.update.epoch)
            else:
                if action == "pause":
                    self.serving.pop(name, None)
                self.engines[name].task = (action, self.update.epoch)

    @rule(name=st.sampled_from(ENGINES), fails=st.sampled_from([False] * 3 + [True]), checksum=st.sampled_from(["aa"] * 3 + ["bb"]))
    def an_engine_does_what_it_was_told(self, name, fails, checksum):
        engine = self.engines[name]
        if not engine.alive or engine.task is None:
            return
        action, epoch = engine.task
        engine.task = None
        if fails:
            self.wire.append(("failed", name, epoch))
        elif action == "pause":
            engine.runs = False
            self.wire.append(("paused", name, epoch))
            engine.task = ("transfer", epoch)
        elif action == "resume":
            engine.runs = True
            self.wire.append(("resumed", name, epoch))
        elif action == "abort":
            engine.holds = None
            self.wire.append(("aborted", name, epoch))
            engine.task = ("transfer", epoch + 1)
        elif self.sender == epoch:
            engine.holds = 5 if checksum == "aa" else None
            self.reached.add(name)
            self.wire.append(("applied", name, epoch, checksum))
        else:
            engine.task = (action, epoch)

    @rule(names=st.sets(st.sampled_from(ENGINES), min_size=1))
    def some_engines_are_quick(self, names):
        for name in sorted(names):
            before = len(self.wire)
            self.an_engine_does_what_it_was_told(name, False, "aa")
            for message in self.wire[before:]:
                self.wire.remove(message)
                self.deliver(message, 0)

    @precondition(lambda self: self.sender is not None)
    @rule(fails=st.sampled_from([False, False, True]))
    def the_trainer_ends_its_transfer(self, fails):
        self.wire.append(("sent", self.sender, None if fails else "aa"))

    @rule(data=st.data(), again=st.booleans(), foreign=st.sampled_from([0, 0, 0, -1, 1]))
    def a_message_arrives(self, data, again, foreign):
        if not self.wire:
            return
        message = self.wire[data.draw(st.integers(0, len(self.wire) - 1))]
        if not again:
            self.wire.remove(message)
        self.deliver(message, foreign)

    def deliver(self, message, foreign):
        kind, *rest = message
        version, epoch = 5 + foreign, self.update.epoch
        if kind == "sent":
            if self.update.sent(version, *rest, self.now):
                assert rest[0] == self.sender and not foreign
                self.sender = None
        elif kind == "failed":
            self.update.failed(rest[0], "HTTP 500", version, rest[1], self.now)
        elif self.update.answer(kind, rest[0], version, rest[1], self.now, *rest[2:]):
            assert not foreign and rest[1] == epoch
        self.obey()

    @rule(name=st.sampled_from(ENGINES))
    def an_engine_dies(self, name):
        self.engines[name] = ModelledEngine()
        self.engines[name].alive = self.engines[name].runs = False
        self.serving.pop(name, None)
        self.update.lost(name, "killed", self.now)
        self.obey()

    @rule(name=st.sampled_from(ENGINES))
    def an_engine_comes_back(self, name):
        if not self.engines[name].alive and self.comebacks < 12:
            self.comebacks += 1
            self.engines[name] = ModelledEngine()
            self.engines[name].holds = 0
            self.update.came_back({n for n, e in self.engines.items() if e.alive}, self.now)
            self.obey()

    @rule(seconds=st.sampled_from([0.5, 3.0, TIMEOUT]))
    def time_passes(self, seconds):
        self.now += seconds
        self.update.expire(self.now)
        self.obey()

    @invariant()
    def what_counts_as_serving_is_proved_and_no_other_version_serves_beside_it(self):
        for name, version in self.serving.items():
            assert self.engines[name].alive and self.engines[name].holds == version == 5 and name in self.update.served

    @invariant()
    def somebody_is_awaited_until_the_end(self):
        if hasattr(self, "update"):
            assert self.update.ended or self.update.missing()
            assert self.update.phase != Phase.DONE or self.update.served or self.update.others_serve
            assert self.update.phase != Phase.FAILED or self.update.reason

    def teardown(self):
        """With nobody answering any more it ends after a bounded number of deadlines; with everybody well, too."""
        if not hasattr(self, "update"):
            return
        for _ in range(2 * len(ENGINES) + 4 + RETURNS):
            self.now += TIMEOUT
            self.update.expire(self.now)
        assert self.update.ended


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 8), min_size=1, max_size=8))
def test_engine_ranks_are_a_bijection_onto_one_to_world_size(sizes):
    offsets, world = rank_offsets(sizes)
    ranks = [offsets[e] + local for e in sizes for local in range(sizes[e])]
    assert sorted(ranks) == list(range(1, world))
