# Two commands do all the set-up: `make search` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
SEARCH ?= --model resnet50 --n-trials 8
# Compiled once, by the first of the many processes that tests start: torch takes twice as long to import without.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: search test lint types pytest test-families test-integrations test-cluster test-slow fuzz benchmarks clean

search: $(VENV)/.installed
	$(BIN)/autoprec search $(SEARCH)

test: lint types pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(JOBS) --dist worksteal

# Models of timm and transformers, whose packages the other tests do without.
test-families: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[timm,hf]"
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/tasks/test_families.py

# The frameworks that people train with, whose packages the other tests do without.
test-integrations: $(VENV)/.installed-dev
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile --editable ".[lightning,accelerate,hf,timm,onnx]" onnxruntime deepspeed tensorboard
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(JOBS) --dist worksteal tests/integrations

# Searches on clusters of this machine alone: Ray's, SLURM's, and submitit's own executor.
test-cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[slurm,ray]"
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" -n $(JOBS) --dist loadgroup tests/engines

# Heavier checks than the suite allows, and every figure that the documentation quotes.
test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

# Hostile inputs for every command, for as long as is given; prints the counts, and what was found.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzzing.py $(FUZZ_SECONDS)

benchmarks: $(VENV)/.installed-dev
	for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
