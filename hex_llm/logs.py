"""The lines of the log, text or JSON; `extra={"fields": {...}}` gives a record fields of its own."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any


def log_from(level: int, kind: str = "text") -> None:
    """Our own messages from `level` on; of others' only warnings: they may write addresses with keys."""
    logging.basicConfig(level=max(level, logging.WARNING))
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.getLogger("hex_llm").setLevel(level)


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join([super().formatMessage(record), *(f"{k}={_shown(v)}" for k, v in _fields(record))])


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_fields(record)),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> list[tuple[str, Any]]:
    return list(getattr(record, "fields", {}).items())


def _shown(value: Any) -> str:
    """Quoted where a reader could not tell where it ends."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
