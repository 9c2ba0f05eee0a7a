"""Blocking work on side threads. Nothing in Python can interrupt a collective, so whoever gives one up leaves its thread behind."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

LOOK = 0.1
"""Seconds between two looks at whether what is awaited is to be left behind."""


def ahead(items: Iterator[Any], look: Callable[[], None] | None = None, every: float = LOOK) -> Iterator[Any]:
    """Run an iterator on a daemon thread, as far ahead as it goes by itself; what it raises is raised here.

    look() is called every so many seconds while an item is awaited. What it raises ends the wait; the thread is then left behind with
    everything that it holds, until its call ends by itself.
    """
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            for item in items:
                ready.put(("item", item))
            ready.put(("end", None))
        except Exception as error:  # whatever it is, the caller's thread raises it
            ready.put(("error", error))

    threading.Thread(target=run, daemon=True, name="weights").start()
    while True:
        try:
            kind, value = ready.get(timeout=every if look else None)
        except queue.Empty:
            look()
            continue
        if kind == "error":
            raise value
        if kind == "end":
            return
        yield value


def aside(work: Callable[[], Any], look: Callable[[], None], every: float = LOOK) -> Any:
    """What `work()` returns, run as in `ahead`."""
    return next(ahead((work() for _ in range(1)), look, every))
