"""Every error that hex_llm raises on purpose. Each message is one line: what is wrong and what to do.

HexError
├── ConfigError      a flag or environment variable: a wrong value, an unknown name, a bad combination
├── ModelError       the model cannot be served: its files, its config, its architecture
│   └── SourceError  the model is unavailable: the hub, the bucket or the folder refused or broke off
├── InvalidRequest   a request's own data; it fails that request only
│   └── UnknownModel   it names a model that is not served here (--strict_model_name)
├── QueueFull        as many requests are waiting as may wait; later there will be room
├── TimedOut         the request has taken longer than a request may (--request_timeout)
└── EngineStopped    the request was not served: the engine failed, or is shutting down
"""

from typing import Self


def one_line(text: str) -> str:
    """Text from outside, for a message: as it is where it can be printed on one line."""
    return text if text.isprintable() else ascii(text)


class HexError(Exception):
    """Base of the tree; the command line prints its message alone, without a traceback."""


class ConfigError(HexError):
    pass


class ModelError(HexError):
    pass


class SourceError(ModelError):
    pass


class InvalidRequest(HexError):
    """`param` names the field of the request that is at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """The message begins with the field."""
        return cls(f"{param}: {problem}", param)


class UnknownModel(InvalidRequest):
    pass


class QueueFull(HexError):
    pass


class TimedOut(HexError):
    pass


class EngineStopped(HexError):
    pass
