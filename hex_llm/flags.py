"""The command line made from the configs' fields: parsing, help, and the README's table.

A flag is looked up by any of its spellings; `-` and `_` are the same. The command line counts before the
environment, and that before the default. `python -m hex_llm.flags` prints the table.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError, one_line
from hex_llm.flag_fields import Flag, flags_of

log = logging.getLogger(__name__)

FLAGS = (*flags_of(ServerConfig), *flags_of(EngineConfig))
BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
HELP_WIDTH = 100


@dataclass(frozen=True)
class Spelling:
    """One name of a flag. One written as a boolean has a `switch`: the flag's values for true and false."""

    flag: Flag
    switch: tuple[Any, Any] | None
    deprecated: bool

    @property
    def kind(self) -> type:
        return bool if self.switch else self.flag.kind

    def value(self, given: Any, label: str) -> Any:
        """The flag's value for what was given under this name, checked."""
        if self.switch and not isinstance(given, bool):
            raise ConfigError(f"{label}={self.flag.shown(given)}: must be true or false")
        value = self.switch[not given] if self.switch else given
        self.flag.check(value, label)
        if self.deprecated:
            log.warning("%s is deprecated; use --%s", label, self.flag.name)
        return value


@cache
def spellings() -> dict[str, Spelling]:
    """Every name, with `_`, of every flag."""
    table = {}
    for flag in FLAGS:
        plain = (True, False) if flag.kind is bool else None
        for name in (flag.name, *flag.aliases, *flag.deprecated, *flag.switches):
            table[name] = Spelling(flag, flag.switches.get(name, plain), name in flag.deprecated)
    return table


class Given:
    """The values given so far, by field, each with where it came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.labels: dict[str, str] = {}

    def take(self, spelling: Spelling, given: Any, label: str) -> None:
        """Raises ConfigError if the value is wrong. Of a flag the last one counts, as argparse has it, so
        that who wraps a command can change it; two models, one of which is no flag, contradict each other."""
        flag, value = spelling.flag, spelling.value(given, label)
        earlier, earlier_label = self.values.get(flag.name, value), self.labels.get(flag.name, label)
        if earlier != value and "MODEL" in (label, earlier_label):
            pair = f"{earlier_label}={flag.shown(earlier)} and {label}={flag.shown(value)}"
            raise ConfigError(f"{pair} contradict each other: give one of them")
        self.values[flag.name], self.labels[flag.name] = value, label

    def take_environ(self, environ: Mapping[str, str], flags: Iterable[Flag]) -> None:
        """Fills in the flags that are not given yet. A variable that is set to nothing counts as unset."""
        for flag in flags:
            variable = next((name for name in flag.env if environ.get(name)), None)
            if variable and flag.name not in self.values:
                spelling = spellings()[flag.name]
                self.take(spelling, convert(environ[variable], spelling), variable)


def convert(text: str, spelling: Spelling) -> Any:
    """`text` as the kind of value that the spelling takes; unchanged if it is none, to be refused later."""
    if spelling.kind is bool:
        return BOOLEANS.get(text.lower(), text)
    if spelling.kind is int:
        return int(text) if re.fullmatch("[0-9]{1,18}", text) else text
    if spelling.kind is float:
        with suppress(ValueError):
            return float(text)
    return {str(choice).lower(): choice for choice in spelling.flag.choices}.get(text.lower(), text)


def unknown(written: str, names: Iterable[str]) -> ConfigError:
    near = get_close_matches(written.lstrip("-").replace("-", "_"), list(names), n=1)
    hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
    return ConfigError(f"{one_line(written)}: unknown flag; {hint}")


def find(written: str) -> tuple[Spelling, bool]:
    """The flag that e.g. "--no-warmup" names, and whether by its --no- form."""
    table = spellings()
    negatable = {f"no_{name}": spelling for name, spelling in table.items() if spelling.switch}
    name = written[2:].replace("-", "_")
    if written.startswith("--") and name in table:
        return table[name], False
    if written.startswith("--") and name in negatable:
        return negatable[name], True
    raise unknown(written, (*table, *negatable))


def read_flag(token: str, rest: deque[str], given: Given) -> None:
    """Takes the flag in `token`, and its value from the front of `rest` where it is not in the token."""
    label, equals, text = token.partition("=")
    spelling, negated = find(label)
    if negated and equals:
        raise ConfigError(f"{label}: takes no value")
    if equals:
        value = convert(text, spelling)
    elif spelling.switch:
        # Nothing else may follow a boolean, lest a MODEL behind it be taken for its value.
        follows = not negated and rest and rest[0].lower() in BOOLEANS
        value = convert(rest.popleft(), spelling) if follows else not negated
    elif not rest or rest[0].startswith("--"):
        raise ConfigError(f"{label}: needs a value, {spelling.flag.allowed()}")
    else:
        value = convert(rest.popleft(), spelling)
    while spelling.flag.many and rest and "=" in rest[0] and not rest[0].startswith("-"):
        value += f",{rest.popleft()}"
    given.take(spelling, value, label)


def read_flags(argv: Sequence[str]) -> Given:
    """What a command line gives; ConfigError says what is wrong in it."""
    given, rest = Given(), deque(argv)
    while rest:
        token = rest.popleft()
        if token.startswith("-"):
            read_flag(token, rest, given)
        else:
            given.take(spellings()["model"], token, "MODEL")
    return given


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[EngineConfig, ServerConfig]:
    """The configs that a command line and an environment ask for; ConfigError says what is wrong in them."""
    given = read_flags(argv)
    given.take_environ(environ, FLAGS)
    if chips := chips_of(environ.get("AIP_MACHINE_TYPE", "")):
        hosts, replicas = (given.values.get(name, 1) for name in ("num_hosts", "data_parallel_size"))
        given.values.setdefault("tensor_parallel_size", max(chips * hosts // replicas, 1))
    engine, server = (
        {flag.name: given.values[flag.name] for flag in flags_of(config) if flag.name in given.values}
        for config in (EngineConfig, ServerConfig)
    )
    return EngineConfig(**engine), ServerConfig(**server)


def chips_of(machine_type: str) -> int | None:
    """How many devices a machine of Google's has, by its name: ct5lp-hightpu-4t, a3-highgpu-8g; None: it does
    not say."""
    if match := re.fullmatch(r"g2-standard-(24|48|96)", machine_type):
        return int(match[1]) // 12
    found = re.search(r"-([1-9]\d?)[tg]$", machine_type)
    return int(found[1]) * (2 if machine_type.startswith("tpu7x") else 1) if found else None


def engine_config_from_kwargs(**kwargs: Any) -> EngineConfig:
    """The config of `LLM(**kwargs)`: the flags under any of their names, with values of the right type.

    Of the environment only what belongs to the user and the machine counts, nothing of a server's deployment.
    """
    table = spellings()
    names = {f.name for f in flags_of(EngineConfig)}
    ours = {name: spelling for name, spelling in table.items() if spelling.flag.name in names}
    given = Given()
    for name, value in kwargs.items():
        if name in table and name not in ours:
            raise ConfigError(f"--{name}: only the server takes it")
        if name not in ours:
            raise unknown(f"--{name}", ours)
        given.take(ours[name], value, f"--{name}")
    given.take_environ(os.environ, [table["hf_token"].flag, table["download_dir"].flag])
    return EngineConfig(**given.values)


def default_text(flag: Flag) -> str:
    if flag.default is None:
        return flag.unset
    return str(flag.default).lower() if flag.kind is bool else str(flag.default)


def other_names(flag: Flag) -> list[str]:
    """The flag's further names, as a reader sees them."""
    marks = {
        **dict.fromkeys(flag.switches, " (the opposite)"),
        **dict.fromkeys(flag.deprecated, " (deprecated)"),
    }
    return [f"--{name}{marks.get(name, '')}" for name in (*flag.aliases, *marks)]


