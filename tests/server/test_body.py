"""What is made of a body's values before anyone knows whether they are wanted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hex_llm.errors import InvalidRequest
from hex_llm.server.common.body import MAX_SCHEMA, json_text


@pytest.mark.parametrize(
    "schema",
    [{"enum": list(range(MAX_SCHEMA))}, {"a": [[]] * MAX_SCHEMA}, {str(i): {} for i in range(MAX_SCHEMA)}],
    ids=["flat", "nested", "keys"],
)
def test_schemas_are_bounded(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="more than 20000 values"):
        json_text(schema)


def test_schemas_are_json() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x", None]}}}
    assert json.loads(json_text(schema)) == schema
    assert json_text('{"type": "null"}') == '{"type": "null"}'
