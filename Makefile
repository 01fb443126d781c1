# `make demo` and `make test` start from a machine that has only Python, pip and make.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test test-long lint protos clean

demo: $(READY)
	$(VENV)/bin/paceline demo

test: $(READY)
	$(VENV)/bin/paceline pull smollm2-135m
	$(VENV)/bin/python -m pytest

test-long: $(READY)
	$(VENV)/bin/paceline pull smollm2-135m
	$(VENV)/bin/python -m pytest -m long

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy protos orchestrator services target_workers drafter_workers
	$(VENV)/bin/buf lint

protos: $(READY)
	$(VENV)/bin/python -m protos.compile

clean:
	rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar on --editable '.[dev]'
	touch $@
