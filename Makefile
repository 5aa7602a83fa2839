# Everything lives in one virtual environment at the root: .venv
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
ARGS ?=
# What a laptop needs: the shapes that these allow compile in under a minute.
SERVE_FLAGS ?= --max_decode_seqs=8 --max_model_len=2048

.PHONY: install serve test check test-all bench bench-load format clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

serve: $(INSTALLED)  ## fetch the embedded default model and serve it; ARGS="--port=8000 …" adds flags
	$(BIN)/hex-llm serve $(SERVE_FLAGS) $(ARGS)

check: $(INSTALLED)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check  ## the checks and every fast test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not accelerator" $(ARGS)

test-all: check  ## also the slow tests and, where there is one, those for the accelerator
	$(BIN)/python -m pytest $(ARGS)

bench: bench-load  ## how fast we are beside Hugging Face transformers, in one run on this machine
	$(BIN)/python tools/bench_offline.py $(ARGS)

bench-load: $(INSTALLED)  ## peak host memory of loading a sharded 2 GB checkpoint on 1 and on 4 devices
	$(BIN)/python tools/load_memory.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
