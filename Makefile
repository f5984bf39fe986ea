# `make test` and `make demo` need Python 3.11 or newer with venv, and make. They set up .venv on the first run.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
PIP_INSTALL := $(PY) -m pip -qq --no-input --disable-pip-version-check install

# Tests start hundreds of processes: each would compile stepwell and the tests again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := test
.PHONY: test test-mpi test-horovod test-azure test-triton test-hosts soak demo lint wheel-check clean

# pytest comes last: its closing line is the last line of the output. Four processes on two cores: many tests wait, and
# who is done early takes over from the others.
test: lint
	@$(PY) -m pytest -n 4 --dist worksteal -m 'not soak and not hosts'

# Ends with what each part did and its seed; `make soak STEPWELL_SOAK_SEED=n` draws the same kills and cuts again.
soak: export STEPWELL_SOAK_SEED := $(STEPWELL_SOAK_SEED)
soak: export STEPWELL_SOAK_REPORT := $(CURDIR)/build/soak.txt
soak: $(STAMP)
	@tests/crash/get_fuse.sh
	@mkdir -p build && : > $(STEPWELL_SOAK_REPORT)
	@$(PY) -m pytest -n 2 -m soak --timeout 7200; status=$$?; sort $(STEPWELL_SOAK_REPORT); exit $$status

# MPI, Horovod, Azurite and Triton are installed beside the virtual environment, in build: without them their tests skip.
test-mpi: $(STAMP)
	@tests/ranks/groups/get_mpi.sh $(PY)
	@PYTHONPATH=$(CURDIR)/build/mpi $(PY) -m pytest tests/ranks/groups tests/adapters/test_scr_frameworks.py -k mpi

test-horovod: $(STAMP)
	@tests/ranks/groups/get_horovod.sh $(CURDIR)/$(PY)
	@PYTHONPATH=$(CURDIR)/build/horovod/site $(PY) -m pytest tests/ranks/groups tests/adapters/test_scr_frameworks.py -k horovod

test-azure: $(STAMP)
	@test -d build/azurite/node_modules/azurite || npm install --silent --no-audit --no-fund --prefix build/azurite azurite
	@$(PY) -m pytest tests/storage/objects/test_azure.py

# Kernels by Triton's interpreter, on the CPU.
test-triton: $(STAMP)
	@test -d build/triton/triton || $(PIP_INSTALL) --no-deps --constraint constraints.txt --target build/triton triton
	@PYTHONPATH=$(CURDIR)/build/triton $(PY) -m pytest -n 2 tests/storage/codecs/test_device.py tests/storage/chain/test_device.py tests/benchmarks/test_lc.py -k device

# Hosts with networks, disks and process tables of their own. Needs root and iproute2, and skips with the reason.
test-hosts: $(STAMP)
	@$(PY) -m pytest tests/hosts --timeout 900

demo: $(STAMP)
	@echo "training on handwritten digits twice: once uninterrupted, once with five kills (about a minute)"
	@$(PY) -m stepwell.tools.cli.main prove --kills 5 --out build/demo -- $(PY) examples/digits.py

lint: $(STAMP)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy --strict src

wheel-check: $(STAMP)
	@$(PY) -m pytest tests/arch/test_wheel.py

# The stamp is written last: an interrupted set-up is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned tools need Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "setting up $(VENV) (the first time downloads torch)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	@touch $@

# Keeps .venv: remove it by hand to start from nothing.
clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
