# make run        set everything up and decode with the shipped pair
# make test       set everything up and run every test, on WORKERS=2 processes
# make lint       style, import contracts
# make reference  remake the PyTorch golden files in an environment of their own and compare
# make notebooks  execute every notebook; UPDATE=1 rewrites the committed outputs

VENV := .venv
REFERENCE := .venv-reference
WORKERS ?= 2

find_python = $(shell for p in $(1) $$(ls -d $$HOME/.pyenv/versions/$(2).*/bin/python 2>/dev/null | sort -V | tail -n 1); do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(0 if sys.version_info[:2] $(3) else 1)' 2>/dev/null && echo $$p && break; done)
PYTHON ?= $(or $(call find_python,python3.13 python3.12 python3,3.12,>= (3, 12)),$(call find_python,,3.13,>= (3, 12)))
PYTHON311 ?= $(call find_python,python3.11 python3,3.11,== (3, 11))

.PHONY: run test lint check reference notebooks setup clean

run: $(VENV)/.ready
	$(VENV)/bin/python -m experiments.run_spec $(ARGS)

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports

check: lint test

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml requirements.lock
	@test -n "$(PYTHON)" || { echo "dflash_jax needs Python >= 3.12: install one, or name it with make PYTHON=/path/to/python3.12"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[test]"
	@touch $@

notebooks: $(VENV)/.notebooks
	$(VENV)/bin/python -m experiments.notebooks $(if $(UPDATE),--update) $(ARGS)

$(VENV)/.notebooks: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[notebooks]"
	@touch $@

reference: $(VENV)/.ready $(REFERENCE)/.ready
	$(REFERENCE)/bin/python tests/reference/make_goldens.py --check

$(REFERENCE)/.ready: tests/reference/requirements.txt tests/reference/requirements-nodeps.txt
	@test -n "$(PYTHON311)" || { echo "the PyTorch reference needs Python 3.11: install one, or name it with make reference PYTHON311=/path/to/python3.11"; exit 1; }
	test -x $(REFERENCE)/bin/python || $(PYTHON311) -m venv $(REFERENCE)
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/reference/requirements.txt
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/reference/requirements-nodeps.txt
	@touch $@

clean:
	rm -rf $(VENV) $(REFERENCE)
