"""The ledger under random interleavings: nothing lost, nothing twice, nothing stale."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from molt_hpc.broker.ledger import GroupState, Ledger, LedgerConfig


def make(batch=2, n=2, minimum=1, lag=0, attempts=2, prompts=10, max_steps=0):
    ledger = Ledger(LedgerConfig(batch, n, minimum, lag, attempts, 100.0, prompts, max_steps))
    ledger.version(0)
    return ledger


class LedgerMachine(RuleBasedStateMachine):
    """Workers lease, finish, fail and vanish in any order; a trainer takes whatever batch is ready."""

    @initialize(batch=st.integers(1, 3), n=st.integers(1, 3), lag=st.integers(0, 2), prompts=st.integers(1, 9),
                attempts=st.integers(1, 2), max_steps=st.integers(0, 4))
    def start(self, batch, n, lag, prompts, attempts, max_steps):
        self.ledger = make(batch, n, 1, lag, attempts, prompts, max_steps)
        self.out, self.now, self.version = [], 0.0, 0
        self.shipped, self.trained, self.finished = [], Counter(), Counter()

    @rule(worker=st.sampled_from("ab"))
    def lease(self, worker):
        grant = self.ledger.lease(worker, self.now)
        if grant:
            self.out.append((worker, self.now, grant))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def finish(self, data):
        worker, _, grant = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if self.ledger.finish(grant.group.id, grant.sample, grant.attempt):
            self.finished[grant.group.id, grant.sample] += 1

    @precondition(lambda self: self.out)
    @rule(data=st.data(), kind=st.sampled_from(["data", "infrastructure"]))
    def fault(self, data, kind):
        _, _, grant = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.ledger.fault(grant.group.id, grant.sample, grant.attempt, kind, "test")

    @rule(worker=st.sampled_from("ab"))
    def lose_worker(self, worker):
        self.ledger.worker_lost(worker)

    @rule(seconds=st.floats(1, 150))
    def time_passes(self, seconds):
        self.now += seconds
        self.ledger.expire(self.now)

    @rule()
    def train(self):
        shipped = self.ledger.ship()
        if shipped:
            self.shipped.append(shipped)
        if self.shipped:
            step, groups = self.shipped.pop(0)
            for group in groups:
                assert self.version - group.version <= self.ledger.config.max_lag
                self.trained[group.ordinal] += 1
            self.ledger.close_admission()
            self.ledger.trained(step)
            self.version += 1
            self.ledger.version(self.version)

    @invariant()
    def every_group_is_accounted_for(self):
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.balance() == 0
        assert max(self.trained.values(), default=0) <= 1
        assert max(self.finished.values(), default=0) <= 1
        assert len(self.ledger.groups) <= (self.ledger.config.max_lag + 1) * self.ledger.config.batch_size

    def teardown(self):
        """Let everybody work well from here on: the run must end by itself with every prompt in one end state."""
        if not hasattr(self, "ledger"):
            return
        self.ledger.worker_lost("a")
        self.ledger.worker_lost("b")
        for _ in range(1000):
            if self.ledger.done():
                break
            while (grant := self.ledger.lease("c", self.now)) is not None:
                self.ledger.finish(grant.group.id, grant.sample, grant.attempt)
            self.train()
        assert self.ledger.done()
        if not self.ledger.config.max_steps:
            counts = self.ledger.counts()
            assert counts["trained"] + counts["dropped"] == self.ledger.config.total_prompts
            assert sum(self.trained.values()) == counts["trained"]


LedgerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_ledger_keeps_its_promises_under_any_interleaving = LedgerMachine.TestCase


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
        ledger.fault(grant.group.id, grant.sample, grant.attempt, "data", "bad")
    assert ledger.counts()[GroupState.DROPPED] == 1
    assert ledger.lease("w", 0.0).group.ordinal == 1


def test_infrastructure_faults_are_retried_a_bounded_number_of_times():
    ledger = make(batch=1, n=1, attempts=3, prompts=1)
    for attempt in (1, 2, 3):
        grant = ledger.lease("w", 0.0)
        assert grant.attempt == attempt
        ledger.fault(grant.group.id, 0, attempt, "infrastructure", "engine died")
    assert ledger.lease("w", 0.0) is None
    assert ledger.failed_samples["infrastructure"] == 1
    assert ledger.done()
