"""How embeddings are made: as --pooler_config says, or sentence-transformers' files in the model's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import Pooling
from hex_llm.weights.model_files import read_json

# Also the names of older files, which have a switch for each.
KINDS = {"last": "last", "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls"}
KINDS["cls_token"] = "cls"
FORM = (
    '--pooler_config: must be a JSON object of "pooling_type" (LAST, MEAN or CLS), "normalize" (true or '
    'false) or "classifier_from_token" (the words for no and yes, of one token each)'
)


def pooling_of(config: EngineConfig, path: Path, tokenizer: Tokenizer | None) -> Pooling:
    """Without a word from anywhere, the last token's hidden state, normalised."""
    if config.runner == "generate":
        return Pooling(problem="this server makes no embeddings (--runner=generate)")
    try:
        given = {**json.loads(config.pooler_config or "{}")}
        words, kind = given.pop("classifier_from_token", ()), given.pop("pooling_type", None)
        kind = kind and KINDS[kind.lower()]
        ids = [tokenizer.encode(word, add_special_tokens=False) for word in words] if tokenizer else []
        if given.keys() - {"normalize"} or not isinstance(given.get("normalize", True), bool):
            raise ValueError(given)
        if words:
            ([no], [yes]) = ids
            return Pooling("tokens", token_ids=(no, yes))
    except (ValueError, TypeError, AttributeError, KeyError):
        raise ConfigError(FORM) from None
    told = replace(_of_files(path), **given)
    return replace(told, kind=kind, problem="") if kind else told


def _of_files(folder: Path) -> Pooling:
    if not (folder / "modules.json").is_file():
        return Pooling()
    modules = [one for one in read_json(folder / "modules.json", list) if isinstance(one, dict)]
    # Of a path only the name: it could lead anywhere.
    paths = {str(m.get("type")).rpartition(".")[2]: folder / Path(str(m.get("path"))).name for m in modules}
    if unknown := ", ".join(sorted(paths.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"})):
        return Pooling(problem=f"this model's embeddings need {unknown}, which is not built: --pooler_config")
    config = paths.get("LogitScore", paths.get("Pooling", folder / "none")) / "config.json"
    if not config.is_file():
        return Pooling(
            problem="the model's modules.json names a config.json that is missing: --pooler_config"
        )
    values: dict[str, Any] = read_json(config)
    if "LogitScore" in paths:
        no, yes = values.get("false_token_id"), values.get("true_token_id")
        if not (isinstance(no, int) and isinstance(yes, int)):
            return Pooling(problem="the model's files name no tokens for both yes and no: --pooler_config")
        return Pooling("tokens", token_ids=(no, yes))
    switches = {name.removeprefix("pooling_mode_") for name, value in values.items() if value is True}
    kinds = (
        [str(values["pooling_mode"])] if "pooling_mode" in values else sorted(switches - {"include_prompt"})
    )
    if len(kinds) != 1 or kinds[0] not in KINDS:
        return Pooling(problem=f"the model pools {' and '.join(kinds)}, which is not built: --pooler_config")
    return Pooling(KINDS[kinds[0]], "Normalize" in paths)
