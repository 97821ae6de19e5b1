# The commands of the workbook. `make help` lists them; each sets up what it needs the first time.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# The Python that makes the environment, 3.11 or later; everything afterwards runs in .venv.
PYTHON ?= python3
# labs (the student's stubs), solutions (the reference) or a folder; a folder outside the workbook needs TRUST=1.
IMPL ?= labs
TASK ?=
LEVEL ?= 1
LAB ?= 07
TRUST ?=
# A notebook of the module, by the two digits that its name begins with, for `make notebooks`.
NOTEBOOK ?=
# 1 to compile the kernels of a lab for the GPUs that are not here, after its tests.
COMPILE ?=
OUT ?= .out/grades
SUBMISSIONS ?=
# A model in place of the bundled one, for `make chat`: a folder, a .gguf file or a hub id.
MODEL ?=
# Yours, for the name of the archive that `make submit` writes.
NAME ?=
# quick for a telling few of the sample submissions in the demo, or all.
SAMPLES ?= quick
# cpu or cuda, and a picture of the roofline, for `make measure`.
DEVICE ?=
PLOT ?=
# full, or quick for a taste of every long proof.
EVIDENCE ?= full

# Processes that `make test` and `make evidence` run tests in; each brings a model or two into memory.
WORKERS ?= 2

STAMP := .venv/.stamp
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
IMPORT_LINTER := .venv/bin/lint-imports

export EVIDENCE

.PHONY: help setup demo chat test evidence submit update grade test-strength stubs notebooks book hint lint bench measure doctor clean clean-all FORCE

help: ## List these commands
	@echo "The inference workbook. Commands, with what may be set after them:"
	@grep -E '^[a-z][a-z%-]*:.*## ' $(MAKEFILE_LIST) | sed -e 's/:.*## /|/' -e 's/^test-lab%/test-lab07/' \
	  | while IFS='|' read -r name text; do printf '  make %-16s %s\n' "$$name" "$$text"; done

# Runs again only when the dependencies change. `make setup` also looks after the model.
$(STAMP): pyproject.toml constraints.txt tools/bootstrap.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the PATH. Install Python 3.11 or later" \
	  "(Debian: sudo apt-get install python3 python3-venv) or name one: make setup PYTHON=/path/to/python"; exit 1; }
	@echo "[setup] $(STAMP) is missing or older than pyproject.toml, constraints.txt or tools/bootstrap.py"
	@$(PYTHON) tools/bootstrap.py
	@touch $@

setup: $(STAMP) ## Environment, dependencies and the bundled model; as root also the Debian packages
	@$(PY) -m labkit.checkpoints fetch

demo: setup ## The main job: the reference answers from a real model, then samples are graded [SAMPLES=all]
	@test "$(SAMPLES)" = quick -o "$(SAMPLES)" = all || { echo "SAMPLES=$(SAMPLES): allowed are quick and all"; exit 2; }
	@$(PY) -m solutions.demo
	@rm -rf .out/samples-$(SAMPLES)
	@$(PY) -m grader samples --lab 07 --out .out/samples-$(SAMPLES) $(if $(filter quick,$(SAMPLES)),--quick)
	@# Exit code 3 says that some submissions need a person; the hostile samples do, and that is no failure here.
	@$(PY) -m grader grade --lab 07 --submissions .out/samples-$(SAMPLES) --out .out/grades || test $$? -eq 3

chat: setup ## Talk to the engine; on your own code where it is written with IMPL=labs [MODEL=name]
	@ENGINE_IMPL=$(if $(filter command environment,$(firstword $(origin IMPL))),$(IMPL),solutions) \
	  $(PY) -m solutions.engine chat $(if $(MODEL),--model "$(MODEL)")

test: setup ## Every test: the workbook's own, the labs on the reference, compiled kernels, and the self-check [WORKERS=2]
	@# Two threads in each of two processes would wait for each other more than they compute.
	OMP_NUM_THREADS=1 $(PYTEST) tests -q -n $(WORKERS) --dist loadfile
	$(PY) -m labkit.instruments.compiled --lab 06 --impl solutions --faults --cards 120
	@# Runs the suite of every lab on the reference, and on untouched stubs.
	$(PY) -m grader self-check

