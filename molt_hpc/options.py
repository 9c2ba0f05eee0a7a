"""Reading and writing a tree of dataclasses: TOML file, dotted overrides, help text.

A file or a command line can only set what the tree has: an unknown key is an error that names the nearest one.
"""

import dataclasses
import difflib
import json
import tomllib
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

T = TypeVar("T")


def opt(default: Any, help: str) -> Any:
    """A field with a help text; mutable defaults are copied for each instance."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def section(cls: type) -> Any:
    return field(default_factory=cls)


def comma_list(value: Any) -> Any:
    """Text with commas as a list; a list with such text flattened; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in (comma_list(item) if isinstance(item, str) else [item])]
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


CommaTexts = Annotated[list[str], pydantic.BeforeValidator(comma_list)]
CommaNumbers = Annotated[list[float], pydantic.BeforeValidator(comma_list)]


def options(cls: type, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """Every option of a configuration class: dotted name -> (type, default, help)."""
    found: dict[str, tuple[Any, Any, str]] = {}
    instance = cls()
    for item in dataclasses.fields(cls):
        value = getattr(instance, item.name)
        if dataclasses.is_dataclass(value):
            found |= options(type(value), f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = (item.type, value, item.metadata["help"])
    return found


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _reject_unknown(keys: list[str], known: dict[str, Any], source: str) -> None:
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else "; --help lists all options"
            raise ValueError(f"{source}: unknown option {key}{hint}")


def _parse_overrides(words: list[str], known: dict[str, tuple[Any, Any, str]]) -> dict[str, Any]:
    """`--section.option value...` (or `=value`) -> {dotted name: text or list of texts}."""
    given: list[tuple[str, bool, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given.append((name.replace("-", "_"), bool(equals), [value] if equals else []))
        elif given and not given[-1][1]:
            given[-1][2].append(word)
        else:
            raise ValueError(f"command line: expected --section.option, got {word!r}")
    flat: dict[str, Any] = {}
    for name, equals, values in given:
        _reject_unknown([name], known, "command line")
        shaped = _shape(name, values, known[name][1], str(known[name][0]))
        # a list grows by repetition, so that `--vllm.extra_args=--flag` can be said more than once
        flat[name] = flat[name] + shaped if equals and name in flat and isinstance(shaped, list) else shaped
    return flat


def _shape(name: str, values: list[str], default: Any, type_text: str) -> Any:
    if isinstance(default, (tuple, list)):
        return values
    if not values and isinstance(default, bool):
        return True
    if len(values) != 1:
        raise ValueError(f"command line: --{name} takes one value, got {len(values)}: {' '.join(values) or '(none)'}")
    return None if "None" in type_text and values[0].lower() == "none" else values[0]


def _unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def load(cls: type[T], path: str | Path | None, overrides: list[str] = (), check: bool = True) -> T:
    """Build a configuration from a TOML file (or none) and command-line words.

    Raises ValueError with one line: the source, the key, what was expected and what came.
    """
    known = options(cls)
    flat: dict[str, Any] = {}
    if path is not None:
        try:
            flat = _flatten(tomllib.loads(Path(path).read_text()))
        except FileNotFoundError:
            raise ValueError(f"{path}: no such configuration file") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        _reject_unknown(list(flat), known, str(path))
    flat |= _parse_overrides(list(overrides), known)
    try:
        config = pydantic.TypeAdapter(cls).validate_python(_unflatten(flat))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{key}: {first['msg'].lower()}, got {first['input']!r}") from None
    if check:
        config.check()
    return config


def dump(config: Any) -> str:
    """The whole tree as TOML text; unset options are left out as comments."""
    lines: list[str] = []

    def emit(node: Any, prefix: str) -> None:
        values = [(f, getattr(node, f.name)) for f in dataclasses.fields(node)]
        plain = [(f.name, v) for f, v in values if not dataclasses.is_dataclass(v)]
        if prefix and plain:
            lines.append(f"\n[{prefix}]")
        lines.extend(f"# {name} is unset" if v is None else f"{name} = {_toml(v)}" for name, v in plain)
        for f, v in values:
            if dataclasses.is_dataclass(v):
                emit(v, f"{prefix}.{f.name}" if prefix else f.name)

    emit(config, "")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def help_text(cls: type) -> str:
    """One line an option: name, default, meaning."""
    rows = options(cls)
    width = max(len(name) for name in rows)
    return "\n".join(f"  --{name:<{width}}  {text} [{default!r}]" for name, (_, default, text) in rows.items())
