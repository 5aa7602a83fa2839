"""Fields of a config that are also flags: all that is known of each is said where the field is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from hex_llm.errors import ConfigError, one_line

MAX_INT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Flag:
    """All that is known of one field. A default of None means that the field may be left unset."""

    name: str = ""  # `name` and `kind` are filled in from the field
    kind: type = str
    default: Any
    unset: str = "none"  # what a default of None stands for, in words
    group: str
    help: str
    choices: tuple[Any, ...] = ()
    low: int = 1  # the range of a number; a float must lie above `low`
    high: int = MAX_INT
    pattern: str = r".*\S.*"  # of a text; `form` says it in words
    form: str = ""
    aliases: tuple[str, ...] = ()  # other programs' names for the same thing
    deprecated: tuple[str, ...] = ()  # first-generation names
    # Names that are written as booleans, with this flag's values for true and false.
    switches: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    env: tuple[str, ...] = ()  # the first one that is set counts
    secret: bool = False  # never printed
    many: bool = False  # name=value pairs, each of which may be an argument of its own

    def allowed(self) -> str:
        """The allowed values in words that follow "must be"."""
        if self.form or self.choices:
            return self.form or f"one of {', '.join(map(str, self.choices))}"
        return {
            bool: "true or false",
            int: f"a whole number from {self.low} to {'2^31-1' if self.high == MAX_INT else self.high}",
            float: f"a number above {self.low} and at most {self.high}",
            str: "a non-empty string",
        }[self.kind]

    def allows(self, value: Any) -> bool:
        if value is None:
            return self.default is None
        # bool is a subclass of int, so only the exact type tells True from 1.
        if type(value) not in ((int, float) if self.kind is float else (self.kind,)):
            return False
        if self.choices:
            return value in self.choices
        if self.kind is str:
            return re.fullmatch(self.pattern, value, re.DOTALL) is not None
        if self.kind is float:
            return bool(self.low < value <= self.high)
        return self.kind is bool or bool(self.low <= value <= self.high)

    def shown(self, value: Any) -> str:
        """`value` for a message: on one line, not too long, and never a secret."""
        text = one_line("***" if self.secret and value else str(value))
        return text if len(text) <= 80 else f"{text[:80]}..."

    def check(self, value: Any, label: str = "") -> None:
        """Raises ConfigError for a value that is not allowed; `label` is where it was given."""
        label = label or f"--{self.name}"
        if not self.allows(value):
            raise ConfigError(f"{label}={self.shown(value)}: must be {self.allowed()}")


def flag(group: str, default: Any, help: str, **properties: Any) -> Any:
    """A dataclass field that is also a flag; `properties` are further fields of Flag."""
    described = Flag(group=group, default=default, help=help, **properties)
    return field(default=default, repr=not described.secret, metadata={"flag": described})


def flags_of(config: type) -> tuple[Flag, ...]:
    hints = get_type_hints(config)
    # The hint of an optional field is `kind | None`.
    kinds = {name: next(iter(get_args(hint)), hint) for name, hint in hints.items()}
    return tuple(replace(f.metadata["flag"], name=f.name, kind=kinds[f.name]) for f in fields(config))
