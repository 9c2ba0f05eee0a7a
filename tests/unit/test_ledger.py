"""The ledger and its journal under random interleavings and crashes: nothing lost, nothing twice, nothing stale."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from molt_hpc.broker.journal import Journal, segment_path
from molt_hpc.broker.ledger import GroupState, Ledger, LedgerConfig
from molt_hpc.broker.store import next_segment, recover, snapshot


def make(batch=2, n=2, minimum=1, lag=0, attempts=2, prompts=10, max_steps=0, filter_range=None, group_timeout=0.0):
    ledger = Ledger(LedgerConfig(batch, n, minimum, lag, attempts, 100.0, prompts, max_steps, group_timeout, filter_range))
    ledger.version(0)
    return ledger


class LedgerMachine(RuleBasedStateMachine):
    """Workers lease, finish, fail and vanish in any order, the broker crashes, a trainer takes whatever batch is ready."""

    @initialize(batch=st.integers(1, 3), n=st.integers(1, 3), lag=st.integers(0, 2), prompts=st.integers(1, 9), attempts=st.integers(1, 2),
                max_steps=st.integers(0, 4), filtered=st.booleans(), timeout=st.sampled_from([0.0, 60.0]))
    def start(self, batch, n, lag, prompts, attempts, max_steps, filtered, timeout):
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # the disk is not what is tested
        self.ledger = make(batch, n, 1, lag, attempts, prompts, max_steps, (0.0, 1.0) if filtered else None, timeout)
        self.config, self.places = self.ledger.config, {}
        self.ledger.events()
        self.journal = Journal(self.folder, 1, snapshot(self.ledger, {}))
        self.out, self.now, self.version, self.batch = [], 0.0, 0, None
        self.trained, self.accepted, self.ended = Counter(), set(), Counter()
        self.commit()

    def commit(self, frames=()):
        for event in self.ledger.events():
            finished = event["kind"] == "finish"
            place = self.journal.append(event, frames if finished else ())
            if finished:
                self.places[event["group"], event["sample"]] = place
        self.journal.flush()

    taken = 0

    @rule(worker=st.sampled_from("ab"))
    def lease(self, worker):
        grant = self.ledger.lease(worker, self.now)
        self.commit()
        if grant:
            self.out.append(grant)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), score=st.sampled_from([0.0, 0.5, 1.0]))
    def finish(self, data, score):
        grant = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if self.ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, score):
            assert (grant.group.id, grant.sample) not in self.accepted
            self.accepted.add((grant.group.id, grant.sample))
            self.commit([grant.id.encode()])

    @precondition(lambda self: self.out)
    @rule(data=st.data(), kind=st.sampled_from(["data", "infrastructure"]))
    def fault(self, data, kind):
        grant = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.ledger.fault(grant.group.id, grant.sample, grant.attempt, kind, "test", self.now)
        self.commit()

    @rule(worker=st.sampled_from("ab"))
    def lose_worker(self, worker):
        self.ledger.worker_lost(worker, self.now)
        self.commit()

    @rule(seconds=st.floats(1, 150))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)
        for group in self.ledger.late_groups(self.now):
            self.ledger.close_group(group.id, self.now)
        self.commit()

    @rule(cut=st.integers(0, 40))
    def crash(self, cut):
        """The broker dies while it writes a record that nobody has been told of, and comes back."""
        self.journal.close()
        with open(segment_path(self.folder, self.journal.number), "ab") as file:
            file.write(b"\x40\0\0\0\x99"[:min(cut, 5)])
        self.ledger, self.places, number = recover(self.folder, self.config, self.now)
        self.journal = Journal(self.folder, number, snapshot(self.ledger, self.places))
        self.batch = None
        self.version = self.ledger.trained_steps
        self.ledger.version(self.version)
        self.commit()

    @rule()
    def rotate(self):
        next_segment(self.journal, self.ledger, self.places)

    @rule()
    def ship(self):
        if self.batch is None:
            again = self.ledger.batch(self.ledger.trained_steps + 1)
            self.batch = (self.ledger.trained_steps + 1, again) if again else self.ledger.ship()
            self.commit()
        if self.batch:
            for group in self.batch[1]:
                assert self.version - group.version <= self.config.max_lag
                for sample in group.finished():
                    (frame,) = self.journal.read(self.places[group.id, sample])
                    assert frame == f"{group.id}.{sample}.{group.samples[sample].attempt}".encode()

    @precondition(lambda self: self.batch)
    @rule()
    def train(self):
        step, groups = self.batch
        self.batch = None
        self.trained.update(group.ordinal for group in groups)
        self.ledger.close_admission()
        self.ledger.trained(step)
        self.version += 1
        self.ledger.version(self.version)
        self.commit()

    @invariant()
    def every_lease_and_group_is_accounted_for(self):
        if hasattr(self, "ledger"):
            LedgerMachine.taken += 1
            assert self.ledger.balance() == 0
            assert max(self.trained.values(), default=0) <= 1
            assert len(self.ledger.groups) <= (self.config.max_lag + 1) * self.config.batch_size

    def teardown(self):
        """Let everybody work well from here on: the run must end by itself with every prompt in one end state."""
        if not hasattr(self, "ledger"):
            return
        self.lose_worker("a")
        self.lose_worker("b")
        for _ in range(1000):
            if self.ledger.done():
                break
            while (grant := self.ledger.lease("c", self.now)) is not None:
                self.ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, 0.5)
                self.commit([grant.id.encode()])
            self.ship()
            if self.batch:
                self.train()
        assert self.ledger.done()
        if not self.config.max_steps:
            counts = self.ledger.counts()
            assert counts["trained"] + counts["dropped"] + counts["filtered"] == self.config.total_prompts
            assert sum(self.trained.values()) == counts["trained"]
        self.journal.close()
        shutil.rmtree(self.folder)


LedgerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)


class TestLedgerAndJournalKeepTheirPromisesUnderAnyInterleaving(LedgerMachine.TestCase):
    def runTest(self):
        super().runTest()
        assert LedgerMachine.taken >= 20_000


@given(batch=st.integers(1, 4), prompts=st.integers(1, 13), n=st.integers(1, 3))
def test_every_prompt_is_trained_once_whatever_the_remainder(batch, prompts, n):
    ledger, seen, version = make(batch, n, prompts=prompts), Counter(), 0
    while not ledger.done():
        while grant := ledger.lease("w", 0.0):
            ledger.finish(grant.group.id, grant.sample, grant.attempt)
        step, groups = ledger.ship()
        seen.update(g.ordinal for g in groups)
        assert {g.version for g in groups} == {version}
        ledger.close_admission()
        ledger.trained(step)
        version += 1
        ledger.version(version)
    assert seen == Counter(range(prompts))
    assert ledger.trained_steps == ledger.total_steps == -(-prompts // batch)


def test_strictly_on_policy_admits_nothing_between_trained_and_the_new_version():
    ledger = make(batch=1, n=1)
    grant = ledger.lease("w", 0.0)
    assert ledger.lease("w", 0.0) is None
    ledger.finish(grant.group.id, 0, 1)
    step, _ = ledger.ship()
    ledger.close_admission()
    ledger.trained(step)
    assert ledger.lease("w", 0.0) is None
    ledger.version(1)
    assert ledger.lease("w", 0.0).group.version == 1


def test_an_expired_lease_is_given_to_another_worker_and_the_late_answer_is_refused():
    ledger = make(batch=1, n=1)
    first = ledger.lease("slow", 0.0)
    assert [g.id for g in ledger.expire(101.0)] == [first.id]
    second = ledger.lease("quick", 101.0)
    assert (second.group.id, second.sample, second.attempt) == (first.group.id, first.sample, 2)
    assert not ledger.finish(first.group.id, first.sample, first.attempt)
    assert ledger.finish(second.group.id, second.sample, second.attempt)


def test_a_group_with_too_few_usable_rollouts_is_dropped_and_replaced():
    ledger = make(batch=1, n=2, minimum=2, prompts=2)
    for _ in range(2):
        grant = ledger.lease("w", 0.0)
        ledger.fault(grant.group.id, grant.sample, grant.attempt, "data", "bad", 0.0)
    assert ledger.counts()[GroupState.DROPPED] == 1
    assert ledger.lease("w", 0.0).group.ordinal == 1


def test_infrastructure_faults_are_retried_a_bounded_number_of_times():
    ledger = make(batch=1, n=1, attempts=3, prompts=1)
    for attempt in (1, 2, 3):
        grant = ledger.lease("w", 0.0)
        assert grant.attempt == attempt
        ledger.fault(grant.group.id, 0, attempt, "infrastructure", "engine died", 0.0)
    assert ledger.lease("w", 0.0) is None
    assert ledger.ended_leases["failed"] == 3 and ledger.reasons["infrastructure: engine died"] == 3
    assert ledger.done()
