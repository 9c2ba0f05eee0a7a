"""The order of an epoch's prompts: pure functions of the rows' files, the seed and, for the curriculum, recorded pass rates.

Every draw comes from a stream of its own, named by (seed, epoch, purpose), so that no choice moves another one: a row that
is left out of an epoch does not change the places of the others in their file.
"""

from collections.abc import Sequence

import numpy as np

from molt_hpc.config import DataConfig

_KEEP, _FILE = 0, 1


def _stream(seed: int, epoch: int, *purpose: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence([seed, epoch], spawn_key=purpose))


def kept_rows(rates: np.ndarray, config: DataConfig, seed: int, epoch: int) -> np.ndarray:
    """bool [R]: which rows an epoch holds. rates: float32 [R], the last recorded pass rate of each row, NaN for none.

    Rows with a rate >= `easy_threshold` (<= `hard_threshold`) stay with probability `easy_fraction` (`hard_fraction`).
    """
    drawn = _stream(seed, epoch, _KEEP).random(len(rates))
    probability = np.ones(len(rates))
    probability[rates >= config.easy_threshold] = config.easy_fraction
    probability[rates <= config.hard_threshold] = config.hard_fraction
    return drawn < probability


def epoch_order(file_of_row: np.ndarray, weights: Sequence[float], shuffle: bool, seed: int, epoch: int,
                kept: np.ndarray | None = None) -> np.ndarray:
    """int32 [K]: the rows of an epoch in training order, each kept row once.

    file_of_row: int [R], index of the file that a row comes from. weights: none for one pool of all rows; otherwise one a
    file, and at every place the next row comes from file f with probability weights[f] / (weights of the files that still
    have rows). kept: bool [R], None for all rows.
    """
    rows = np.arange(len(file_of_row), dtype=np.int32)
    kept = np.ones(len(rows), bool) if kept is None else kept
    if not len(weights):
        order = np.random.default_rng([seed, epoch]).permutation(rows) if shuffle else rows
        return order[kept[order]]
    parts, times = [], []
    for file, weight in enumerate(weights):
        stream = _stream(seed, epoch, _FILE, file)
        own = rows[file_of_row == file]
        order = stream.permutation(own) if shuffle else own
        order = order[kept[order]]
        # a race of Poisson processes with these rates: whose event is next is a draw by weight among those that still run
        times.append(np.cumsum(stream.exponential(1.0 / weight, len(order))))
        parts.append(order)
    return np.concatenate(parts)[np.argsort(np.concatenate(times), kind="stable")]
