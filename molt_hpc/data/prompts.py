"""Prompts: JSONL rows, each with a fixed place in the order of training.

The order is a function of the files, the seed and, with data.difficulty_sampling, of recorded pass rates (order.py), so
that ordinal k names the same prompt in every attempt of a run. Rows are read once and checked once; a broken line is an
error with file and line.
"""

import bisect
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from molt_hpc.config import DataConfig, RunConfig
from molt_hpc.data.media import messages_with_images
from molt_hpc.data.order import epoch_order, kept_rows
from molt_hpc.options import comma_list
from molt_hpc.records import Prompt


def read_files(config: DataConfig) -> list[list[dict[str, Any]]]:
    """The rows of each file of data.prompt_dataset, in its order, as Prompt fields without an ordinal.

    Raises ValueError `file:line: reason` for the first line that is not JSON, lacks the input column or holds
    neither text nor messages.
    """
    return [_read_file(config, Path(name)) for name in comma_list(config.prompt_dataset)]


def json_rows(path: Path, option: str, key: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(`file:line`, the text, its object) of every line of a JSONL file that is not blank.

    Raises ValueError if there is no such file, and `file:line: reason` at the first line that is no object with the column `key`.
    """
    if not path.is_file():
        raise ValueError(f"{option}: there is no file {path}")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(raw, dict) or key not in raw:
                raise ValueError(f"{path}:{number}: expected an object with the column {key!r} (data.input_key)")
            yield f"{path}:{number}", line, raw


def _read_file(config: DataConfig, path: Path) -> list[dict[str, Any]]:
    rows = [_row(config, path, *row) for row in json_rows(path, "data.prompt_dataset", config.input_key)]
    if not rows:
        raise ValueError(f"data.prompt_dataset: {path} has no rows")
    return rows


def _row(config: DataConfig, path: Path, where: str, line: str, raw: dict[str, Any]) -> dict[str, Any]:
    value = raw[config.input_key]
    row: dict[str, Any] = {"label": raw.get(config.label_key), "source": str(raw.get("source", path.stem)),
                           "id": str(raw.get("id", hashlib.sha256(line.encode()).hexdigest()[:16])), "options": raw.get("options")}
    try:
        row["tools"] = json.loads(raw["tools"]) if isinstance(raw.get("tools"), str) else raw.get("tools")
    except json.JSONDecodeError:
        raise ValueError(f"{where}: 'tools' is neither a list nor a list as JSON text") from None
    images = raw.get("images") or []
    if isinstance(value, str) and not images:
        return row | {"text": value}
    value = [{"role": "user", "content": value}] if isinstance(value, str) else value
    good = isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if not good:
        raise ValueError(f"{where}: {config.input_key!r} is neither text nor a list of messages with a role")
    if not config.apply_chat_template:
        raise ValueError(f"{where}: {config.input_key!r} is a list of messages or has images, which needs data.apply_chat_template")
    try:
        return row | {"messages": messages_with_images(value, images, path.parent)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class PromptOrder:
    """The prompts of all epochs in training order: `prompt(ordinal)`.

    total: prompts of all epochs; with data.difficulty_sampling an upper bound. epoch_rows: 0 if the order of every epoch
    is known from the start; otherwise the rows that each later epoch chooses from when it begins (`choose`, `begin_epoch`).
    """

    def __init__(self, config: RunConfig):
        self._config, self._seed = config.data, config.train.seed
        parts = read_files(config.data)
        self._rows = [row for part in parts for row in part]
        self._file_of_row = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self.total = len(self._rows) * config.train.num_episodes
        self.epoch_rows = len(self._rows) if config.data.difficulty_sampling else 0
        self._orders: dict[int, np.ndarray] = {}
        known_epochs = 1 if self.epoch_rows else config.train.num_episodes
        self._starts = [len(self._rows) * epoch for epoch in range(known_epochs + 1)]  # the last one is where the next epoch would start

    def has(self, ordinal: int) -> bool:
        """Whether the prompt of this ordinal is known already."""
        return 0 <= ordinal < self._starts[-1]

    def row(self, ordinal: int) -> int:
        """Index of the row (over all files) that an ordinal names."""
        assert self.has(ordinal), f"prompt {ordinal} is not known: {self._starts[-1]} are"
        epoch = bisect.bisect_right(self._starts, ordinal) - 1
        return int(self._order(epoch)[ordinal - self._starts[epoch]])

    def prompt(self, ordinal: int) -> Prompt:
        return Prompt(ordinal=ordinal, **self._rows[self.row(ordinal)])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 1 and not self.epoch_rows:  # the look-ahead reaches into the next epoch: two are in use
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._drawn(epoch)
        return self._orders[epoch]

    def _drawn(self, epoch: int, kept: np.ndarray | None = None) -> np.ndarray:
        return epoch_order(self._file_of_row, comma_list(self._config.prompt_probs), self._config.shuffle, self._seed, epoch, kept)

    # epochs that are chosen when they begin ------------------------------------------------

    def choose(self, rates: bytes, recorded: Iterable[tuple[int, float]]) -> tuple[bytes, bytes]:
        """(rows of the next epoch int32 [K], pass rates float32 [R]) as bytes; a pure function of its arguments.

        rates: the pass rates that the epoch before was chosen by, empty for none; recorded: (ordinal, pass rate) of the
        groups that have closed since, in this order.
        """
        known = np.frombuffer(rates, "<f4").copy() if rates else np.full(len(self._rows), np.nan, "<f4")
        for ordinal, rate in recorded:
            known[self.row(ordinal)] = rate
        epoch = len(self._starts) - 1
        order = self._drawn(epoch, kept_rows(known, self._config, self._seed, epoch))
        return order.astype("<i4").tobytes(), known.tobytes()

    def begin_epoch(self, rows: bytes) -> None:
        """Append an epoch with these rows (int32 [K], may be empty): what `choose` gave, now or in an earlier attempt."""
        order = np.frombuffer(rows, "<i4")
        self._orders[len(self._starts) - 1] = order
        self._starts.append(self._starts[-1] + len(order))
