"""Who owes what: the state of every group and of every lease in it. Pure: no I/O, no clock of its own.

A group is admitted while fewer than (max_lag + 1) x batch_size groups are admitted and not yet ended; this
bound, not discarding, limits staleness. A group admitted at version v must be in batch v + max_lag + 1 at the
latest, so a batch is shipped only if the groups that stay behind can still meet their own last batch: young
groups pass a slow one as far as that allows, and no further.

    rollout   WAITING -> LEASED -> FINISHED, or FAILED when its attempts are used up
    group     OPEN -> COMPLETE -> SHIPPED -> TRAINED, or FILTERED, or DROPPED

Every lease (group, sample, attempt) ends in exactly one of `END_STATES`; `balance()` counts them against the
leases given out. What changes the ledger is returned by `events()` and can be applied to an empty one again
(`apply`), which is how the broker recovers from its journal.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Self

from molt_hpc.broker.groups import END_STATES, Grant, Group, GroupState, LedgerConfig, Sample, SampleState

__all__ = ["END_STATES", "Grant", "Group", "GroupState", "Ledger", "LedgerConfig", "Sample", "SampleState"]


@dataclass
class Ledger:
    """All groups that are admitted and not yet ended, and counts of what has ended."""

    config: LedgerConfig
    groups: OrderedDict[int, Group] = field(default_factory=OrderedDict)
    next_ordinal: int = 0
    next_group: int = 0
    current_version: int = -1
    admission_open: bool = False
    shipped_steps: int = 0
    trained_steps: int = 0
    leases: int = 0
    ended_groups: Counter[str] = field(default_factory=Counter)
    ended_leases: Counter[str] = field(default_factory=Counter)
    ended_seconds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    complete: list[int] = field(default_factory=list)
    filtered_in_a_row: int = 0
    epochs: list[bytes] = field(default_factory=list)
    rates: bytes = b""
    recorded: list[list[Any]] = field(default_factory=list)
    skipped_rows: int = 0
    _not_yet: bool = False  # no batch could be shipped, and no group has ended or closed since
    _waiting: deque[tuple[int, int]] = field(default_factory=deque)
    _log: list[dict[str, Any]] = field(default_factory=list)

    # events --------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """What has changed since the last call, to be journalled before anything is acknowledged."""
        log, self._log = self._log, []
        return log

    def apply(self, event: dict[str, Any]) -> None:
        """Repeat a journalled change. Raises KeyError or AssertionError if it does not follow from the state."""
        kind = event["kind"]
        arguments = {k: v for k, v in event.items() if k != "kind"}
        if kind == "lease":
            group = self.groups.get(arguments["group"]) or self._admit()
            assert (group.id, group.ordinal) == (arguments["group"], arguments["ordinal"]), f"{event} does not follow"
            self._grant(group, arguments["sample"], arguments["worker"], arguments["now"])
        else:
            {"version": self.version, "close_admission": self.close_admission, "finish": self.finish, "fault": self.fault,
             "close_group": self.close_group, "ship": self.ship, "trained": self.trained, "recover": self.recover,
             "begin_epoch": self.begin_epoch}[kind](**arguments)
        self._log.clear()

    def _record(self, kind: str, **arguments: Any) -> None:
        self._log.append({"kind": kind, **arguments})

    # admission -----------------------------------------------------------------------------

    @property
    def total_prompts(self) -> int:
        """Prompts of the run as far as it is known, at most."""
        return self.config.total_prompts - self.skipped_rows

    @property
    def known_prompts(self) -> int:
        """Ordinals below this one have a prompt."""
        begun = self.config.epoch_rows * (1 + len(self.epochs))
        return begun - self.skipped_rows if self.config.epoch_rows else self.config.total_prompts

    @property
    def total_steps(self) -> int:
        """Steps that the run takes at most."""
        return self._steps(self.total_prompts)

    @property
    def planned_steps(self) -> int:
        """`total_steps` as of the start of the run: the same in every attempt, so schedules go by it."""
        return self._steps(self.config.total_prompts)

    def _steps(self, prompts: int) -> int:
        by_prompts = -(-prompts // self.config.batch_size)
        return min(self.config.max_steps, by_prompts) if self.config.max_steps else by_prompts

    def prompts_left(self) -> int:
        """Prompts that are not admitted yet, at most."""
        return self.total_prompts - self.next_ordinal

    def epoch_wanted(self) -> bool:
        """Whether a group could be admitted but for its prompt: the next epoch must be chosen now."""
        return self.next_ordinal == self.known_prompts < self.total_prompts and self._slot_is_free()

    def begin_epoch(self, rows: bytes, rates: bytes) -> None:
        """The next epoch holds `rows` (int32 [K]), chosen by pass rates `rates`; both are kept for whoever names the prompts.

        `recorded` starts anew: (ordinal, pass rate) of the groups that close from here on.
        """
        assert self.next_ordinal == self.known_prompts < self.total_prompts, f"an epoch at prompt {self.next_ordinal} of {self.known_prompts}"
        self.epochs.append(rows)
        self.skipped_rows += self.config.epoch_rows - len(rows) // 4
        self.rates, self.recorded, self._not_yet = rates, [], False
        self._record("begin_epoch", rows=rows, rates=rates)

    def version(self, version: int) -> None:
        """The engines now serve `version`: admission opens. After a restart the same version may come again."""
        again = version == self.current_version and not self.admission_open
        assert version > self.current_version or again, f"version {version} after {self.current_version}"
        self.current_version, self.admission_open = version, True
        self._record("version", version=version)

    def close_admission(self) -> None:
        """No group is admitted until the next `version`; leases of admitted groups go on."""
        self.admission_open = False
        self._record("close_admission")

    def _may_admit(self) -> bool:
        return self.next_ordinal < self.known_prompts and self._slot_is_free()

    def _slot_is_free(self) -> bool:
        if not self.admission_open:
            return False
        wanted = (self.total_steps - self.trained_steps) * self.config.batch_size
        return len(self.groups) < min((self.config.max_lag + 1) * self.config.batch_size, wanted)

    def _admit(self) -> Group:
        size = self.config.n_samples
        group = Group(self.next_group, self.next_ordinal, self.current_version, [Sample() for _ in range(size)], unsettled=size)
        self.groups[group.id] = group
        self.next_group, self.next_ordinal = self.next_group + 1, self.next_ordinal + 1
        self._waiting.extend((group.id, index) for index in range(size))
        return group

    # leases --------------------------------------------------------------------------------

    def lease(self, worker: str, now: float) -> Grant | None:
        """Give the rollout that has waited longest to `worker`, admitting a group if none waits; None if there is none."""
        found = self._next_waiting()
        if found is None and self._may_admit():
            self._admit()
            found = self._next_waiting()
        return self._grant(*found, worker, now) if found else None

    def has_work(self) -> bool:
        """Whether `lease` would give something."""
        return self._next_waiting() is not None or self._may_admit()

    def _next_waiting(self) -> tuple[Group, int] | None:
        while self._waiting:
            group_id, index = self._waiting[0]
            group = self.groups.get(group_id)
            if group is not None and group.samples[index].state == SampleState.WAITING:
                return group, index
            self._waiting.popleft()
        return None

    def _grant(self, group: Group, index: int, worker: str, now: float) -> Grant:
        sample = group.samples[index]
        assert sample.state == SampleState.WAITING, f"group {group.id} sample {index} is {sample.state}"
        sample.state, sample.worker, sample.granted = SampleState.LEASED, worker, now
        sample.deadline = now + self.config.lease_timeout
        sample.attempt += 1
        if self.config.group_timeout and not group.deadline:
            group.deadline = now + self.config.group_timeout
        self.leases += 1
        self._record("lease", group=group.id, ordinal=group.ordinal, sample=index, worker=worker, now=now)
        return Grant(group, index, sample.attempt)

    def leased(self, group: int, sample: int, attempt: int) -> Sample | None:
        """The rollout of this lease; None if the lease is not valid any more."""
        entry = self.groups.get(group)
        if entry is None or not 0 <= sample < len(entry.samples):
            return None
        found = entry.samples[sample]
        return found if found.state == SampleState.LEASED and found.attempt == attempt else None

    def finish(self, group: int, sample: int, attempt: int, seconds: float = 0.0, score: float = 0.0) -> bool:
        """A usable rollout came back. False if its lease is not valid any more: the payload must be thrown away."""
        found = self.leased(group, sample, attempt)
        if found is None:
            return False
        found.state, found.seconds, found.score = SampleState.FINISHED, seconds, score
        self._record("finish", group=group, sample=sample, attempt=attempt, seconds=seconds, score=score)
        self._settle(self.groups[group])
        return True

    def fault(self, group: int, sample: int, attempt: int, fault: str, reason: str, now: float) -> bool:
        """A lease ended without a rollout. An infrastructure fault is leased again up to max_attempts times."""
        found = self.leased(group, sample, attempt)
        if found is None:
            return False
        self._record("fault", group=group, sample=sample, attempt=attempt, fault=fault, reason=reason, now=now)
        self._end_lease(found, "failed", now - found.granted, f"{fault}: {reason}")
        found.faults += 1
        if fault == "infrastructure" and found.faults < self.config.max_attempts:
            found.state = SampleState.WAITING
            self._waiting.appendleft((group, sample))
        else:
            found.state = SampleState.FAILED
            self._settle(self.groups[group])
        return True

    def _end_lease(self, sample: Sample, end: str, seconds: float, reason: str = "") -> None:
        self.ended_leases[end] += 1
        self.ended_seconds[end] += seconds
        if reason:
            self.reasons[reason.splitlines()[0][:120]] += 1

    def expire(self, now: float) -> list[Grant]:
        """Take back leases whose time is over; returns them."""
        return self._take_back(lambda sample: sample.deadline <= now, "the lease expired", now)

    def worker_lost(self, worker: str, now: float) -> list[Grant]:
        """Take back all leases of a worker that is gone; returns them."""
        return self._take_back(lambda sample: sample.worker == worker, f"{worker} is gone", now)

    def _take_back(self, wanted: Callable[[Sample], bool], reason: str, now: float) -> list[Grant]:
        """End the leases of these rollouts as infrastructure faults."""
        taken = [Grant(group, index, sample.attempt) for group in self.groups.values() if group.unsettled
                 for index, sample in enumerate(group.samples) if sample.state is SampleState.LEASED and wanted(sample)]
        for grant in taken:
            self.fault(grant.group.id, grant.sample, grant.attempt, "infrastructure", reason, now)
        return taken

    def progress(self, group: int, sample: int, attempt: int, now: float) -> None:
        """Tokens came for this lease: its deadline moves on. (Not journalled: after a restart no lease is valid.)"""
        found = self.leased(group, sample, attempt)
        if found is not None:
            found.deadline = now + self.config.lease_timeout

    def recover(self, now: float) -> int:
        """After a restart no lease is valid: give all of them out again, at no cost to their budget. Returns their number."""
        self._record("recover", now=now)
        taken = 0
        for group in self.groups.values():
            for index, sample in enumerate(group.samples):
                if sample.state == SampleState.LEASED:
                    self._end_lease(sample, "failed", now - sample.granted, "infrastructure: the broker was restarted")
                    sample.state = SampleState.WAITING
                    self._waiting.append((group.id, index))
                    taken += 1
        self.admission_open = False
        return taken

    # snapshots -----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole state as msgpack types."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("config", "groups") and not f.name.startswith("_")}
        return plain | {"groups": [vars(g) | {"samples": [list(vars(s).values()) for s in g.samples]} for g in self.groups.values()]}

    @classmethod
    def from_snapshot(cls, config: LedgerConfig, state: dict[str, Any]) -> Self:
        """The ledger that `snapshot` was taken of."""
        ledger = cls(config)
        for name, value in state.items():
            setattr(ledger, name, Counter(value) if isinstance(value, dict) else value)
        ledger.groups = OrderedDict()
        for entry in state["groups"]:
            samples = [Sample(SampleState(first), *rest) for first, *rest in entry["samples"]]
            group = ledger.groups[entry["id"]] = Group(**(entry | {"state": GroupState(entry["state"]), "samples": samples}))
            ledger._waiting.extend((group.id, index) for index, sample in enumerate(samples) if sample.state == SampleState.WAITING)
        return ledger

    # groups --------------------------------------------------------------------------------

    def late_groups(self, now: float) -> list[Group]:
        """Open groups whose deadline has passed and that have enough usable rollouts to go without the rest."""
        return [g for g in self.groups.values() if g.state == GroupState.OPEN and 0 < g.deadline <= now
                and len(g.finished()) >= self.config.min_group_size]

    def close_group(self, group: int, now: float) -> list[Grant]:
        """Close a group without its unfinished rollouts; returns the leases that end by it."""
        entry, cut = self.groups[group], []
        self._record("close_group", group=group, now=now)
        for index, sample in enumerate(entry.samples):
            if sample.state in (SampleState.WAITING, SampleState.LEASED):
                if sample.state == SampleState.LEASED:
                    cut.append(Grant(entry, index, sample.attempt))
                    self._end_lease(sample, "dropped", now - sample.granted, "the group's deadline passed")
                sample.state = SampleState.FAILED
        entry.unsettled = 0
        self._close(entry)
        return cut

    def _settle(self, group: Group) -> None:
        """One rollout of the group has come to its end; close the group if it was the last."""
        group.unsettled -= 1
        if group.unsettled == 0:
            self._close(group)

    def _close(self, group: Group) -> None:
        self._not_yet = False
        scores = [group.samples[index].score for index in group.finished()]
        mean = sum(scores) / max(len(scores), 1)
        if self.config.epoch_rows and scores:
            self.recorded.append([group.ordinal, sum(score > 0.5 for score in scores) / len(scores)])
        if len(scores) < self.config.min_group_size:
            self._end_group(group, GroupState.DROPPED, f"fewer than {self.config.min_group_size} usable rollouts")
        elif self.config.filter_range and not self.config.filter_range[0] < mean < self.config.filter_range[1]:
            self.filtered_in_a_row += 1
            self._end_group(group, GroupState.FILTERED, f"mean score {mean:.1f} is outside the filter's range")
        else:
            self.filtered_in_a_row = 0
            group.state = GroupState.COMPLETE
            self.complete.append(group.id)

    def _end_group(self, group: Group, state: GroupState, reason: str = "") -> None:
        for index in group.finished():
            self._end_lease(group.samples[index], str(state), group.samples[index].seconds, reason)
        group.state = state
        self.ended_groups[state] += 1
        del self.groups[group.id]

    # batches -------------------------------------------------------------------------------

    def ship(self, step: int | None = None) -> tuple[int, list[Group]] | None:
        """The next batch as (step, groups), or None if it is not complete.

        Every batch has batch_size groups, those with the earliest last step first; only the last batch of the
        prompts may be shorter. With `step` the caller asks for that batch and it must be complete.
        """
        batch = None if self._not_yet else self._next_batch()
        if batch is None:
            self._not_yet = True
            assert step is None, f"batch {step} is not complete"
            return None
        self.shipped_steps += 1
        assert step in (None, self.shipped_steps), f"batch {step} after {self.shipped_steps - 1}"
        for group in batch:
            self.complete.remove(group.id)
            group.state, group.step = GroupState.SHIPPED, self.shipped_steps
        self._record("ship", step=self.shipped_steps)
        return self.shipped_steps, batch

    def _next_batch(self) -> list[Group] | None:
        size, step = self.config.batch_size, self.shipped_steps + 1
        if step > self.total_steps:
            return None
        if len(self.complete) < size:
            open_groups = any(g.state == GroupState.OPEN for g in self.groups.values())
            if open_groups or self.prompts_left() > 0 or not self.complete:
                return None
        batch = sorted((self.groups[g] for g in self.complete), key=lambda g: g.version)[:size]
        chosen = {g.id for g in batch}
        # a group may be in batch version + max_lag + 1 at the latest: how many of those that stay behind are due by each later batch
        due = Counter(max(g.version + self.config.max_lag + 1 - step, 0) for g in self.groups.values()
                      if g.id not in chosen and g.state in (GroupState.OPEN, GroupState.COMPLETE))
        behind = 0
        for later in range(self.config.max_lag + 1):
            behind += due[later]
            if behind > later * size:
                return None
        return batch

    def trained(self, step: int) -> None:
        """Step `step` was taken on its batch: its groups end as TRAINED and their slots are free."""
        assert step == self.trained_steps + 1 <= self.shipped_steps, f"step {step} after {self.trained_steps}"
        for group in self.batch(step):
            self._end_group(group, GroupState.TRAINED)
        self.trained_steps, self._not_yet = step, False
        self._record("trained", step=step)

    def batch(self, step: int) -> list[Group]:
        """The groups of a batch that was shipped and is not yet trained."""
        if step > self.shipped_steps:
            return []
        return [g for g in self.groups.values() if g.state == GroupState.SHIPPED and g.step == step]

    def done(self) -> bool:
        """No batch will be shipped any more: all steps are taken, or the prompts are used up and nothing is under way."""
        if self.trained_steps >= self.total_steps:
            return True
        return self.prompts_left() <= 0 and not self.groups and self.shipped_steps == self.trained_steps

    # views ---------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state, ended ones included; their sum is the number of groups ever admitted."""
        live = Counter(str(g.state) for g in self.groups.values())
        return {str(state): live[str(state)] + self.ended_groups[state] for state in GroupState}

    def totals(self) -> Counter[str]:
        """What has ended so far: groups, leases and their seconds by end state, failed rollouts by kind of fault."""
        counts = Counter({f"groups_{state}": self.ended_groups[state] for state in (GroupState.TRAINED, GroupState.FILTERED, GroupState.DROPPED)})
        counts.update({f"leases_{end}": self.ended_leases[end] for end in END_STATES})
        counts.update({f"rollout_seconds_{end}": self.ended_seconds[end] for end in END_STATES})
        for kind in ("infrastructure", "data"):
            counts[f"failed_rollouts_{kind}"] = sum(n for reason, n in self.reasons.items() if reason.startswith(f"{kind}:"))
        return counts

    def balance(self) -> int:
        """Leases given out minus leases that are out, finished or ended, plus the same of groups: always 0."""
        live = sum(s.state in (SampleState.LEASED, SampleState.FINISHED) for g in self.groups.values() for s in g.samples)
        return abs(self.leases - live - sum(self.ended_leases.values())) + abs(self.next_group - sum(self.counts().values()))

    def awaited(self, limit: int = 5) -> list[str]:
        """What the next batch still needs, oldest first: `group 311 (prompt 40) sample 2 attempt 1 on rollout_n1`."""
        found = []
        for group in self.groups.values():
            for index, sample in enumerate(group.samples):
                if sample.state in (SampleState.WAITING, SampleState.LEASED) and len(found) < limit:
                    where = f"on {sample.worker}" if sample.state == SampleState.LEASED else "not leased"
                    found.append(f"group {group.id} (prompt {group.ordinal}) sample {index} attempt {sample.attempt} {where}")
        return found
