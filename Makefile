# The commands a newcomer needs. Everything runs in .venv, made by scripts/setup.sh.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint

export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export TOKENIZERS_PARALLELISM := false

PYTEST_ARGS ?=

help:
	@echo "make setup   install everything into .venv and convert the embedded model (again only what changed)"
	@echo "make demo    set up, then train, evaluate, export and report; resumes after an interruption"
	@echo "make test    set up, then run all tests (PYTEST_ARGS='-m \"not vllm\"' leaves out those that need the server)"
	@echo "make lint    ruff and mypy"

setup:
	@bash scripts/setup.sh

demo: setup
	@.venv/bin/selfgc-rl demo

test: setup
	@.venv/bin/pytest $(PYTEST_ARGS)

lint: setup
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
