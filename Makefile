# Every target installs what it needs: Python packages into .build/venv (build) and .venv (tests), crates by cargo.
# Needed on the machine: Rust (rustup), a C++ compiler, Python >= 3.11 with venv, make.

PYTHON ?= python3
BUILD_VENV := .build/venv
VENV := .venv
WHEEL_SOURCES := $(shell find src cuda python -type f -not -name '*.pyc' 2>/dev/null) \
	build.rs Cargo.toml Cargo.lock pyproject.toml README.md
# Prints the requirements of pyproject.toml at a dotted path.
REQUIREMENTS = $(PYTHON) -c 'import functools, sys, tomllib; \
	print(*functools.reduce(dict.__getitem__, sys.argv[1].split("/"), tomllib.load(open("pyproject.toml", "rb"))), sep="\n")'
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.DELETE_ON_ERROR:
.PHONY: demo test test-rust test-python test-gpu gpu-bundle lint format fuzz bench-cpu wheel build-env clean help

demo: .build/demo.stamp  ## Generate text with the model that ships
	$(BUILD_VENV)/bin/flint-rs "def fibonacci(n):" --max-tokens 120 --seed 1

test: test-rust test-python  ## Run all tests, Rust and Python

test-rust: build-env  ## Run the Rust tests
	cargo test --locked

test-python: .build/dev.stamp  ## Run the Python tests against the built wheel
	$(VENV)/bin/python -m pytest

test-gpu: build-env  ## Run the kernel tests, on a machine with a CUDA GPU
	cargo test --locked --test 'gpu_*' -- --ignored

gpu-bundle: build-env  ## Build GPU tests and bench into dist/gpu, for tools/gpu_check.sh on another machine
	tools/gpu_bundle.sh

lint: .build/dev.stamp  ## Check format, lints, types, stubs, and the rules between rooms
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --all-targets --no-default-features -- -D warnings
	cargo clippy --locked --features python -- -D warnings
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m mypy.stubtest flint_rs._core --mypy-config-file pyproject.toml
	$(VENV)/bin/clang-format --dry-run --Werror cuda/*
	$(VENV)/bin/python tools/rooms.py

format: .build/dev.stamp  ## Format all sources
	cargo fmt
	$(VENV)/bin/ruff format
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/clang-format -i cuda/*

fuzz:  ## Run every fuzz target for 15 seconds
	fuzz/run.sh

bench-cpu: build-env  ## Print tokens/s beside this machine's read bandwidth and FMA rate
	cargo bench --locked --bench cpu_report -- python/flint_rs/models/flint-small.gguf

wheel: build-env  ## Build a wheel into dist/
	$(BUILD_VENV)/bin/maturin build --release --locked --out dist --interpreter $(BUILD_VENV)/bin/python

build-env: .build/env.stamp  ## Install the build requirements (maturin, nvcc) into .build/venv

clean:  ## Remove everything that was built or installed here
	rm -rf .build .venv dist target fuzz/target

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.build/env.stamp: pyproject.toml
	$(PYTHON) -m venv $(BUILD_VENV)
	$(REQUIREMENTS) build-system/requires | $(BUILD_VENV)/bin/python $(PIP_INSTALL) -r /dev/stdin
	touch $@

.build/wheel.stamp: .build/env.stamp $(WHEEL_SOURCES)
	rm -rf .build/wheel
	$(BUILD_VENV)/bin/maturin build --release --locked --out .build/wheel --interpreter $(BUILD_VENV)/bin/python
	touch $@

.build/demo.stamp: .build/wheel.stamp
	$(BUILD_VENV)/bin/python $(PIP_INSTALL) --force-reinstall .build/wheel/*.whl
	touch $@

.build/dev-env.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(REQUIREMENTS) project/optional-dependencies/dev | $(VENV)/bin/python $(PIP_INSTALL) -r /dev/stdin
	touch $@

.build/dev.stamp: .build/wheel.stamp .build/dev-env.stamp
	$(VENV)/bin/python $(PIP_INSTALL) --force-reinstall --no-deps .build/wheel/*.whl
	touch $@
