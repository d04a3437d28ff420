# Two commands do all their own set-up on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
# GLM_SGLANG_VENV chooses the virtual environment (default .venv); PYTHON the interpreter it is made from (3.11–3.13).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := $(or $(GLM_SGLANG_VENV),$(CURDIR)/.venv)
BIN := $(VENV)/bin
# vLLM has an environment of its own: it pins another torch.
VLLM := $(or $(VLLM_VENV),$(CURDIR)/.vllm)
export PYTHONUNBUFFERED := 1
# OpenMP threads that wait, sleep: on a busy machine a spinning thread keeps the one that it waits for from running.
export OMP_WAIT_POLICY := passive
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH

# SECOND_CHANCE=1, in CI: tests that failed are run once more; one that fails by itself fails twice.
SECOND_CHANCE :=
# Several tests at a time where none asks for a time and their servers fit in memory: most of them wait half of theirs.
LEFT_OUT := not slow and not gpu and not ab

.PHONY: help setup setup-gpu demo test test-slow test-ab bench lint doctor lock clean
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## a virtual environment for the reference platform (no GPU)
	@launch/setup.sh "$(VENV)" cpu

setup-gpu: ## the same with the GPU stack
	@launch/setup.sh "$(VENV)" gpu

demo: setup ## prefill, decode and router on this machine, a two-turn chat, a table (DEMO_RESTART=valkey|prefill between the turns)
	@"$(BIN)/python" -m launch.demo

test: ## the tests that need no GPU, but for the minutes-long ones, and lint
	@launch/setup.sh "$(VENV)" cpu test lint
	@$(MAKE) --no-print-directory lint
	@status=0; test() { local code=0; "$(BIN)/python" -m pytest "$$@" || code=$$?; [ $$code -le $$status ] || status=$$code; }; \
	test tests/unit -n3 --dist=loadfile -m "$(LEFT_OUT) and not alone"; \
	test tests/unit -m "$(LEFT_OUT) and alone"; \
	test tests/contract -n2 --dist=loadfile -m "$(LEFT_OUT)"; \
	test tests/e2e --ignore=tests/e2e/tokens -m "$(LEFT_OUT)"; \
	test tests/e2e/tokens -n2 --dist=loadfile -m "$(LEFT_OUT)"; \
	if [ $$status -eq 1 ] && [ -n "$(SECOND_CHANCE)" ]; then \
	  echo "[test] second chance: what failed above is run once more, with nothing beside it"; \
	  "$(BIN)/python" -m pytest tests -m "$(LEFT_OUT)" --last-failed --last-failed-no-failures=none --maxfail=3 && status=0 && echo "[test] passed at the second chance only: look at the failures above"; \
	fi; \
	exit $$status

test-slow: ## the minutes-long ones
	@launch/setup.sh "$(VENV)" cpu test
	@"$(BIN)/python" -m pytest -m "slow and not gpu and not ab"

test-ab: ## SGLang beside vLLM (installed apart, in $VLLM_VENV or .vllm), driven by the A/B harness; LMCache's repairs inside vLLM
	@launch/setup.sh "$(VENV)" cpu test
	@launch/vllm.sh "$(VLLM)"
	@VLLM_VENV="$(VLLM)" "$(BIN)/python" -m pytest -m ab

bench: ## a two-turn A/B of stock SGLang and ours (and vLLM, where installed), then report.html of all results (≤ 15 minutes)
	@launch/setup.sh "$(VENV)" cpu test
	@mkdir -p .bench && "$(BIN)/python" -m glm_sglang.tiny_model .bench/model --dtype fp8
	@"$(BIN)/python" -m benchmarks.ab --config benchmarks/endpoints/cpu.yaml --set model=.bench/model --name ab_two_turn \
	  --workload two_turn --turns-apart --sessions 4 --prompt-tokens 768 --added-tokens 64 --answer-tokens 4 \
	  --concurrency 1 --rounds 6 --warm-up 1 --logs .bench/logs -o .bench/two_turn.jsonl --json > .bench/two_turn.json
	@mv -f .bench/two_turn.jsonl .bench/two_turn_records.jsonl  # the next run is another measurement
	@if [ -x "$(VLLM)/bin/vllm" ]; then "$(BIN)/python" -m benchmarks.tiny_llama .bench/llama && \
	  "$(BIN)/python" -m benchmarks.ab --config benchmarks/endpoints/llama_cpu.yaml --set model=.bench/llama \
	    --set vllm="$(VLLM)" --name ab_vllm_llama --workload two_turn --sessions 2 --prompt-tokens 1024 --added-tokens 64 \
	    --answer-tokens 8 --concurrency 2 --rounds 6 --warm-up 1 --logs .bench/logs -o .bench/vllm.jsonl --json > .bench/vllm.json && \
	  mv -f .bench/vllm.jsonl .bench/vllm_records.jsonl; \
	else rm -f .bench/vllm.json; echo "[bench] no vLLM at $(VLLM): not compared (launch/vllm.sh installs it there)"; fi
	@for gpu in h200 b300; do "$(BIN)/python" -m benchmarks.roofline --gpu $$gpu --json > .bench/roofline_$$gpu.json; done
	@"$(BIN)/python" -m benchmarks.report .bench/*.json benchmarks/results/*/*.json -o report.html

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
	rm -rf .venv .vllm build .demo .bench demo-report.json report.html .mypy_cache .ruff_cache .pytest_cache .hypothesis
