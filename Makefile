# Every target bootstraps .venv by itself; the second run installs nothing.
PYTHON ?= python3
# The exact torch that CI and this Makefile use; the package itself asks for a range. To choose torch's index:
#   make test TORCH_INDEX="--index-url https://example.org/whl/cpu"
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Options of the demo; the loss curves land in the named folder.
DEMO ?= --out demo-out
# Options of the storm, as `python -m benchmarks.storm --help` lists them.
STORM ?= --out storm-out
# Test files at once: most of the long ones wait for processes of their own.
JOBS ?= 3

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
PROTOS := $(wildcard protos/recovery/v1/*.proto)

.PHONY: demo test lint protos protos-check chaos storm bench clean

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH_INDEX) "$(TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" "$(TORCH)"
	@touch $@

demo: $(READY)  ## the main job: a DiLoCo run with joins, kills, bit flips, a resync and a resume from disk
	$(VENV)/bin/recovery demo $(DEMO)

lint: $(READY) protos-check
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

test: $(READY) lint  ## everything that guards main; under 15 minutes
	$(PY) -m pytest -m "not chaos and not storm" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST)

chaos: $(READY)
	$(PY) -m pytest -m chaos --timeout 600 $(PYTEST)

storm: $(READY)  ## ten minutes of seeded faults over a real run; the report is storm-out/storm.md
	$(PY) -m benchmarks.storm $(STORM)
	$(PY) -m pytest -m storm --timeout 3600 $(PYTEST)

bench: $(READY)
	$(PY) -m benchmarks $(BENCH)

protos: $(READY)  ## regenerate the Python code of protos/
	PATH="$(VENV)/bin:$$PATH" $(PY) -m grpc_tools.protoc -I. --python_out=. --mypy_out=quiet:. --grpc_python_out=. --mypy_grpc_out=quiet:. $(PROTOS)

protos-check: $(READY)
	@rm -rf build/protos && mkdir -p build/protos
	@PATH="$(VENV)/bin:$$PATH" $(PY) -m grpc_tools.protoc -I. --python_out=build/protos --mypy_out=quiet:build/protos --grpc_python_out=build/protos --mypy_grpc_out=quiet:build/protos $(PROTOS)
	@for f in build/protos/protos/recovery/v1/*; do cmp -s "$$f" "protos/recovery/v1/$$(basename $$f)" || { echo "$$(basename $$f) is not what protoc makes of the .proto files: run 'make protos'"; exit 1; }; done

clean:
	rm -rf $(VENV) build demo-out storm-out .mypy_cache .ruff_cache .pytest_cache
