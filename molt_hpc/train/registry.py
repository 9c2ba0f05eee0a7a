"""Functions by name: the estimators and the losses, and those that a file named by algo.plugin_path adds."""

from collections.abc import Callable
from typing import Any


class Registry(dict[str, Callable[..., Any]]):
    """name -> function; `option` is the configuration's word that chooses one."""

    def __init__(self, option: str):
        self.option = option

    def register(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the decorated function. Raises ValueError for a name that is taken."""
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            if self.setdefault(name, function) is not function:
                raise ValueError(f"{self.option}: {name!r} is registered already")
            return function
        return add

    def __missing__(self, name: str) -> None:
        raise ValueError(f"{self.option}: expected one of {sorted(self)}, got {name!r}")
