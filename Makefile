# Two commands do everything on a fresh Linux machine: `make demo` and `make test`.

VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOB    ?= examples/quickstart.yaml
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: help install demo test test-gpu chaos check bench curves protos format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(READY)  ## a virtual environment with everything in it

$(READY): pyproject.toml scripts/install.sh
	bash scripts/install.sh $(VENV)

demo: $(READY)  ## train a real model on this machine (JOB=examples/quickstart.yaml)
	$(BIN)/headway run $(JOB)

test: $(READY)  ## all tests that need no GPU
	bash scripts/system_packages.sh redis-server iproute2=ip bubblewrap=bwrap
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore=tests/gpu -n 2 --dist loadfile

test-gpu: $(READY)  ## the tests that need GPUs
	$(BIN)/python -m pytest tests/gpu

chaos: $(READY)  ## random kills, pauses and partitions; then a kill of each process under vLLM
	$(BIN)/python -m tests.chaos

check: $(READY)  ## style, types, contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd protos && $(abspath $(BIN))/buf lint
	PYTHON=$(abspath $(BIN))/python PATH=$(abspath $(BIN)):$$PATH bash scripts/protos.sh --check

bench: $(READY)  ## every benchmark; each prints one JSON object last
	for file in bench/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

curves: $(READY)  ## the quickstart under every algorithm, two seeds: hours; draws docs/learning.svg
	$(BIN)/python -m pip install --quiet --editable '.[curves]'
	$(BIN)/python -m bench.curves

protos: $(READY)  ## generate headway/pb from protos/
	PYTHON=$(abspath $(BIN))/python PATH=$(abspath $(BIN)):$$PATH bash scripts/protos.sh

format: $(READY)  ## rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
