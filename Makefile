# On a new machine, `make demo` and `make test` install everything they need.
VENV := .venv
BIN  := $(VENV)/bin
# pip shows its progress on a terminal, and otherwise only warnings and errors
PIP  := $(BIN)/python -m pip --disable-pip-version-check \
        install $$(test -t 2 || echo --quiet) --no-compile --constraint constraints.txt
# compiles modules in parallel, which pip does not; Python compiles the excluded ones when they are imported
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x 'site-packages/(.*/)?(tests|testing|pip|mypyc?|setuptools)/' \
        $(VENV)/lib || true

# Servers that tests/cluster/test_laboratory.py runs on its hosts. Only CI installs them, because their packages
# also start them at boot; elsewhere, the tests that need a missing one are skipped.
SERVERS := iproute2 openssh-server slurm-wlm munge openmpi-bin mpich

# JupyterHub's proxy for tests/cluster/test_hub.py, installed in .venv.
PROXY := configurable-http-proxy@4.6.3

.PHONY: help install demo lab test stress test-gpu check bench bugs site slides cheatsheet dist clean

help:   ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## */\1 /p' Makefile | \
	    while read -r name what; do printf '  make %-12s%s\n' "$$name" "$$what"; done

install: $(VENV)/.installed ## install distkit and JupyterLab into .venv

demo: $(VENV)/.installed    ## run the four demos on four ranks, and write their replay to demo.html
	@$(BIN)/distkit demo all --html demo.html

lab: $(VENV)/.installed     ## open JupyterLab with the welcome notebook; ARGS="--no-browser" passes options to it
	@$(BIN)/distkit lab $(ARGS)

test: $(VENV)/.installed-test  ## run all tests: pure, ranks, cluster; ARGS="-m pure" selects some
	@{ command -v chromium && $(BIN)/python -m playwright --version; } >/dev/null 2>&1 || \
	    tools/debian-install chromium libatomic1 || echo "Without them, the browser tests are skipped."
	@[ -x $(BIN)/configurable-http-proxy ] || \
	    npm install --silent --fetch-timeout 60000 --fetch-retries 1 --global --prefix $(VENV) $(PROXY) || \
	    echo "npm is missing or could not install $(PROXY): the JupyterHub tests are skipped."
	@[ "$$CI" != true ] || { command -v sshd && command -v slurmctld && command -v mpiexec; } >/dev/null || \
	    tools/debian-install $(SERVERS) || echo "Without them, the tests that need them are skipped."
	@DISTKIT_TEST_ID=make-$$$$ $(BIN)/python -m pytest --numprocesses 2 --no-loadscope-reorder $(ARGS)

stress: $(VENV)/.installed-test ## run long tests, and the full suites that `make test` samples; ARGS="-k misuse" selects some
	@DISTKIT_TEST_ID=make-$$$$ $(BIN)/python -m pytest -m stress tests $(ARGS)

test-gpu: ## run all tests and measurements that need a GPU, and write a report
	@tools/gpu-check $(ARGS)

check: $(VENV)/.installed-test ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-test ## measure start-up, memory, recording and more, and compare them with references
	@$(BIN)/distkit bench all

bugs: $(VENV)/.installed  ## run distkit on the bug suite, and write docs/bugs.md; ARGS=--stock runs plain torch first
	@$(BIN)/python -m tests.stress.bugs --page docs/bugs.md $(ARGS)

site: $(VENV)/.installed-site  ## write lessons with results and the documentation to site/; ARGS="02 05" selects lessons
	@$(BIN)/python tools/site $(ARGS)

slides: $(VENV)/.installed-site  ## write images of the lessons' runs to slides/; ARGS="05 15" selects lessons
	@$(BIN)/python tools/site --slides slides $(ARGS)

cheatsheet: $(VENV)/.installed-site  ## write the students' cheat sheet to cheatsheet.pdf
	@$(BIN)/python tools/site --cheatsheet cheatsheet.pdf

dist: $(VENV)/.installed-test  ## build the sdist and the wheel in dist/, and check them with twine
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist
	@$(BIN)/python -m twine check --strict dist/*

clean:  ## remove .venv, build results and caches, but not my-notebooks or gpu-report
	rm -rf $(VENV) demo.html dist site slides cheatsheet.pdf test-results .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# An empty file marks a complete installation, so that later commands start immediately.
$(BIN)/pip:
	@tools/make-venv $(VENV)

$(VENV)/.installed: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and its dependencies into $(VENV); the first time takes a few minutes ..."
	@$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-site: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and the dependencies of the site into $(VENV); the first time takes a few minutes ..."
	@$(PIP) --editable ".[site]"
	@$(COMPILE)
	@touch $(VENV)/.installed $@

$(VENV)/.installed-test: $(BIN)/pip pyproject.toml constraints.txt
	@echo "Installing distkit and the dependencies of the tests into $(VENV); the first time takes a few minutes ..."
	@$(PIP) --editable ".[test]"
	@$(COMPILE)
	@touch $(VENV)/.installed $(VENV)/.installed-site $@
