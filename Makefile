# Every target does its own set-up: a virtual environment in .venv with the pinned versions of constraints.txt.
# Needed: git, make, Python 3.11+ with venv. No compiler: where there is one, hook/*.c are compiled.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PHOTOGRAPHED := $(VENV)/.photographed
DURATION ?= 600
WORKERS ?= $(shell echo $$(($$(nproc) * 2)))
TORCH  := $(shell grep '^torch==' constraints.txt)
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# The repository root must not be on sys.path: its folders are sub-packages of everstep, not modules.
unexport PYTHONPATH
# The tests start some thousand interpreters: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
.DELETE_ON_ERROR:
.PHONY: chart-engine help demo test check fmt proto types wheel-smoke soak fuzz bench-storage bench-stall bench-data clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(STAMP)  ## train, kill and restart: ends with the verdict (under 5 minutes)
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

# Two processes for each core, since many tests wait for processes of their own. A file's tests stay in one of them,
# and the longest files come first (tests/conftest.py). What is about the speed of steps runs after them, alone.
ALONE := tests/system/test_pace.py tests/system/test_pace_changes.py
test: $(STAMP)  ## run the tests; skipped ones are listed with the reason (PYTEST_ARGS: these only, in one process)
ifdef PYTEST_ARGS
	$(BIN)/pytest $(PYTEST_ARGS)
else
	@$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(addprefix --ignore ,$(ALONE)); others=$$?; \
	  $(BIN)/pytest $(ALONE); alone=$$?; exit $$((others | alone))
endif

check: $(STAMP) types  ## lint, format, types, spelling, layers and rules, pages that list code, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/codespell
	$(BIN)/pytest -q tests/test_layers.py tests/test_repo_rules.py tests/test_documents.py tests/test_log_catalogue.py tests/test_security_page.py
	$(BIN)/python tools/gen_proto.py --check
	$(BIN)/python tools/gen_commands.py --check

fmt: $(STAMP)  ## format and apply safe fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

proto: $(STAMP)  ## generate proto/*_pb2* from proto/*.proto
	$(BIN)/python tools/gen_proto.py

# docs/commands.md and the manual page, from the command line
.PHONY: commands
commands: $(STAMP)  ## write docs/commands.md and docs/everstep.1 from the command line
	$(BIN)/python tools/gen_commands.py

types: $(STAMP)
	@$(BIN)/python tools/link_types.py

wheel-smoke: $(STAMP)  ## build the wheel, install it in an empty environment, use it from an empty folder
	tools/wheel_smoke.sh $(BIN)/python

soak: $(STAMP)  ## search for lost checkpoints for DURATION seconds (SOAK_ARGS: --only, --seed)
	$(BIN)/python tools/soak.py --duration $(DURATION) $(SOAK_ARGS)

fuzz: $(STAMP)  ## fuzz the parser TARGET (tests/fuzz/targets.py) for DURATION seconds, by coverage where atheris is installed
	$(BIN)/python tests/fuzz/fuzz_one.py $(TARGET) $(DURATION)

bench-storage: $(STAMP)  ## ratios to fio and to what others use, one table; the rig of slow drives needs root (BENCH_ARGS)
	$(BIN)/python bench/storage.py $(BENCH_ARGS)

bench-stall: $(STAMP)  ## what a checkpoint costs training, beside one copy of the state and beside others (BENCH_ARGS)
	$(BIN)/python bench/stall.py $(BENCH_ARGS)

bench-data: $(PHOTOGRAPHED)  ## loader, cache and shared preparation beside torch's loader on real JPEGs; its slow drive needs root (BENCH_ARGS)
	$(BIN)/python bench/data.py $(BENCH_ARGS)

clean:  ## remove everything that make made, .venv included
	rm -rf $(VENV) build dist everstep.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What tests/dataloader/test_adapters.py drives, and of what these need only what they import there: 4 MB of wheels.
FRAMEWORKS := accelerate huggingface-hub lightning-utilities psutil pytorch-lightning PyYAML torchdata torchmetrics tqdm

# Go's template engine for WebAssembly, which tests of deploy/helm render the chart with: one npm package, nothing it runs
# at its installation, and its content by its hash (tools/chart-engine).
chart-engine: $(VENV)/chart-engine/node_modules  ## install what renders the Helm chart in tests (needs node and npm)
$(VENV)/chart-engine/node_modules: tools/chart-engine/package-lock.json | $(STAMP)
	@mkdir -p $(VENV)/chart-engine && cp tools/chart-engine/package*.json $(VENV)/chart-engine/
	@npm ci --prefix $(VENV)/chart-engine --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Of these only the photographs in their wheels are read (bench/jpegs.py): nothing that they depend on.
$(PHOTOGRAPHED): $(STAMP)
	$(PIP) --no-deps scikit-image scikit-learn
	@touch $@

# torch first and by its exact spelling: a range would bring several gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt hook/tensor_facts.c hook/copies.c
	@command -v $(PYTHON) >/dev/null || { echo "everstep: $(PYTHON) not found; give one by PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "everstep needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Give another by PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "everstep: $(PYTHON) has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV) (once)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) $(TORCH) setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	$(PIP) --no-deps $(FRAMEWORKS)
	@touch $@