def help_entry(flag: Flag) -> str:
    head = f"--{flag.name}, --no-{flag.name}" if flag.kind is bool else f"--{flag.name}=VALUE"
    parts = [
        flag.help,
        f"Must be {flag.allowed()}." if flag.kind is not bool else "",
        f"Default: {default_text(flag)}.",
        f"Environment: {', '.join(flag.env)}." if flag.env else "",
        f"Also: {', '.join(other_names(flag))}." if other_names(flag) else "",
    ]
    indent = " " * 6
    body = textwrap.fill(
        " ".join(filter(None, parts)),
        HELP_WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return f"  {head}\n{body}"


def groups() -> dict[str, list[Flag]]:
    return {name: [f for f in FLAGS if f.group == name] for name in dict.fromkeys(f.group for f in FLAGS)}


def help_text() -> str:
    usage = (
        "usage: hex-llm serve [MODEL] [flags]\n\n"
        "Flags are --flag=value or --flag value; - and _ are the same. Booleans are --flag, --no-flag or\n"
        "--flag=true|false. Of a flag that is given twice the last counts. A flag counts before its\n"
        "environment variables, the first that is set before the others."
    )
    return "\n\n".join(
        [usage, *(f"{name}:\n" + "\n".join(map(help_entry, flags)) for name, flags in groups().items())]
    )


def markdown_row(flag: Flag) -> str:
    """One row; the names are shown as code, their remarks not."""
    names = (re.sub(r"^\S+", r"`\g<0>`", name) for name in (*other_names(flag), *flag.env))
    return f"| `--{flag.name}` | {default_text(flag)} | {flag.allowed()} | {', '.join(names)} | {flag.help} |"


def markdown_table() -> str:
    """The README's table of all flags, by group."""
    head = "| flag | default | must be | also, environment | |\n|---|---|---|---|---|\n"
    return "\n\n".join(
        f"**{name}**\n\n{head}" + "\n".join(map(markdown_row, flags)) for name, flags in groups().items()
    )


if __name__ == "__main__":
    print(markdown_table())
