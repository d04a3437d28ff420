# Two commands do all their own set-up on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
# GLM_SGLANG_VENV chooses the virtual environment (default .venv); PYTHON the interpreter it is made from (3.11–3.13).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := $(or $(GLM_SGLANG_VENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
export PYTHONUNBUFFERED := 1
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH

.PHONY: help setup setup-gpu demo test test-slow lint doctor lock clean
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## a virtual environment for the reference platform (no GPU)
	@launch/setup.sh "$(VENV)" cpu

setup-gpu: ## the same with the GPU stack
	@launch/setup.sh "$(VENV)" gpu

demo: setup ## prefill, decode and router on this machine, a two-turn chat, a table
	@"$(BIN)/python" -m launch.demo

test: ## every test that needs no GPU, and lint
	@launch/setup.sh "$(VENV)" cpu test lint
	@$(MAKE) --no-print-directory lint
	@"$(BIN)/python" -m pytest -m "not slow and not gpu and not ab"

test-slow: ## the minutes-long ones
	@launch/setup.sh "$(VENV)" cpu test
	@"$(BIN)/python" -m pytest -m "slow and not gpu and not ab"

lint: ## ruff, mypy --strict, codespell, import-linter
	@launch/setup.sh "$(VENV)" cpu test lint
	@"$(BIN)/ruff" check . && "$(BIN)/ruff" format --check .
	@"$(BIN)/mypy" glm_sglang kernels/glm_kernels connectors/glm_connectors
	@"$(BIN)/codespell"
	@PYTHONPATH=kernels:connectors:. "$(BIN)/lint-imports" --no-cache

doctor: setup ## what is right on this machine, what is wrong, and the command that mends it
	@"$(BIN)/python" -m glm_sglang.doctor

lock: ## resolve pyproject.toml into launch/lock again (developers; needs uv)
	@launch/lock/lock.sh

clean: ## remove what the other targets made, the virtual environment too
	rm -rf .venv build .demo demo-report.json .mypy_cache .ruff_cache .pytest_cache .hypothesis
