"""Staleness and fairness of the ledger with slow prompts: a whole run in virtual time, with delays that depend on the prompt."""

import heapq
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt_hpc.broker.ledger import Grant, GroupState, Ledger, LedgerConfig

LONG_EVERY = 4
"""Every fourth prompt takes long: the dataset's share is the same in every stretch of ordinals."""


def is_long(ordinal):
    return ordinal % LONG_EVERY == 0


@dataclass
class Simulation:
    """Slots that always hold a lease if there is one, and a trainer that takes every batch; `delay(grant)` is a rollout's time.

    `current` is the version that the engines sample from; tokens of a rollout are as old as its lease or younger.
    """

    config: LedgerConfig
    delay: object
    score: object = lambda grant: 1.0
    slots: int = 64
    train_seconds: float = 4.0
    now: float = 0.0
    events: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    oldest: dict = field(default_factory=dict)
    admitted: dict = field(default_factory=dict)
    closed_late: Counter = field(default_factory=Counter)
    leased_at: dict = field(default_factory=dict)
    settled_after: dict = field(default_factory=lambda: defaultdict(float))
    order: object = field(default_factory=itertools.count)

    def run(self):
        self.ledger, self.free, self.training = Ledger(self.config), self.slots, None
        self.ledger.version(0)
        while not self.ledger.done():
            self._give()
            self._ship()
            assert self.events or self.ledger.done(), f"nothing happens any more at {self.now}: {self.ledger.awaited()}"
            if self.events:
                self.now, _, what, value = heapq.heappop(self.events)
                getattr(self, what)(value)
            self._close_late()
            assert self.ledger.balance() == 0
        return self

    def _at(self, seconds, what, value):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what, value))

    def _give(self):
        while self.free and (grant := self.ledger.lease("w", self.now)) is not None:
            self.free -= 1
            self.admitted.setdefault(grant.group.id, self.ledger.shipped_steps)
            self.leased_at.setdefault(grant.group.id, self.now)
            self.oldest[grant.id] = self.ledger.current_version
            self._at(self.delay(grant), "finished", grant)
            if self.config.group_timeout and grant.sample == 0:
                self._at(self.config.group_timeout, "look", None)

    def look(self, _):
        """A moment at which the broker looks at the deadlines."""

    def finished(self, grant: Grant):
        self.free += 1
        if self.ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, self.score(grant)):
            self.settled_after[grant.group.id] = self.now - self.leased_at[grant.group.id]

    def _close_late(self):
        for group in self.ledger.late_groups(self.now):
            self.closed_late[group.id] = len(self.ledger.close_group(group.id, self.now))

    def _ship(self):
        if self.training is None and (shipped := self.ledger.ship()):
            step, groups = shipped
            self.training = step
            self.batches.append([(g.ordinal, g.id, [f"{g.id}.{s}.{g.samples[s].attempt}" for s in g.finished()]) for g in groups])
            self._at(self.train_seconds, "trained", step)

    def trained(self, step):
        self.ledger.close_admission()
        self.ledger.trained(step)
        self.training = None
        self.ledger.version(step)

    def staleness(self):
        """Of every trained rollout: version trained from minus version of its oldest token."""
        return [step - self.oldest[lease] for step, batch in enumerate(self.batches) for _, _, leases in batch for lease in leases]

    def ordinals(self):
        return [ordinal for batch in self.batches for ordinal, _, _ in batch]


def correlated(seed, long_seconds=40.0, spread=0.5):
    """Seconds of a rollout: long prompts take about twenty times as long, with a heavy tail in each class."""
    def delay(grant):
        draw = np.random.default_rng([seed, grant.group.ordinal, grant.sample, grant.attempt])
        return float(draw.lognormal(0.0, spread)) * (long_seconds if is_long(grant.group.ordinal) else 2.0)
    return delay


@pytest.mark.parametrize("lag", [1, 2])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.sampled_from([4, 8]), slots=st.sampled_from([8, 48, 200]))
def test_slow_prompts_keep_their_share_and_no_token_is_older_than_max_lag(lag, seed, batch, slots):
    steps, window = 40, 20
    found = Simulation(LedgerConfig(batch, 4, 2, lag, 3, 1e9, batch * steps), correlated(seed), slots=slots).run()
    assert sorted(found.ordinals()) == list(range(batch * steps))
    assert Counter(map(len, found.batches)) == {batch: steps}
    assert max(found.staleness()) <= lag
    long = np.array([is_long(ordinal) for ordinal in found.ordinals()])
    assert long.mean() == 1 / LONG_EVERY
    # what is admitted and not yet trained, (max_lag + 1) batches at most, is all that a window can be off by
    for first in range(steps - window + 1):
        share = long[first * batch:(first + window) * batch].mean()
        assert abs(share - 1 / LONG_EVERY) <= (lag + 1) / window


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("slots", [8, 48, 200])
def test_slow_prompts_are_passed_but_trained_by_their_last_step(lag, slots):
    found = Simulation(LedgerConfig(8, 4, 2, lag, 3, 1e9, 400), correlated(5), slots=slots).run()
    order = np.array(found.ordinals())
    assert (np.diff(order) < 0).any()  # young groups have passed slow ones
    step_of = {group: step for step, batch in enumerate(found.batches, 1) for _, group, _ in batch}
    waited = {group: step_of[group] - found.admitted[group] for group in step_of}
    assert max(waited.values()) <= lag + 1
    assert len(waited) == 400


