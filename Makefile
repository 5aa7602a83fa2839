# Everything lives in one virtual environment at the root: .venv
PYTHON ?= python3
BIN := .venv/bin
SERVER := .venv/.server-installed
TESTS := .venv/.tests-installed
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
# By all cores, where pip has one. Some packages have files that are wrong on purpose.
COMPILE = $(BIN)/python -m compileall -qq -j 0 .venv/lib || true
ARGS ?=
# It asks for a huggingface_hub below 1, but runs with ours: so it cannot be named among the others.
TGI_CLIENT := text-generation==0.7.0
# For the tests of the playground, which are skipped where there is none.
INSTALL_CHROMIUM = command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
	>/dev/null 2>&1 || true
# What a laptop needs: the shapes that these allow compile in under a minute.
SERVE_FLAGS ?= --max_decode_seqs=8 --max_model_len=2048
# Tiny models are compiled far longer than they run: most of a fast run would go to optimizing their programs.
COMPILE_FAST := --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 \
	--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false

.PHONY: serve test fast-tests check test-all bench bench-load tpu-compile conformance docs dist format clean

serve: $(SERVER)  ## fetch the embedded default model and serve it; ARGS="--port=8000 …" adds flags
	$(BIN)/hex-llm serve $(SERVE_FLAGS) $(ARGS)

test: $(TESTS)  ## the checks and, beside them, every fast test, compiled without optimizations
	$(MAKE) --jobs=2 check fast-tests

fast-tests: export XLA_FLAGS = $(COMPILE_FAST)
fast-tests: $(TESTS)  # what fails beside others is run once more by itself: a busy machine's clock is nobody's fault
	$(BIN)/python -m pytest -n 3 --dist worksteal --timeout=400 -m "not slow and not accelerator" $(ARGS) || \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures=none --timeout=400

check: $(TESTS)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-all: check  ## also the slow tests, all with programs as users get them, and, where there is one, those for the accelerator
	$(BIN)/python -m pytest $(ARGS)

bench: bench-load  ## how fast we are beside Hugging Face transformers, in one run on this machine
	$(BIN)/python tools/bench_offline.py $(ARGS)

bench-load: $(TESTS)  ## peak host memory of loading a sharded 2 GB checkpoint on 1 and on 4 devices
	$(BIN)/python tools/load_memory.py

tpu-compile: $(SERVER)  ## compile large models for TPU slices, without TPUs; without libtpu they are only lowered
	$(BIN)/python -m tools.tpu_compile $(ARGS)

conformance: $(TESTS)  ## vLLM's and llama.cpp's own tests against this server; hours. ARGS="chat_completion" runs those files alone
	$(BIN)/python -m tools.conformance $(ARGS)

docs: $(SERVER)  ## the documentation as a site, in build/site
	$(PIP_INSTALL) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(SERVER)  ## the wheel, in dist/, tried in an empty environment: it must serve and answer
	$(BIN)/python -m tools.dist

format: $(TESTS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(SERVER): pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@$(COMPILE)
	touch $@

$(TESTS): pyproject.toml | $(BIN)/python
	$(PIP_INSTALL) --editable ".[test]"
	$(PIP_INSTALL) --no-deps $(TGI_CLIENT)
	@$(COMPILE)
	@$(INSTALL_CHROMIUM)
	touch $@ $(SERVER)
