"""Who owes what: the state of every group and of every rollout in it. Pure, no I/O, no clock.

A group is admitted when fewer than (max_lag + 1) x batch_size groups are admitted and not yet
trained; this bound, not discarding, limits staleness. Admission opens with `version(n)`, so a group
that is admitted in strict on-policy mode (max_lag 0) only ever sees the weights it will be trained
from. A rollout goes WAITING -> LEASED -> FINISHED and its group OPEN -> COMPLETE -> SHIPPED -> TRAINED;
the other ends are DROPPED (too few usable rollouts) and, of a single rollout, FAILED.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum


class SampleState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    FINISHED = "finished"
    FAILED = "failed"


class GroupState(StrEnum):
    OPEN = "open"
    COMPLETE = "complete"
    SHIPPED = "shipped"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass
class Sample:
    state: SampleState = SampleState.WAITING
    attempt: int = 0
    worker: str = ""
    deadline: float = 0.0
    reason: str = ""


@dataclass
class Group:
    """A prompt and its rollouts. `version` is the newest weights version when it was admitted."""

    id: int
    ordinal: int
    version: int
    samples: list[Sample]
    state: GroupState = GroupState.OPEN
    step: int = 0

    def finished(self) -> list[int]:
        return [index for index, s in enumerate(self.samples) if s.state == SampleState.FINISHED]


@dataclass
class Grant:
    """One lease given out: rollout `sample` of `group`, try number `attempt` (from 1)."""

    group: Group
    sample: int
    attempt: int

    @property
    def id(self) -> str:
        return lease_id(self.group.id, self.sample, self.attempt)


def lease_id(group: int, sample: int, attempt: int) -> str:
    return f"{group}.{sample}.{attempt}"


@dataclass
class LedgerConfig:
    batch_size: int
    n_samples: int
    min_group_size: int
    max_lag: int
    max_attempts: int
    lease_timeout: float
    total_prompts: int
    max_steps: int = 0


@dataclass
class Ledger:
    """All groups that are admitted and not yet ended, and counts of those that have."""

    config: LedgerConfig
    groups: OrderedDict[int, Group] = field(default_factory=OrderedDict)
    next_ordinal: int = 0
    next_group: int = 0
    current_version: int = -1
    admission_open: bool = False
    shipped_steps: int = 0
    trained_steps: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    failed_samples: Counter[str] = field(default_factory=Counter)
    complete: list[int] = field(default_factory=list)

    # admission -----------------------------------------------------------------------------

    @property
    def total_steps(self) -> int:
        by_prompts = -(-self.config.total_prompts // self.config.batch_size)
        return min(self.config.max_steps, by_prompts) if self.config.max_steps else by_prompts

    def prompts_left(self) -> int:
        return self.config.total_prompts - self.next_ordinal

    def version(self, version: int) -> None:
        """The engines now serve `version`: admission opens."""
        assert version > self.current_version, f"version {version} after {self.current_version}"
        self.current_version, self.admission_open = version, True

    def close_admission(self) -> None:
        """No group is admitted until the next `version`; leases of admitted groups go on."""
        self.admission_open = False

    def _may_admit(self) -> bool:
        if not self.admission_open or self.prompts_left() <= 0:
            return False
        wanted = (self.total_steps - self.trained_steps) * self.config.batch_size
        return len(self.groups) < min((self.config.max_lag + 1) * self.config.batch_size, wanted)

    def _admit(self) -> Group:
        group = Group(self.next_group, self.next_ordinal, self.current_version, [Sample() for _ in range(self.config.n_samples)])
        self.groups[group.id] = group
        self.next_group, self.next_ordinal = self.next_group + 1, self.next_ordinal + 1
        return group

    # leases --------------------------------------------------------------------------------

    def lease(self, worker: str, now: float) -> Grant | None:
        """Give the oldest waiting rollout to `worker`, admitting a group if none waits; None if there is none."""
        for group in self.groups.values():
            for index, sample in enumerate(group.samples):
                if group.state == GroupState.OPEN and sample.state == SampleState.WAITING:
                    return self._grant(group, index, worker, now)
        return self._grant(self._admit(), 0, worker, now) if self._may_admit() else None

    def _grant(self, group: Group, index: int, worker: str, now: float) -> Grant:
        sample = group.samples[index]
        sample.state, sample.worker, sample.deadline = SampleState.LEASED, worker, now + self.config.lease_timeout
        sample.attempt += 1
        return Grant(group, index, sample.attempt)

    def _leased(self, group_id: int, sample: int, attempt: int) -> Sample | None:
        group = self.groups.get(group_id)
        if group is None or not 0 <= sample < len(group.samples):
            return None
        found = group.samples[sample]
        return found if found.state == SampleState.LEASED and found.attempt == attempt else None

    def finish(self, group_id: int, sample: int, attempt: int) -> bool:
        """A usable rollout came back. False if that lease is not valid any more: its payload must be thrown away."""
        found = self._leased(group_id, sample, attempt)
        if found is None:
            return False
        found.state = SampleState.FINISHED
        self._close_group_if_done(self.groups[group_id])
        return True

    def fault(self, group_id: int, sample: int, attempt: int, kind: str, reason: str) -> bool:
        """A lease ended without a rollout. An infrastructure fault is leased again up to max_attempts times."""
        found = self._leased(group_id, sample, attempt)
        if found is None:
            return False
        found.reason = reason
        if kind == "infrastructure" and found.attempt < self.config.max_attempts:
            found.state = SampleState.WAITING
        else:
            found.state = SampleState.FAILED
            self.failed_samples[kind] += 1
            self._close_group_if_done(self.groups[group_id])
        return True

    def expire(self, now: float) -> list[Grant]:
        """Take back leases whose time is over; returns them (they were infrastructure faults)."""
        late = [Grant(g, i, s.attempt) for g in self.groups.values() for i, s in enumerate(g.samples)
                if s.state == SampleState.LEASED and s.deadline <= now]
        for grant in late:
            self.fault(grant.group.id, grant.sample, grant.attempt, "infrastructure", "the lease expired")
        return late

    def worker_lost(self, worker: str) -> list[Grant]:
        """Take back all leases of a worker that is gone."""
        lost = [Grant(g, i, s.attempt) for g in self.groups.values() for i, s in enumerate(g.samples)
                if s.state == SampleState.LEASED and s.worker == worker]
        for grant in lost:
            self.fault(grant.group.id, grant.sample, grant.attempt, "infrastructure", f"{worker} is gone")
        return lost

    def _close_group_if_done(self, group: Group) -> None:
        if any(s.state in (SampleState.WAITING, SampleState.LEASED) for s in group.samples):
            return
        if len(group.finished()) >= self.config.min_group_size:
            group.state = GroupState.COMPLETE
            self.complete.append(group.id)
        else:
            self._end(group, GroupState.DROPPED)

    def _end(self, group: Group, state: GroupState) -> None:
        group.state = state
        self.ended[state] += 1
        del self.groups[group.id]

    # batches -------------------------------------------------------------------------------

    def ship(self) -> tuple[int, list[Group]] | None:
        """The next batch as (step, groups) in order of completion, or None if it is not complete.

        Every batch has batch_size groups; only the last one of the prompts may be shorter.
        """
        size = self.config.batch_size
        if self.shipped_steps >= self.total_steps:
            return None
        if len(self.complete) < size:
            open_groups = any(g.state == GroupState.OPEN for g in self.groups.values())
            if open_groups or self.prompts_left() > 0 or not self.complete:
                return None
        self.shipped_steps += 1
        batch = [self.groups[group_id] for group_id in self.complete[:size]]
        del self.complete[:size]
        for group in batch:
            group.state, group.step = GroupState.SHIPPED, self.shipped_steps
        return self.shipped_steps, batch

    def trained(self, step: int) -> None:
        """Step `step` was taken on its batch: its groups end as TRAINED and their slots are free."""
        assert step == self.trained_steps + 1 <= self.shipped_steps, f"step {step} after {self.trained_steps}"
        for group in [g for g in self.groups.values() if g.step == step and g.state == GroupState.SHIPPED]:
            self._end(group, GroupState.TRAINED)
        self.trained_steps = step

    def done(self) -> bool:
        """No batch will be shipped any more: all steps are taken, or the prompts are used up and nothing is under way."""
        if self.trained_steps >= self.total_steps:
            return True
        return self.prompts_left() <= 0 and not self.groups and self.shipped_steps == self.trained_steps

    # views ---------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state, ended ones included; their sum is the number of groups ever admitted."""
        live = Counter(str(g.state) for g in self.groups.values())
        return {str(state): live[str(state)] + self.ended[state] for state in GroupState}

    def balance(self) -> int:
        """Groups admitted minus groups accounted for: always 0."""
        return self.next_group - sum(self.counts().values())

    def awaited(self) -> list[str]:
        """What the next batch still needs, oldest first: `group 311 sample 2 attempt 1 on rollout_n1`."""
        return [f"group {g.id} (prompt {g.ordinal}) sample {i} attempt {s.attempt} " + (f"on {s.worker}" if s.worker else "not leased")
                for g in self.groups.values() for i, s in enumerate(g.samples)
                if s.state in (SampleState.WAITING, SampleState.LEASED)]
