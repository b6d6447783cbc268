# make setup | demo | demo-cluster | check | test | test-all | test-plugins | bench | mount-ways | torture | docs
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
SCENARIO ?=
STATIC := check-ruff check-format check-types check-imports
export PYTHON
# A test that starts a process would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup clients plugins lab lock demo demo-cluster check test test-all test-rest lake-suites test-plugins bench mount-ways torture docs clean
.PHONY: check-ruff check-format check-types check-imports check-tests test-promises

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Debian packages and .venv in the checkout
	@scripts/setup.sh

clients: ## .venv-clients: the S3 clients that the tests drive; 3.2 GB
	@scripts/clients.sh

plugins: ## .venv-plugins: the libraries that the plug-ins are tested with; 2.8 GB
	@scripts/plugins.sh

lab: setup ## tests on hardware that this machine lacks, in a guest: docs/lab.md
	@lab/setup
	@$(BIN)/python -m pytest -q tests/lab

lock: ## write requirements/*.txt anew from pyproject.toml
	@scripts/lock.sh

demo: ## a store, an engine, objects in and out: two minutes on a new machine, then seconds
	@scripts/setup.sh demo
	@$(BIN)/python -m bench.demo

demo-cluster: ## one lake on three machines: kill, replace and add devices, and lose the machine with the names; four minutes
	@scripts/setup.sh
	@$(BIN)/python -m bench.demo_cluster

check: setup ## lint, types, layering, style and the quick tests
	@$(MAKE) --no-print-directory -j 3 --keep-going --output-sync=target $(STATIC) check-tests

check-ruff:
	@$(BIN)/ruff check --quiet .

check-format:
	@$(BIN)/ruff format --check --quiet .

check-types:
	@$(BIN)/mypy --no-error-summary .

check-imports:
	@$(BIN)/lint-imports --no-logo

check-tests:
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow" tests/style tests/unit

# In the order of folders: the long files come before the short ones, so all cores are busy to the end.  A third process
# works while others wait for disks, signals and clients.
TESTS := $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 1 -p tests.minutes

test: setup ## lint, types and layering, and every promise once
	@$(MAKE) --no-print-directory -j 4 --keep-going $(STATIC) test-promises

test-promises:
	@$(TESTS) -m "not thorough and not plugins" tests

test-all: test test-rest lake-suites ## every test but those of make test-plugins

test-rest: setup clients
	@lab/setup
	@$(TESTS) -m "thorough and not plugins" tests

# Suites that ask an engine as users do, at a lake over six folders.  What is about one engine is skipped, and says why.
LAKE_SUITES := tests/keyed $(addprefix tests/e2e/test_,s3_boto3.py s3_conditions.py s3_content.py s3_multipart.py) \
	$(addprefix tests/e2e/test_s3_,amz_headers.py bodies.py object_parts.py tagging.py versions.py) \
	$(addprefix tests/plugins/fsspec/test_,contents.py names.py) \
	$(addprefix tests/mount/test_,two_mounts.py commits.py listings.py flush.py xattrs.py) \
	$(addprefix tests/mount/test_,hot.py hot_and_native.py) tests/known/test_moments.py tests/door/test_oracle.py \
	$(addprefix tests/e2e/test_,blocking_client.py remote_client.py cli_get.py)

lake-suites: setup ## suites of S3 and its door, mount, clients, fsspec and KV caches at a running lake of six members
	@SERVED_DEVICES=6 $(TESTS) -m "not thorough and not plugins" $(LAKE_SUITES)

test-plugins: setup plugins ## the plug-ins with the libraries that use them: torch, pandas, datasets
	@$(BIN)/python -m pytest -q -m plugins tests/plugins

bench: setup ## measure: make bench SCENARIO=name
	@$(BIN)/python -m bench.run $(SCENARIO)
	@$(BIN)/python -m bench.report --to bench/out/report

mount-ways: setup ## the mount's tests with each way of answering reads: Python, native threads, passthrough
	@for way in off native passthrough; do MOUNT_WAY=$$way $(BIN)/python -m pytest -q tests/mount || exit 1; done

torture: setup ## simulated crashes, SIGKILL, flipped bits, odd inputs: hours
	@$(BIN)/python -m tests.torture

docs: setup ## write the reference page and the picture of rooms anew
	@$(BIN)/python -m scripts.reference
	@$(BIN)/python -m scripts.rooms

clean: ## remove what make made
	@rm -rf .venv .lab .venv-clients .venv-plugins build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
