# A fresh machine needs no more than `make demo` and `make test`.
VENV := .venv
BIN  := $(VENV)/bin
# on a terminal pip shows its progress, elsewhere only what goes wrong
PIP  := $(BIN)/python -m pip --disable-pip-version-check \
        install $$(test -t 2 || echo --quiet) --no-compile --constraint constraints.txt
# pip itself would compile one module after the other
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# What hosts run in tests/cluster/test_laboratory.py. Elsewhere than in CI, where it is not wanted that servers
# come and start with the machine, these tests are skipped without them.
SERVERS := iproute2 openssh-server slurm-wlm munge openmpi-bin mpich

# What stands before a JupyterHub in tests/cluster/test_hub.py; it lies in .venv, too.
PROXY := configurable-http-proxy@4.6.3

.PHONY: help install demo lab test stress test-gpu check bench bugs site slides cheatsheet dist clean

help:   ## this list
	@sed -n 's/^\([a-z-]*\):.*## */\1 /p' Makefile | \
	    while read -r name what; do printf '  make %-12s%s\n' "$$name" "$$what"; done

install: $(VENV)/.installed ## distkit and JupyterLab, in .venv

demo: $(VENV)/.installed    ## the four demos on four real ranks, and their replay in demo.html
	@$(BIN)/distkit demo all --html demo.html

lab: $(VENV)/.installed     ## JupyterLab on the welcome notebook
	@$(BIN)/distkit lab

test: $(VENV)/.installed-test  ## all tests: pure, ranks, cluster; fewer with ARGS="-m pure"
	@{ command -v chromium && $(BIN)/python -m playwright --version; } >/dev/null 2>&1 || \
	    tools/debian-install chromium libatomic1 || echo "Until then the browser tests are skipped."
	@[ -x $(BIN)/configurable-http-proxy ] || \
	    npm install --silent --fetch-timeout 60000 --fetch-retries 1 --global --prefix $(VENV) $(PROXY) || \
	    echo "Until npm is there and can install it, the tests of a hub are skipped."
	@[ "$$CI" != true ] || { command -v sshd && command -v slurmctld && command -v mpiexec; } >/dev/null || \
	    tools/debian-install $(SERVERS) || echo "Until then the tests that need them are skipped."
	@DISTKIT_TEST_ID=make-$$$$ $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder $(ARGS)

stress: $(VENV)/.installed-test ## the suites that `make test` samples, and its longest tests; fewer with ARGS="-k misuse"
	@DISTKIT_TEST_ID=make-$$$$ $(BIN)/python -m pytest -m stress tests $(ARGS)

test-gpu: ## all tests and figures that need a GPU, on a machine that has one; a report of them
	@tools/gpu-check $(ARGS)

check: $(VENV)/.installed-test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test ## start-up, memory, recording and more, beside their references
	@$(BIN)/distkit bench all

bugs: $(VENV)/.installed  ## the bug suite's scores, printed and in docs/bugs.md; first in plain torch with ARGS=--stock
	@$(BIN)/python -m tests.stress.bugs --page docs/bugs.md $(ARGS)

site: $(VENV)/.installed-site  ## the lessons with their results and the documentation, in site/; some lessons with ARGS="02 05"
	@$(BIN)/python tools/site $(ARGS)

slides: $(VENV)/.installed-site  ## pictures of the lessons' runs for slides, in slides/; of single lessons with ARGS="05 15"
	@$(BIN)/python tools/site --slides slides $(ARGS)

cheatsheet: $(VENV)/.installed-site  ## the students' page as cheatsheet.pdf
	@$(BIN)/python tools/site --cheatsheet cheatsheet.pdf

dist: $(VENV)/.installed-test  ## sdist and wheel in dist/, checked by twine
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist
	@$(BIN)/python -m twine check --strict dist/*

clean:  ## remove all that make made, .venv included
	rm -rf $(VENV) demo.html dist site slides cheatsheet.pdf test-results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An empty file marks a finished installation, so that the next command starts at once.
$(BIN)/pip:
	@tools/make-venv $(VENV)

$(VENV)/.installed: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and what it needs into $(VENV): some minutes the first time ..."
	@$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-site: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and what its pages need into $(VENV): some minutes the first time ..."
	@$(PIP) --editable ".[site]"
	@$(COMPILE)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and what the tests need into $(VENV): some minutes the first time ..."
	@$(PIP) --editable ".[test]"
	@$(COMPILE)
	@touch $(VENV)/.installed $(VENV)/.installed-site $@