def test_look_ahead_makes_the_run_shorter_than_strict_order():
    seconds = [Simulation(LedgerConfig(8, 4, 2, lag, 3, 1e9, 400), correlated(5), slots=200).run().now for lag in (0, 1, 2)]
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * seconds[2]


def test_strictly_on_policy_every_token_is_of_the_version_trained_from():
    found = Simulation(LedgerConfig(8, 4, 2, 0, 3, 1e9, 200), correlated(1), slots=16).run()
    assert set(found.staleness()) == {0} and sorted(found.ordinals()) == list(range(200))


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_slow_group_goes_on_without_its_slow_rollouts_when_enough_are_there(lag):
    def delay(grant):  # one rollout of every long prompt hangs for very long
        return 5000.0 if is_long(grant.group.ordinal) and grant.sample == 3 else 5.0
    found = Simulation(LedgerConfig(4, 4, 2, lag, 3, 1e9, 80, group_timeout=30.0), delay, slots=400).run()
    assert sorted(found.ordinals()) == list(range(80))
    sizes = {ordinal: len(leases) for batch in found.batches for ordinal, _, leases in batch}
    assert all(size == (3 if is_long(ordinal) else 4) for ordinal, size in sizes.items())
    assert found.ledger.ended_leases == {"trained": 300, "dropped": 20}
    assert found.ledger.reasons == {"the group's deadline passed": 20}
    assert found.now < 20 * (30 + found.train_seconds + 1)


def test_a_slow_group_waits_beyond_its_deadline_while_too_few_rollouts_are_there():
    def delay(grant):  # of long prompts only one rollout is quick, the second comes after the deadline
        return (5.0, 90.0, 5000.0, 5000.0)[grant.sample] if is_long(grant.group.ordinal) else 5.0
    found = Simulation(LedgerConfig(4, 4, 2, 1, 3, 1e9, 40, group_timeout=30.0), delay, slots=400).run()
    sizes = {ordinal: len(leases) for batch in found.batches for ordinal, _, leases in batch}
    assert sizes == {ordinal: 2 if is_long(ordinal) else 4 for ordinal in range(40)}
    slow = [group for batch in found.batches for ordinal, group, _ in batch if is_long(ordinal)]
    assert all(found.settled_after[group] == pytest.approx(90.0) and found.closed_late[group] == 2 for group in slow)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("prompts", [96, 101])
def test_filtered_groups_are_counted_and_batches_are_refilled(lag, prompts):
    def score(grant):  # two of three prompts have rollouts that all agree
        return (1.0, 0.0, float(grant.sample % 2))[grant.group.ordinal % 3]
    config = LedgerConfig(8, 4, 2, lag, 3, 1e9, prompts, filter_range=(0.0, 1.0))
    found = Simulation(config, correlated(3), score, slots=40).run()
    useful = [ordinal for ordinal in range(prompts) if ordinal % 3 == 2]
    assert sorted(found.ordinals()) == useful
    assert [len(batch) for batch in found.batches[:-1]] == [8] * (len(useful) // 8 - (len(useful) % 8 == 0))
    filtered = prompts - len(useful)
    assert found.ledger.ended_groups == {"trained": len(useful), "filtered": filtered}
    assert found.ledger.ended_leases == {"trained": 4 * len(useful), "filtered": 4 * filtered}
    assert sum(found.ledger.reasons.values()) == 4 * filtered and all("mean score" in reason for reason in found.ledger.reasons)
    assert max(found.staleness()) <= lag
    assert found.ledger.counts()[GroupState.FILTERED] == filtered


def test_filtered_groups_in_a_row_are_counted_until_one_is_useful():
    ledger = Ledger(LedgerConfig(2, 2, 1, 0, 1, 1e9, 50, filter_range=(0.0, 1.0)))
    ledger.version(0)
    for _ in range(7):
        for grant in [ledger.lease("w", 0.0), ledger.lease("w", 0.0)]:
            ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, 1.0)
    assert ledger.filtered_in_a_row == 7 and ledger.ended_leases["filtered"] == 14
    for score, grant in zip((0.0, 1.0), [ledger.lease("w", 0.0), ledger.lease("w", 0.0)], strict=True):
        ledger.finish(grant.group.id, grant.sample, grant.attempt, 1.0, score)
    assert ledger.filtered_in_a_row == 0 and len(ledger.complete) == 1
