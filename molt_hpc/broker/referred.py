"""Which of the producers' files are still needed (see data/references.py). Pure but for deleting those that are not.

A file is deleted when no group that is under way refers to it and its producer will not append to it any more: it
has begun another one, or is gone.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from molt_hpc.data.references import FOLDER, path_of


class Referred:
    """Groups by the files that they refer to, and the file that each producer writes to."""

    def __init__(self, run: Path):
        self._run = run
        self._count: Counter[str] = Counter()
        self._groups: dict[int, list[str]] = {}
        self._written: dict[bytes, str] = {}

    def add(self, group: int, reference: dict[str, Any]) -> None:
        """A rollout of `group` lies in this file."""
        name = str(reference["file"])
        self._groups.setdefault(group, []).append(name)
        self._count[name] += 1

    def seen(self, producer: bytes, reference: dict[str, Any]) -> None:
        """`producer` writes to this file, and so to none before it."""
        before, self._written[producer] = self._written.get(producer), str(reference["file"])
        if before is not None and before != self._written[producer]:
            self._delete_unneeded(before)

    def gone(self, producer: bytes) -> None:
        """`producer` writes no more."""
        if (name := self._written.pop(producer, None)) is not None:
            self._delete_unneeded(name)

    def ended(self, group: int) -> None:
        """A group has ended: its rollouts are not needed any more."""
        for name in self._groups.pop(group, ()):
            self._count[name] -= 1
            self._delete_unneeded(name)

    def delete_others(self) -> None:
        """At the start of an attempt, when nobody writes yet: delete what no group refers to."""
        for path in (self._run / FOLDER).glob("*"):
            if not self._count[path.name]:
                path.unlink(missing_ok=True)

    def _delete_unneeded(self, name: str) -> None:
        if self._count[name] <= 0 and name not in self._written.values():
            del self._count[name]
            path_of(self._run, name).unlink(missing_ok=True)
