# Each of these is the only command a fresh machine needs: they create .venv with the pinned packages first.
#   make test   lint, types, protos and all tests
#   make demo   speculative decoding with a small model that is downloaded once

PYTHON ?= python3
# What `make breaking` compares the protos with.
AGAINST ?= .git\#branch=main

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test soak install-test demo lint format stubs breaking pins clean

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/pytest

# Faults and cancelled sessions in large numbers, for minutes.
soak: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/pytest -s -m soak

# Installs what the images have into new environments; downloads torch.
install-test: $(INSTALLED)
	INSTALL_TEST=1 $(BIN)/pytest tests/docker/test_install.py

demo: $(INSTALLED)
	$(BIN)/foredraft demo

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stubs: $(INSTALLED)
	$(BIN)/python tools/generate_stubs.py

breaking: $(INSTALLED)
	$(BIN)/buf breaking --against '$(AGAINST)'

# Writes the versions in .venv to constraints.txt.
pins: $(INSTALLED)
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "foredraft needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[models,dev]'
	@touch $@
