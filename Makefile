# Every target sets itself up from a bare clone; a second run installs nothing.
#   make demo                    train a small language model on two ranks of this machine
#   make test                    lint, types and tests
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"     another torch build

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# The version that TORCH brought: whatever is installed later must keep it.
PIN := $(VENV)/torch-pin.txt

.PHONY: demo test lint soak clean FORCE

demo: $(VENV)/installed
	$(VENV)/bin/yafsdp-cc demo

test: lint $(VENV)/installed-hf
	$(VENV)/bin/python -m pytest

# The random-program and stress tests, for as long as a nightly run may take.
soak: $(VENV)/installed-hf
	YAFSDP_CC_SOAK=1 $(VENV)/bin/python -m pytest --timeout=3600

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml setup.py $(VENV)/torch-asked
	@echo "setting up $(VENV) with $(TORCH) (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "yafsdp_cc needs Python 3.10 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH)
	@$(VENV)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(PIN)
	@$(PIP) install "setuptools>=77" --constraint $(PIN)
	@$(PIP) install --no-build-isolation --editable ".[dev]" --constraint $(PIN)
	@touch $@

# The tests against Hugging Face models skip themselves where transformers cannot be had.
$(VENV)/installed-hf: $(VENV)/installed
	@$(PIP) install --no-build-isolation --editable ".[hf]" --constraint $(PIN) && touch $@ \
		|| echo "transformers could not be installed: the Hugging Face tests are skipped"

# Newer than the installation when TORCH is not what was asked for last time.
$(VENV)/torch-asked: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

clean:
	rm -rf $(VENV) build dist runs bench/out *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
