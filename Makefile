# make demo and make test need only Python (3.11 or newer) and make; they install the rest.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PEERS ?= .venv-peers
LOWEST ?= .venv-lowest
CUDA_BUILD ?= .venv-cuda
GPU_PYTHON ?= 3.12
WORKER_PACKAGES = pydantic pydantic-core annotated-types typing-inspection
PYTEST_ARGS ?=
# A test often waits for a process: with three workers two cores stay busy.
# The tests of a file share sweeps, which each worker would make again.
PYTEST_WORKERS ?= -n 3 --dist loadfile --no-loadscope-reorder
TEXT ?= ../shared/data/tinystories
PINNED = pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-cuda-build test-lowest test-peers install lint format types contracts check faults audit bench bench-memory bench-gpu gpu-pack docs scripts publish clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

demo: $(BIN)/.installed  ## a small sweep from plan to report, in a few minutes
	$(BIN)/sweep run quick --out results/demo --yes
	@echo
	@echo "The report: $(CURDIR)/results/demo/report.md"
	@if [ -f results/demo/report.html ]; then echo "In a browser: $(CURDIR)/results/demo/report.html"; fi

test: install  ## the tests that every machine can run
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-all: install  ## every test except peers, including those that need ray, submitit, PostgreSQL, chromium or a GPU
	$(BIN)/python -m pip install --quiet -c constraints.txt ray submitit
	$(BIN)/python -m pytest -m "not peers" $(PYTEST_ARGS)

test-cuda-build: install  ## forked attempts with the CUDA build of torch, on a machine without a GPU (5.5 GB)
	$(PYTHON) -m venv $(CUDA_BUILD)
	$(CUDA_BUILD)/bin/python -m pip install --quiet -c constraints.txt \
	    "torch===$$(sed -n 's/^torch==//p' constraints.txt)" numpy pydantic tokenizers safetensors
	CUDA_PYTHON=$(CURDIR)/$(CUDA_BUILD)/bin/python $(BIN)/python -m pytest -m slow -k cuda_build tests/training/test_gpu.py

test-lowest: $(PINNED)  ## make test with the lowest supported version of every package, in a separate environment
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct -e ".[test]"
	$(LOWEST)/bin/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

install: $(BIN)/.installed-test  ## .venv with sweep and its test tools, at the tested versions

lint: install  ## ruff, without changing anything
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## ruff, changing files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## mypy, strict
	$(BIN)/mypy

contracts: install  ## architecture and packaging tests, and figures of the code
	$(BIN)/python -m pytest tests/contracts
	$(BIN)/python -m tests.contracts.figures
	$(BIN)/python -m tests.contracts.density
	$(BIN)/python -m tests.contracts.density --densest

check: lint types contracts  ## lint, types and contracts

faults: install  ## every fault of docs/reliability.md, with counts; takes hours, and mounts disks as root
	$(BIN)/python -m pip install --quiet -c constraints.txt ray submitit
	$(BIN)/python -m pytest tests/faults -m "not peers" $(PYTEST_ARGS)

audit: install  ## known vulnerabilities of the pinned packages, and licences of all that is installed
	$(BIN)/python -m pip install --quiet pip-audit pip-licenses
	$(BIN)/pip-licenses --format=markdown --order=license
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

test-peers: $(PEERS)/.installed  ## tests against other libraries, in a separate environment
	PYTHONPATH=. $(PEERS)/bin/python -m pytest -m peers -p no:cacheprovider $(PYTEST_ARGS)

bench: install $(PEERS)/.installed  ## benchmarks of this machine, into results/benchmarks: an hour or two on two cores
	$(BIN)/python tests/benchmarks/run.py
	PYTHONPATH=. $(PEERS)/bin/python tests/benchmarks/throughput.py

# The other trainers, in addition to the packages of .venv.
$(PEERS)/.installed: $(BIN)/.installed-test tests/benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > $$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth
	$(PEERS)/bin/python -m pip install -r tests/benchmarks/peers.txt
	touch $@

bench-memory: install  ## the memory forecast against measurement, on this machine's device
	$(BIN)/python tests/benchmarks/memory.py

bench-gpu: gpu-pack  ## on a GPU, in 8 minutes: a trial, the tests marked gpu, throughput, profiles, memory, steady rates
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/benchmarks/gpu.sh results/benchmarks/gpu

gpu-pack: install  ## .gpu/: files for tests/benchmarks/gpu.sh on a machine without a network, at most 64 MiB
	rm -rf .gpu && mkdir -p .gpu
	SWEEP_CACHE=$(CURDIR)/.gpu/cache PYTHONPATH=. $(BIN)/python tests/benchmarks/pack.py $(TEXT) .gpu/data.json
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	    --dest .gpu/wheels --constraint constraints.txt $(WORKER_PACKAGES)
	git describe --always --abbrev=40 --dirty --exclude '*' > .gpu/commit
	@du -sm .gpu | awk '{print ".gpu has " $$1 " MiB"; exit $$1 > 64}'

docs: install  ## the generated pages of docs/, and their site in build/docs, which opens from disk
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "The site: $(CURDIR)/build/docs/index.html"

scripts:  ## the bundle that draws the charts of report.html, from npm
	cd sweep/report/scripts && npm ci --silent && npm run --silent bundle

publish:  ## SWEEP=results/x NAME=y: copy a finished sweep to results/published/y
	@if [ -z "$(SWEEP)" ] || [ -z "$(NAME)" ]; then \
	  echo "publish needs a sweep folder and a name: make publish SWEEP=results/x NAME=y" >&2; exit 2; fi
	@case "$(NAME)" in */*|.*) echo "NAME must be a plain name, got $(NAME)." >&2; exit 2;; esac
	@$(BIN)/python -m sweep.report.publish "$(SWEEP)" "results/published/$(NAME)"
	@# 256 colours: a third of the size
	@$(BIN)/python -c "import sys; from PIL import Image; [Image.open(p).convert('RGB').quantize(256).save(p, optimize=True) for p in sys.argv[1:]]" results/published/$(NAME)/figures/*.png
	@du -sh "results/published/$(NAME)"

clean:  ## caches and builds; .venv and results stay
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# ---- installation -----------------------------------------------------------------------------

$(BIN)/.installed: $(PINNED) | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt -e .
	@touch $@

$(BIN)/.installed-test: $(PINNED) | $(BIN)/pip
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	@touch $(BIN)/.installed $@

$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "Python must be on the PATH, $(PYTHON) is not. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3 …" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python must be 3.11 or newer, got $$($(PYTHON) --version 2>&1). Install one, or name one: make PYTHON=python3.12 …" >&2; \
	  exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: its modules venv and ensurepip are missing. Install them (Debian, Ubuntu: apt install python3-venv), or name another Python: make PYTHON=/path/to/python3 …" >&2; \
	  exit 2; }
	$(PYTHON) -m venv $(VENV)
