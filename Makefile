# make setup | format | check | test | test-slow | test-gpu | bench | bench-gpu | bench-peers | docs | demo | changelog | clean

PYTHON ?= $(shell python3.11 -c "" 2>/dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
# Where pip looks for torch besides its own index, for example https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
WORKERS ?= 2
# More arguments for pytest: make test TESTFLAGS="tests/test_positions.py -k padding"
TESTFLAGS ?=
RECIPE ?= recipes/quickstart.toml

PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
OFFLINE = HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
PYTEST = OMP_NUM_THREADS=1 $(OFFLINE) $(BIN)/python -m pytest

.PHONY: setup format check test test-slow test-gpu bench bench-gpu bench-peers docs demo changelog clean

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@echo "setting up .venv with $(PYTHON) (two to five minutes)"
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else \
	    f'setup: $(PYTHON) is Python {v[0]}.{v[1]}, 3.11 or newer is needed; run make setup PYTHON=/path/to/python3.11')"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  installing torch"
	@$(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0
	@echo "  installing locant and what it needs"
	@$(PIP_INSTALL) --editable ".[all,test]"
	@touch $@

# ruff, pyright and pre-commit: the demo and the tests do without.
.venv/.stamp-dev: .venv/.stamp
	@$(PIP_INSTALL) --editable ".[all,test,dev]"
	@touch $@

format: .venv/.stamp-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: .venv/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: setup
	$(PYTEST) -n $(WORKERS) $(TESTFLAGS)

test-slow: setup
	$(PYTEST) -m "slow and not gpu" $(TESTFLAGS)

# Most of the time goes into compiling kernels, which the workers do side by side.
GPU_WORKERS ?= 6
test-gpu: setup
	$(PYTEST) -m gpu -n $(GPU_WORKERS) $(TESTFLAGS)

# Timings count only after the tests passed. Nothing else should run meanwhile.
BENCH := benchmarks/results
bench: test
	$(BIN)/locant bench attention --json $(BENCH)/attention.json --plot $(BENCH)/attention.svg
	$(BIN)/locant bench attention --threads 2 --no-memory --json $(BENCH)/attention-2-threads.json
	$(BIN)/locant bench model --encodings "m4 clip 64" --json $(BENCH)/model.json

# On a machine with a GPU, and torch for it (make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130).
bench-gpu: test-gpu
	$(BIN)/python benchmarks/gpu.py --json $(BENCH)/gpu.json

# The peers have versions of their own, so they get an environment of their own.
bench-peers: .venv-peers/.stamp
	OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/peers.py --json $(BENCH)/peers.json
	OMP_NUM_THREADS=1 .venv-peers/bin/python benchmarks/peer_models.py --json $(BENCH)/peer-models.json

.venv-peers/.stamp: pyproject.toml
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0 transformers==4.56.2 x-transformers==2.31.10
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check --editable .
	@touch $@

docs: setup
	$(BIN)/python docs/generate.py

demo: setup
	$(BIN)/locant compare $(RECIPE)

changelog: setup
	$(BIN)/python changes/gather.py

clean:
	rm -rf .venv .venv-peers .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
