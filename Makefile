# Short names for commands of venv, pip and the project; README.md shows the commands.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

# Seconds of a chaos campaign and its seed; without a seed a random one is taken and printed.
SECONDS ?= 600
SEED ?=
# Requests after which a soak ends; it ends after an hour at the latest.
REQUESTS ?= 1000000

# Processes that run tests; one of them runs all tests of a file.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: demo test test-all llm chaos soak fuzz check docs bench peers clean

# A stamp per set of extras: pip runs again only when setup.cfg changes.
$(VENV)/.installed-%: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/resnet152/demo.py $(if $(ONCE),--once)

# The quick tests: unit tests, and one server for each surface.
test: $(VENV)/.installed-dev
	$(PYTEST) -m quick

test-all: $(VENV)/.installed-dev
	$(PYTEST)

# Real engines of language models, in an environment of 2 GB in ~/.cache.
llm: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m llm tests/llm

# Breaks a server under load and reports each violation of the rules in tests/chaos.
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -s -o faulthandler_timeout=0 -m chaos --chaos-seconds $(SECONDS) --chaos-seed $(or $(SEED),0) tests/chaos

# Ordinary traffic, and a table of the resources that grow.
soak: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -m chaos.soak --requests $(REQUESTS)

# Changes inputs of each parser for a minute; ENGINE=atheris is guided by coverage: tests/fuzz.
fuzz: SECONDS = 60
fuzz: $(VENV)/.installed-dev $(if $(filter atheris,$(ENGINE)),$(VENV)/.installed-fuzz)
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) $(if $(ENGINE),--engine $(ENGINE)) $(if $(SEED),--seed $(SEED)) $(TARGETS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/mypy docs/conf.py docs/extensions && PYTHONPATH=.imports $(BIN)/lint-imports

# The documentation as a site, in build/docs; a link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/peers

# What `make bench` compares with: an environment for each server, some gigabytes in ~/.cache.
peers: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/peers --install

clean:
	rm -rf $(VENV) logs build *.egg-info
