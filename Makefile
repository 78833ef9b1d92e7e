# make quickstart   train a small Llama on two CPU processes; everything it writes is under runs/quickstart
#                   ARGS are passed on: make quickstart ARGS="--ckpt_path last --trainer.max_steps 600"
# make test         lint, format check, types and tests
#
# Both make .venv and install into it what they need; the second time they start at once.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Each process that is started here imports torch: without the cached bytecode it compiles all of it again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test clean

quickstart: $(VENV)/.installed-quickstart
	$(BIN)/titan fit --config configs/quickstart.yaml $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

# The stamp is the install's last act, so an interrupted install is done again.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[$*]"
	touch $@

$(BIN)/python:
	$(if $(PYTHON),,$(error Python 3.11 or newer was not found; name it with PYTHON=/path/to/python))
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV)
