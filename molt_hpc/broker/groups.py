"""The ledger's records: a prompt's group, its rollouts, a lease, and the bounds that all of them obey."""

from dataclasses import dataclass
from enum import StrEnum

from molt_hpc.config import RunConfig


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
    FILTERED = "filtered"
    DROPPED = "dropped"


END_STATES = ("trained", "filtered", "dropped", "failed")
"""How a lease ends: trained on; filtered with its group; dropped (finished too late, or its group was too small or too
late); failed (infrastructure or data fault)."""


@dataclass
class Sample:
    state: SampleState = SampleState.WAITING
    attempt: int = 0
    faults: int = 0
    worker: str = ""
    granted: float = 0.0
    deadline: float = 0.0
    seconds: float = 0.0
    score: float = 0.0


@dataclass
class Group:
    """A prompt and its rollouts. `version` is the newest weights version when it was admitted."""

    id: int
    ordinal: int
    version: int
    samples: list[Sample]
    state: GroupState = GroupState.OPEN
    step: int = 0
    deadline: float = 0.0
    unsettled: int = 0

    def finished(self) -> list[int]:
        return [index for index, s in enumerate(self.samples) if s.state == SampleState.FINISHED]


@dataclass(frozen=True)
class Grant:
    """One lease: rollout `sample` of `group`, try number `attempt` (from 1)."""

    group: Group
    sample: int
    attempt: int

    @property
    def id(self) -> str:
        return f"{self.group.id}.{self.sample}.{self.attempt}"


@dataclass
class LedgerConfig:
    """Sizes and bounds; times in seconds. `group_timeout` 0 is no deadline, `filter_range` None is no filter.

    `epoch_rows` 0: all of `total_prompts` are known from the start. Otherwise they are an upper bound: epochs after the first
    choose from so many rows when they begin (`begin_epoch`), and what they leave out shrinks the total.
    """

    batch_size: int
    n_samples: int
    min_group_size: int
    max_lag: int
    max_attempts: int
    lease_timeout: float
    total_prompts: int
    max_steps: int = 0
    group_timeout: float = 0.0
    filter_range: tuple[float, float] | None = None
    epoch_rows: int = 0


def ledger_config(config: RunConfig, total_prompts: int, epoch_rows: int = 0) -> LedgerConfig:
    """The bounds of a run whose prompt files give `total_prompts`."""
    rollout, algo = config.rollout, config.algo
    return LedgerConfig(rollout.batch_size, rollout.n_samples_per_prompt, rollout.min_group_size, config.train.max_lag,
                        config.broker.max_attempts, config.broker.lease_timeout, total_prompts, config.train.max_steps, rollout.group_timeout,
                        tuple(algo.dynamic_filtering_range) if algo.dynamic_filtering_enable else None, epoch_rows)
