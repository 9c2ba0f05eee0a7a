"""What the supervisor says: to the terminal, or as plain lines, and always to its log file."""

import re
import time
from pathlib import Path

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.status import Status

PLAIN = {"highlight": False, "emoji": False, "soft_wrap": True}
"""Text as it is: rich adds colours where this file asks for them, and nothing else."""


class Console:
    """Step lines and messages. On a terminal with colours and one live line of what is awaited; plain elsewhere."""

    def __init__(self, log: Path):
        self._log = open(log, "a", buffering=1)
        self._out, self._err = RichConsole(**PLAIN), RichConsole(stderr=True, **PLAIN)
        self._status: Status | None = None

    def say(self, text: str) -> None:
        self._write(text)
        self._out.print(escape(text))

    def waiting(self, text: str | None) -> None:
        """The live line of a terminal; None removes it. Nothing is written elsewhere."""
        if self._status is not None and text is None:
            self._status.stop()
            self._status = None
        elif self._status is not None:
            self._status.update(escape(text))
        elif text is not None and self._out.is_terminal:
            self._status = self._out.status(escape(text))
            self._status.start()

    def error(self, text: str) -> None:
        """One line on standard error, then whatever follows in `detail`."""
        self.waiting(None)
        self._write(f"error: {text}")
        self._err.print(f"[bold red]molt_hpc: error: {escape(text)}[/]")

    def detail(self, title: str, lines: list[str]) -> None:
        """The end of a role's log under an error."""
        text = "\n".join([title, *(f"  | {line}" for line in lines)])
        self._write(text)
        self._err.print(escape(text))

    def close(self) -> None:
        self.waiting(None)
        self._log.close()

    def _write(self, text: str) -> None:
        self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The last lines of a log file, over-long ones cut; empty if there is no file."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line[:500] for line in text.splitlines()][-count:]


def find_reason(path: Path) -> str:
    """The last line of a log that reads like the message of an error; empty if there is none.

    The launcher of the ranks ends with an error of its own, which only says that a rank had one.
    """
    for line in reversed(last_lines(path, 400)):
        match = re.search(r"(?:molt_hpc: error:|\bERROR\b:?) (.*)|(\b[\w.]*(?:Error|Exception|RunStopped|Refused)\b: .*)", line)
        if match and "ChildFailedError" not in line and "torch/distributed" not in line:
            return (match[1] or match[2]).strip()
    return ""
