"""Tables as TOML gives them, turned into nested dataclasses by the types of their fields.

A key that no field has, or a value of another type, is a ConfigError naming the full key.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable
from types import UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from services.errors import ConfigError

Table = dict[str, object]
T = TypeVar("T")


def override(table: Table, assignment: str) -> None:
    """Set `a.b=c` in a table; a number in the path counts entries of a list: `drafter.0.path=x`."""
    key, equals, text = assignment.partition("=")
    parts = key.strip().split(".")
    require(equals == "=" and all(parts), assignment, "is not of the form section.key=value")
    *path, last = parts
    here: object = table
    for number, part in enumerate(path):
        here = _step_into(here, part, path[number + 1] if number + 1 < len(path) else last)
    require(isinstance(here, dict), key, "names a key inside a value")
    assert isinstance(here, dict), "just required"
    here[last] = _value_of(text.strip())


def _step_into(here: object, part: str, following: str) -> object:
    if isinstance(here, list):
        require(part.isdecimal(), part, "must be a number, it counts the entries of a list")
        require(int(part) <= len(here), part, f"is beyond the list's {len(here)} entries")
        if int(part) == len(here):
            here.append({})
        return here[int(part)]
    require(isinstance(here, dict), part, "is inside a value that has no keys")
    assert isinstance(here, dict), "just required"
    return here.setdefault(part, [] if following.isdecimal() else {})


def _value_of(text: str) -> object:
    """A TOML value, or else the text itself, so that strings need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def build(kind: type[T], table: object, prefix: str = "") -> T:
    """A dataclass from its defaults and a table's keys; `prefix` is the table's own key."""
    if not isinstance(table, dict):
        raise ConfigError(f"{prefix} must be a table of keys, is {table!r}")
    hints = get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise ConfigError(f"unknown key {_join(prefix, key)}{_nearest(key, hints)}")
    values = {k: _convert(hints[k], value, _join(prefix, k)) for k, value in table.items()}
    return dataclasses.replace(kind(), **values)  # type: ignore[type-var]


def _convert(hint: object, value: object, key: str) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, key)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{key} must be a list, is {value!r}")
        item = get_args(hint)[0]
        return tuple(_convert(item, each, f"{key}[{i}]") for i, each in enumerate(value))
    if not _fits(hint, value):
        choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
        near = _nearest(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{key} must be {_describe(hint)}, is {value!r}{near}")
    return float(value) if hint is float and isinstance(value, int) else value


def _fits(hint: object, value: object) -> bool:
    if get_origin(hint) in (Union, UnionType, Literal):
        return any(_fits(choice, value) for choice in _choices(hint))
    if isinstance(hint, str):  # a Literal's choice
        return value == hint
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint


def _choices(hint: object) -> tuple[object, ...]:
    """What a union or Literal lists, flattened."""
    parts = get_args(hint)
    return tuple(c for part in parts for c in (_choices(part) or (part,)))


def _describe(hint: object) -> str:
    names: dict[object, str] = {bool: "true or false", int: "an integer", float: "a number"}
    names |= {str: "a text"}
    parts = [part for part in _choices(hint) or (hint,) if part is not type(None)]
    return " or ".join(names.get(part, repr(part)) for part in parts)


def _nearest(word: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def require(holds: bool, key: str, problem: str) -> None:
    """Raise a ConfigError that names the key unless the condition holds."""
    if not holds:
        raise ConfigError(f"{key} {problem}")
