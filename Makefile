# `make test` on a fresh machine is enough: it makes the environment it needs.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
STAMP  := $(VENV)/.installed

# Other people's packages have an environment of their own: `make test` needs none of them.
ECOSYSTEM       := .venv-ecosystem
ECOSYSTEM_STAMP := $(ECOSYSTEM)/.installed

DOCS       := .venv-docs
DOCS_STAMP := $(DOCS)/.installed

# Pairs of Python and torch: the lowest that are declared, and the newest. torch comes from the package index, which may
# be a CUDA build of some gigabytes. The tests are those of what depends on torch's own code most.
MATRIX       ?= 3.10:2.6.0 3.12:newest 3.13:newest
MATRIX_TESTS := tests/optim/test_optimizer.py tests/optim/test_contract.py tests/optim/test_checkpoint.py \
	tests/optim/test_spectral.py tests/optim/auto tests/capture/test_calls.py tests/network/test_rewhitening.py \
	tests/network/test_convert.py tests/faults/test_threads_and_tracing.py

# Tests start many processes, and each would compile every module anew where a shell has forbidden to keep the result.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test test-rest test-ecosystem check docs format matrix package reproduce clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

# The tests that people run: every module and every promise of docs/guarantees.md, in some minutes.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not rest"

# The other tests: whole products of layers, losses and rules, long paths, many processes.
test-rest: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m rest

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

$(DOCS_STAMP): pyproject.toml constraints.txt constraints-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --constraint constraints-docs.txt \
		--editable '.[docs]'
	touch $@

# The site is in site/; open site/index.html. It loads nothing from elsewhere, which the last line checks.
docs: $(DOCS_STAMP)
	$(DOCS)/bin/python -m doctest docs/tools/docstrings.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	$(DOCS)/bin/python docs/tools/check_site.py site

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

matrix:
	tools/matrix "$(MATRIX)" $(MATRIX_TESTS)

package:
	tools/package $(PYTHON)

reproduce: $(STAMP)
	$(BIN)/bprong reproduce --resume

clean:
	rm -rf $(VENV) $(ECOSYSTEM) $(DOCS) .venv-package .venv-wheel .venv-matrix-* site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
