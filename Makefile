# Every target sets itself up from a bare clone; a second run installs nothing.
#   make demo                    train a small language model on two ranks of this machine
#   make test                    lint, types and tests
#   make test-oldest             the tests that depend most on torch's inside, under the oldest torch that is supported
#   make site                    the documentation as a site: open site/index.html
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"     another torch build

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
# The version that TORCH brought: whatever is installed later must keep it.
PIN := $(VENV)/torch-pin.txt
# What is installed, by TORCH: asking for another one starts over.
INSTALLED := $(VENV)/installed-$(shell echo '$(TORCH)' | cksum | cut -d ' ' -f 1)

# Four files of tests at a time: ranks that wait for each other leave cores idle. A test that fails alone: pytest tests/FILE.py.
# tests/conftest.py puts files in order.
FILES_AT_ONCE := -n 4 --dist loadfile --no-loadscope-reorder
PYTEST = $(VENV)/bin/python -m pytest $(FILES_AT_ONCE)

# Each worker and each process that tests start would compile the package anew, and each worker all tests, too.
unexport PYTHONDONTWRITEBYTECODE

# The native kernels: what is changed is built again.
CSRC := $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.*)

# The oldest torch that is supported, beside the other one, whose kernels it takes: one library serves every torch.
OLDEST ?= torch==2.11.0
OLDEST_PYTHON ?= $(PYTHON)
OLDEST_VENV := .venv-oldest
# What depends most on torch's private parts: autograd, DTensor, FSDP2, its checkpoints, streams, torchrun's flags.
OLDEST_TESTS := tests/engine tests/sharding tests/fully_shard/test_programs.py tests/fully_shard/test_frameworks.py \
	tests/checkpoint/test_assign.py tests/checkpoint/test_state_dicts.py tests/checkpoint/test_reader.py \
	tests/checkpoint/test_writer.py \
	tests/training/test_checkpointing.py tests/test_offload.py tests/test_parity.py tests/compression/test_fsdp2.py \
	tests/cli/test_config.py tests/cli/test_launch.py::test_a_launch_that_names_no_port_needs_none \
	tests/cli/test_launch.py::test_a_signal_while_ranks_start_reaches_them

.PHONY: demo test test-oldest ready extras lint soak site clean

demo: $(INSTALLED)
	@$(VENV)/bin/yafsdp-cc demo

test: lint $(INSTALLED)-extras
	$(PYTEST)

# Where that torch cannot be had, nothing fails; after half an hour it is not waited for any longer.
test-oldest: $(INSTALLED)
	@if YAFSDP_CC_NATIVE=0 timeout 1800 $(MAKE) --no-print-directory extras EXTRAS=hf \
			VENV=$(OLDEST_VENV) PYTHON="$(OLDEST_PYTHON)" TORCH="$(OLDEST)"; then \
		$(OLDEST_VENV)/bin/python -m pytest $(FILES_AT_ONCE) $(OLDEST_TESTS) && \
		$(OLDEST_VENV)/bin/python -m pytest -p tests.simulated_cuda -p no:xdist tests/test_cuda.py; \
	else \
		rm -rf $(OLDEST_VENV); \
		echo "$(OLDEST) could not be installed (see above): nothing was tested under it"; \
	fi

ready: $(INSTALLED)

extras: $(INSTALLED)-extras

# Every test in its long form: hundreds of random programs under random delays, and what make test leaves to those like it.
soak: $(INSTALLED)
	YAFSDP_SOAK=500 $(PYTEST)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@if grep -q "^torch==2\.13" $(PIN); then $(VENV)/bin/mypy; else echo "mypy: left out, types are those of torch 2.13"; fi

$(INSTALLED): pyproject.toml setup.py $(CSRC)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "yafsdp_cc needs Python 3.10 or newer")'
	@echo "setting up $(VENV) with $(TORCH): once, some minutes"
	@test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install $(TORCH)
	@$(VENV)/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(PIN)
	@$(PIP) install "setuptools>=77" --constraint $(PIN)
	@$(PIP) install --no-build-isolation --editable ".[dev]" --constraint $(PIN)
	@touch $@

site: $(INSTALLED)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

# What follows adds packages alone: the kernels are there already.
EXTRAS := bench hf accelerate lightning peft track trl titan torchao bitsandbytes
ADD = YAFSDP_CC_NATIVE=0 $(PIP) install --no-build-isolation --constraint $(PIN) --editable

# All at once, so that pip chooses versions that suit each other. If that fails, each by itself: tests skip themselves
# where theirs is missing, and the next make test tries again.
$(INSTALLED)-extras: $(INSTALLED)
	@$(ADD) ".[$(shell echo $(EXTRAS) | tr ' ' ',')]" && touch $@ || for extra in $(EXTRAS); do \
		$(ADD) ".[$$extra]" || echo "extra '$$extra' could not be installed: its tests are skipped"; done

$(INSTALLED)-docs: $(INSTALLED)
	@YAFSDP_CC_NATIVE=0 $(PIP) install --no-build-isolation --editable ".[docs]" --constraint $(PIN) && touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist runs site bench/out *.egg-info yafsdp_cc/compression/*.so .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
