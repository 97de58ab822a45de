# A fresh machine needs Python >= 3.11 and make; everything else lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint audit docs bench soak clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/swiftkv demo

test: install
	$(BIN)/python -m pytest

lint: install audit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive swiftkv_platform jobs serve

audit: install  # known vulnerabilities of what constraints.txt pins; says so where nobody can be asked
	$(BIN)/python .ci/audit.py

docs: install  # the site, in site/
	$(BIN)/python -m mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks.prefill
	$(BIN)/python -m benchmarks.engine --short
	$(BIN)/python -m benchmarks.serving --short
	$(BIN)/python -m benchmarks.kv_cache
	$(BIN)/python -m benchmarks.training_step

SCHEDULES ?= 1000
SOAK_ROUNDS ?= 5
soak: install  # every sharding strategy; random schedules of the engine; the kill and restart tests, over and over
	SWIFTKV_SOAK=1 $(BIN)/python -m pytest tests/numerics/test_sharding.py tests/numerics/test_tensor_parallel.py --timeout 1200
	SWIFTKV_SCHEDULES=$(SCHEDULES) $(BIN)/python -m pytest tests/numerics/test_engine_schedules.py tests/numerics/test_structured_schedules.py
	SWIFTKV_SOAK=1 $(BIN)/python -m pytest --timeout 3600 tests/contract/test_two_planes.py tests/integration/test_kills.py \
	  tests/unit/api/test_followers.py tests/unit/api/test_fuzz.py
	for round in $$(seq $(SOAK_ROUNDS)); do SWIFTKV_SEED=$$round $(BIN)/python -m pytest -m integration tests/integration || exit 1; done

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
