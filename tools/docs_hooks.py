"""For mkdocs: the page of flags is made from the flags themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from hex_llm.flags import markdown_table


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace("<!-- flags -->", markdown_table())
