"""What the tools share: the repository's Python, options as everywhere else, a report as lines or as one JSON object."""

import dataclasses
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

try:
    from molt_hpc.options import help_text, load, opt
except ImportError:
    python = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.executable) == python:
        sys.exit(f"{sys.argv[0]}: molt_hpc is not installed: run launchers/quickstart.sh once, or pip install -e .[cpu]")
    os.execv(python, [str(python), *sys.argv])


def options_of(function: Callable[..., Any]) -> type:
    """A configuration class whose options are the function's parameters, all of which have defaults."""
    types = get_type_hints(function)
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    return dataclasses.make_dataclass("Options", [(name, types[name], opt(default, "")) for name, default in defaults.items()])


def read(cls: type, words: list[str], usage: str) -> tuple[Any, bool]:
    """(options of the command line, whether JSON is wanted); ends the program after help or a mistake."""
    if {"-h", "--help"} & set(words):
        print(f"{usage}\noptions [default]:\n{help_text(cls)}")
        sys.exit(0)
    try:
        return load(cls, None, [word for word in words if word != "--json"], check=False), "--json" in words
    except ValueError as error:
        sys.exit(f"{sys.argv[0]}: error: {error}")


def show(report: dict[str, Any], as_json: bool) -> None:
    """One line a row if the report has rows, else one a value."""
    if as_json:
        print(json.dumps(report))
    elif "rows" in report:
        for row in report["rows"]:
            print("  ".join(f"{name} {value:,.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))
    else:
        for name, value in report.items():
            print(f"{name:32} {value:,.4f}" if isinstance(value, float) else f"{name:32} {value}")
