# Each target sets up .venv first (env/install.sh; nothing to do when it matches its lock).
.DEFAULT_GOAL := help
.PHONY: help setup ablation ablation-full parity lab colab lessons check-lessons screenshots site site-tools liger test test-all test-elsewhere test-faults test-slurm test-compat mutations sweep referee resolve release lint clean
BIN := .venv/bin
export TOKENIZERS_PARALLELISM := false
ARGS ?=
WORKERS ?= 2

help: ## this list
	@echo "usage: make TARGET    (needs Python >= 3.11, git and make)"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "settings: PYTHON=python3.12  ALST_DEVICE=cpu|cuda  TORCH_INDEX_URL=...  WHEELHOUSE=folder  (env/README.md)"
	@echo "          ALST_SLOW=2 doubles the time limits of check-lessons"
	@echo "          ARGS='...' is added to the command of a target, such as lessons (ARGS='05 12') and test"

setup: ## make or refresh .venv
	@env/install.sh

ablation: setup ## every row of the paper's Table 1 with a small model, in a few minutes: the table, the report
	$(BIN)/alst run papermill_runs/specs/ablation-quick.yaml $(ARGS)

ablation-full: setup ## the same with the model and the budget of the README's table (10 to 20 minutes on two cores)
	$(BIN)/alst run papermill_runs/specs/ablation.yaml $(ARGS)

parity: setup ## train the same data with and without sequence parallelism, compare the losses
	$(BIN)/alst run papermill_runs/specs/parity.yaml $(ARGS)

# What is first on JUPYTER_PATH wins over kernels of the same name elsewhere (your own, conda's, the system's).
# The root is the checkout, so that notebooks can link to the README and the specs. The address that is printed, for
# those without a browser here, is that of the landing notebook too. The file browser lists what a reader opens, and
# not what the notebooks import.
HELPERS := __pycache__ checks images layer_timeline.py step_profiles.py one_gpu.py needle.py
lab: setup ## open JupyterLab on the landing notebook: copies of the notebooks in work/, to run and to change
	@$(BIN)/python notebooks/work.py
	JUPYTER_PATH="$$(cd $(BIN)/.. && pwd)/share/jupyter$${JUPYTER_PATH:+:$$JUPYTER_PATH}" \
		$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/work/index.ipynb \
		$(HELPERS:%=--ContentsManager.hide_globs=%) \
		$(if $(filter 0,$(shell id -u)),--allow-root) work/index.ipynb $(ARGS)

lessons: setup ## run all lessons anew and store their outputs and solutions
	$(BIN)/python notebooks/lessons.py run $(ARGS)

check-lessons: setup ## run all lessons anew and compare them with what is stored
	$(BIN)/python notebooks/lessons.py check $(ARGS)

# Needs Chromium (Debian: apt-get install chromium). It runs the landing notebook and lesson 12, in about two minutes.
screenshots: setup ## take the pictures of the README and of notebooks/runs.md anew, in a browser
	PYTHONPATH=papermill_runs/referee OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/test_lab.py

# What Sphinx needs besides the lock is pinned apart; pip asks no index when all of it is there.
site-tools: setup ## install what `make site` needs into .venv
	$(BIN)/python -m pip install -q --no-compile --no-deps $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE)) -r env/site.txt

site: site-tools ## build the lessons, their solutions and the API as web pages in build/site, and check them
	$(BIN)/python notebooks/site/builder.py $(ARGS)

# SOURCE is where pip finds this library: a repository behind git+, or the address of a wheel.
colab: setup ## SOURCE=... makes 90_minutes and lessons 00 to 02 for Colab in build/colab, each one file
	$(BIN)/python notebooks/site/colab.py $(SOURCE) $(ARGS)

# One thread a process: the ranks that the tests start share the cores. Most tests keep one core busy, so two of them run
# at a time; each half has ranks of its own. Nothing is fetched from a hub.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: setup ## every operator against its oracle, a step under each engine, the launcher: a few minutes
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup ## every test (WORKERS=0: one after the other, for a debugger)
	$(PYTEST) $(ARGS)

# About two minutes on two cores. ARGS=--whole runs the whole command in each environment, and installs other Pythons.
test-elsewhere: setup ## start the first command as another user, without control groups, on one core, in odd paths
	$(PYTEST) -rs --elsewhere tests/elsewhere $(ARGS)

# About eight minutes on two cores, and half a minute for each kill. ARGS='--kills 60 --seed 1' is the whole campaign.
test-faults: setup ## break runs: signals at random moments, stopped ranks, full disks, damaged files
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --faults tests/faults $(ARGS)

mutations: setup ## 51 mistakes made on purpose, in copies, pages, checkpoints, exchanges and engines: a test shows each
	$(PYTEST) tests/device/test_late_mutations.py $(ARGS)

liger: setup ## Liger and Triton beside .venv (700 MB), for the tests of Liger's kernels on a CPU
	env/liger.sh

# Where Debian's packages of Slurm are not there and cannot be installed, the tests skip and say why.
test-slurm: setup ## start a Slurm of two nodes on this machine, give it the commands of env/README.md
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -rs --slurm tests/slurm $(ARGS)

test-compat: setup ## every supported decoder with the newest and the oldest transformers; the table of them
	env/compat.sh $(ARGS)

# About half an hour for each transformers on two cores. ARGS='--only llama qwen3' judges some types; a sweep that was
# stopped goes on with what is not judged yet.
sweep: setup ## every causal language model of transformers against plain transformers, newest and oldest; the table of them
	env/compat.sh sweep $(ARGS)

# About half an hour on two cores for everything; it goes on with what is not judged yet. ARGS='--stack NAME --case CASE'
# judges one cell, and `--again` anew. `make liger` adds Liger.
referee: setup ## every stack's sequence parallelism against plain transformers: the table, the pages, the reproducers
	$(BIN)/python papermill_runs/referee/referee.py $(ARGS)

resolve: setup ## ask pip's index for every version that env/README.md and the files for conda name
	env/resolve.sh

release: export ALST_PAGES := all
release: lint resolve site liger test-all check-lessons test-compat sweep ## everything: lint, site, tests, lessons, both transformers, the sweep
	$(MAKE) test-elsewhere ARGS=--whole

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove .venv and caches, nothing else
	rm -rf .venv .compat .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find alstlib tests env notebooks -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
