"""Prompts: JSONL rows, each with a fixed place in the order of training.

The order is a function of the file and the seed alone, so that ordinal k names the same prompt in every
attempt of a run. Rows are read once and checked once; a broken line is an error with file and line.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from molt_hpc.config import DataConfig, RunConfig
from molt_hpc.records import Prompt


def read_rows(config: DataConfig) -> list[dict[str, Any]]:
    """All rows of the prompt file as Prompt fields without an ordinal.

    Raises ValueError `file:line: reason` for the first line that is not JSON, lacks the input column or holds
    neither text nor messages.
    """
    path = Path(config.prompt_dataset)
    if not path.is_file():
        raise ValueError(f"data.prompt_dataset: there is no file {path}")
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_row(config, f"{path}:{number}", line))
    if not rows:
        raise ValueError(f"data.prompt_dataset: {path} has no rows")
    return rows


def _row(config: DataConfig, where: str, line: str) -> dict[str, Any]:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(raw, dict) or config.input_key not in raw:
        raise ValueError(f"{where}: expected an object with the column {config.input_key!r} (data.input_key)")
    value = raw[config.input_key]
    row: dict[str, Any] = {"label": raw.get(config.label_key), "source": str(raw.get("source", Path(config.prompt_dataset).stem)),
                           "id": str(raw.get("id", hashlib.sha256(line.encode()).hexdigest()[:16]))}
    if isinstance(value, str):
        return row | {"text": value}
    good = isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    if not good:
        raise ValueError(f"{where}: {config.input_key!r} is neither text nor a list of messages with a role")
    if not config.apply_chat_template:
        raise ValueError(f"{where}: {config.input_key!r} is a list of messages, which needs data.apply_chat_template")
    return row | {"messages": value}


def check_prompts(config: RunConfig) -> int:
    """Read the prompt file and throw it away; returns the number of rows."""
    return len(read_rows(config.data))


class PromptOrder:
    """The prompts of all epochs in training order: `prompt(ordinal)`."""

    def __init__(self, config: RunConfig):
        self._rows = read_rows(config.data)
        self._shuffle, self._seed = config.data.shuffle, config.train.seed
        self.total = len(self._rows) * config.train.num_episodes
        self._epoch, self._order = -1, np.arange(len(self._rows))

    def prompt(self, ordinal: int) -> Prompt:
        epoch, index = divmod(ordinal, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            if self._shuffle:
                self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return Prompt(ordinal=ordinal, **self._rows[self._order[index]])
