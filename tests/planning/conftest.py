from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hex_llm.cli import main
from tools.gpu_common import LLAMA_8B
from tools.tpu_models import LLAMA_70B

LLAMA_405B = {
    **LLAMA_70B,
    "num_hidden_layers": 126,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
CONFIGS = {
    "8b": LLAMA_8B,
    "70b": LLAMA_70B,
    "70b-awq": {**LLAMA_70B, "quantization_config": AWQ},
    "405b": LLAMA_405B,
    "405b-fp8": {**LLAMA_405B, "quantization_config": {"quant_method": "fbgemm_fp8"}},
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    """A folder with nothing but the config.json of this name."""

    def write(name: str) -> str:
        (folder := tmp_path / name).mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
        return str(folder)

    return write


@pytest.fixture
def plan(config: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What `hex-llm plan --json` tells of such a model."""

    def run(name: str, *flags: str) -> Any:
        assert main(["plan", config(name), "--json", *flags]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run