evidence: setup ## The long proofs with fresh seeds, and the strength of every lab [EVIDENCE=quick] [WORKERS=2]
	@# Test by test goes to whichever process is free.
	OMP_NUM_THREADS=1 $(PYTEST) tests -v -m evidence -n $(WORKERS) --dist loadgroup --durations 10
	$(PY) -m labkit.instruments.compiled --lab 06 --impl solutions --faults
	$(if $(filter quick,$(EVIDENCE)),@echo "quick form: the strength run was left out",$(PY) -m grader strength)

test-lab%: setup FORCE ## The tests of a lab on your own code [TASK=n] [IMPL=solutions|folder] [TRUST=1] [COMPILE=1]
	@tests=$$(ls -d labs/$*_*/tests 2>/dev/null) || { echo "there is no lab $*; labs here:" labs/*_*; exit 2; }; \
	options=(--impl "$(IMPL)" $(if $(TASK),--task "$(TASK)") $(if $(TRUST),--trust)); \
	$(PYTEST) "$$tests" -q -rN "$${options[@]}"; \
	if $(PY) -m labkit.native "$*"; then TRITON_INTERPRET=0 $(PYTEST) "$$tests" -q -rs "$${options[@]}"; fi; \
	$(if $(COMPILE),$(PY) -m labkit.instruments.compiled --lab "$*" "$${options[@]}")

submit: setup ## Test your files of a lab, then pack them to hand in: LAB=07 [NAME=ada]
	@$(PY) -m labkit.submission --lab "$(LAB)" $(if $(NAME),--name "$(NAME)")

update: $(STAMP) ## Bring the course's news here; your edits are merged and never lost
	@$(PY) -m grader update

grade: $(STAMP) ## Grade a folder of submissions in the sandbox: LAB=07 SUBMISSIONS=dir [OUT=dir]
	@test -n "$(SUBMISSIONS)" || { echo "name the folder of submissions: make grade LAB=07 SUBMISSIONS=dir OUT=dir"; \
	  exit 2; }
	@$(PY) -m grader grade --lab "$(LAB)" --submissions "$(SUBMISSIONS)" --out "$(OUT)"

test-strength: $(STAMP) ## Whether the tests of a lab kill every known wrong implementation [LAB=07]
	@$(PY) -m grader strength --lab "$(LAB)"

stubs: $(STAMP) ## Write the student's files anew from the marked reference; keeps edited ones [LAB=07]
	@$(PY) -m grader stubs --lab "$(LAB)"

notebooks: setup ## Execute the notebooks anew, from a clean kernel on the reference [LAB=07] [NOTEBOOK=01]
	@$(PY) -m labkit.notebook $(if $(filter command line,$(origin LAB)),--lab "$(LAB)") \
	  $(if $(NOTEBOOK),--module "$(NOTEBOOK)")

book: $(STAMP) ## One site from handouts, notebooks and code, with search: .out/book/html/index.html
	@$(PY) -m book

hint: $(STAMP) ## A hint of a task, from a nudge to nearly the answer: TASK=n [LEVEL=1|2|3] [LAB=07]
	@test -n "$(TASK)" || { echo "name the task: make hint LAB=07 TASK=4"; exit 2; }
	@$(PY) -m grader hint "$(LAB)" "$(TASK)" --level "$(LEVEL)"

lint: $(STAMP) ## Style, types, the direction of imports, and the pair of torch and triton pins
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(IMPORT_LINTER)
	$(PY) tools/check_pins.py

bench: setup ## The reference beside transformers, the server beside llama.cpp's, kernels beside torch's: ratios with spread
	@$(PY) -m benchmarks.decode_beside_transformers
	@$(PY) -m benchmarks.speculative
	@$(PY) -m benchmarks.kernels --quick
	@$(PY) -m benchmarks.serving --quick
	@$(PY) -m benchmarks.engine_costs --quick

measure: setup ## What this machine can do at most: bandwidth, products, launches [DEVICE=cpu] [PLOT=roof.png]
	@$(PY) tools/measure_gpu.py $(if $(DEVICE),--device "$(DEVICE)") $(if $(PLOT),--plot "$(PLOT)")

# Needs no environment, since it is what to ask when setting up fails.
doctor: ## What this machine has, what it lacks, and what to do about each
	@if [ -x $(PY) ]; then $(PY) -m labkit.doctor; else $(PYTHON) -m labkit.doctor; fi

clean: ## Remove caches and what runs have written; keeps the environment, the model and your work
	rm -rf .out build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

clean-all: clean ## The same, and the environment and the model cache
	rm -rf .venv .cache
