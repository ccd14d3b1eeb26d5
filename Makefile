# `make test` on a fresh machine is enough: it makes the environment it needs.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
STAMP  := $(VENV)/.installed

# Other people's packages have an environment of their own: `make test` needs none of them.
ECOSYSTEM       := .venv-ecosystem
ECOSYSTEM_STAMP := $(ECOSYSTEM)/.installed

.PHONY: test test-ecosystem check format reproduce clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

$(ECOSYSTEM_STAMP): pyproject.toml constraints.txt constraints-ecosystem.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/python -m pip install --quiet --constraint constraints.txt \
		--constraint constraints-ecosystem.txt --editable '.[ecosystem]'
	touch $@

test-ecosystem: $(ECOSYSTEM_STAMP)
	$(ECOSYSTEM)/bin/python -m pytest -n 2 tests/ecosystem

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reproduce: $(STAMP)
	$(BIN)/bprong reproduce --resume

clean:
	rm -rf $(VENV) $(ECOSYSTEM) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
