PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo
CHROMIUM := $(shell command -v chromium)

.PHONY: help demo test check lint docs clean

help:
	@echo "make demo    convert a real small model, see its errors, generate with a packed cache"
	@echo "make test    run all tests"
	@echo "make check   lint, types, import rules and all tests: what CI runs"
	@echo "make docs    write the generated pages of docs/ again"

$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/dev: $(VENV)/torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(VENV)/demo
	@PATH="$(abspath $(BIN)):$$PATH" bash scripts/demo.sh "$(DEMO)"

test: $(VENV)/dev
	@$(BIN)/python scripts/prepare_smollm2.py
	@$(if $(CHROMIUM),,echo "no chromium here, so its tests are left out (Debian: apt-get install chromium)")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile $(if $(CHROMIUM),,-m "not browser")

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

docs: $(VENV)/dev
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf $(VENV) $(DEMO)
