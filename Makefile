# `make pretrain` trains a model and `make test` checks the code; both first set up the environment in VENV.
# `make help` lists the targets. For another training, set CONFIG (a config file) and RANKS (the number of ranks).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/demo_cpu.yaml
RANKS ?= 2
CLUSTER_TESTS ?= tests/cluster
SEED ?= 1
WORKERS ?= 4
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
export OMP_NUM_THREADS ?= 1

.PHONY: pretrain check test pytest test-long cluster-test drills fuzz kill-matrix chaos faults campaign bench gpu-rehearsal matrix docs lint typecheck clean help docs/config.md

help:
	@echo "make pretrain       set up, build the demo corpus, train, report and export; resumes if it is run again"
	@echo "make check          check style, types and the tests of what changed since the last commit (70 s)"
	@echo "make test           set up, then check style and types and run all tests"
	@echo "make test-long      run the tests that take too long for make test (about half an hour)"
	@echo "make cluster-test   test with a real Slurm cluster and real ssh hosts on this machine (root, Linux; minutes)"
	@echo "make drills         run long series of kills, damaged files and S3 faults (docs/drills.md; about half an hour)"
	@echo "make fuzz           damage every file that is read, 50,000 times, and judge how what reads it ends (docs/drills.md)"
	@echo "make kill-matrix    kill a short run at every change of a file or an object in turn (docs/drills.md)"
	@echo "make chaos          compare a run with 60 random faults with an uninterrupted one (about 20 minutes)"
	@echo "make faults         hit one run with 2,000 random faults (more than an hour; COUNT=500 makes fewer)"
	@echo "make campaign       interrupt runs with random configs, and compare each with its twin (SECONDS=600 SEED=1)"
	@echo "make gpu-rehearsal  train on a pretended GPU and compare launches, copies and waits with the record (docs/gpu.md)"
	@echo "make bench          run all CPU benchmarks and rewrite the table in docs/results.md (under 15 minutes)"
	@echo "make matrix         run all tests with every supported Python and torch (20 minutes and 6 GB each)"
	@echo "make docs           build the documentation as a web site in site/"
	@echo "make clean          remove build products (keeps runs/ and corpora/)"

# torch is installed first and alone, so that pip finds its requirement met and never replaces an installed torch.
$(VENV)/ready: setup.py constraints.txt kernels/electra_kernels/native/cpu_library.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[finetune]'
	touch $@

$(VENV)/ready-test: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[finetune,test]'
	touch $@

# The demo corpus is text of the Python installation itself (docstrings and pydoc topics), so it needs no network.
corpora/demo/corpus.json: | $(VENV)/ready
	$(BIN)/python examples/python_docs.py --output corpora/demo-text
	$(BIN)/electra-dist corpus build --input corpora/demo-text --output corpora/demo --config configs/demo_cpu.yaml

pretrain: $(VENV)/ready $(if $(findstring demo,$(CONFIG)),corpora/demo/corpus.json)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deepspeed --num_gpus $(RANKS) launcher/pretrain.py --config $(CONFIG)
	$(BIN)/electra-dist export $$($(BIN)/electra-dist resolve $(CONFIG) | sed -n 's/^run_dir: //p')

lint: $(VENV)/ready-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: $(VENV)/ready-test
	$(BIN)/mypy -p electra_dist -p electra_launcher -p electra_kernels

check: $(VENV)/ready-test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/support/check.py $(if $(SECONDS),--seconds $(SECONDS))

# Style is checked first, because it takes seconds. Then types are checked while the tests run, WORKERS files at a time:
# four for two cores, because tests that start processes or use a store often wait.
test: lint
	$(MAKE) -j2 typecheck pytest

pytest: $(VENV)/ready-test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

# What the tests with the marker `drill` check has a shorter test in `make test`.
test-long: $(VENV)/ready-test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "drill or sample"

cluster-test: $(VENV)/ready-test
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -m cluster -s $(CLUSTER_TESTS)

# Each drill ends with a table and fails if one of its lines failed. docs/drills.md describes what each one proves.
drills: test-long
	$(BIN)/python tests/drills/damages.py --seed 1 --count 500
	$(BIN)/python tests/drills/s3_faults.py --seed 1 --faults 2000
	$(BIN)/python tests/drills/s3_ways.py
	$(BIN)/python tests/drills/clock_jumps.py
	$(BIN)/python tests/drills/reasons.py
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/drills/mutants.py

# 500 of the cases are processes of their own. Each kind of fault is printed once, with the damage that repeats it.
fuzz: $(VENV)/ready-test
	$(BIN)/python tests/fuzz/campaign.py --cases 49500 --processes 500

kill-matrix: $(VENV)/ready-test
	$(BIN)/python tests/drills/kill_matrix

chaos: $(VENV)/ready-test
	$(BIN)/python tests/drills/chaos_drill.py --count 60 --seed 1

faults: $(VENV)/ready-test
	$(BIN)/python tests/drills/faults --count $(or $(COUNT),2000) --results benchmarks/results/faults.json

# A fault is printed with the command that repeats its case.
campaign: $(VENV)/ready-test
	$(BIN)/python tests/drills/campaign --seconds $(or $(SECONDS),600) --seed $(SEED)

# The first call installs torch's CUDA build, 4.5 GB, below build/. It needs g++.
gpu-rehearsal: $(VENV)/ready-test
	$(BIN)/python tests/pretended_gpu/drill.py

# The benchmarks run one after another; run nothing else on the machine meanwhile. Of the libraries that they measure,
# all except transformers and webdataset are in the extra `bench`, which this target does not install, because they pin
# other packages.
bench: $(VENV)/ready-test
	$(BIN)/python benchmarks/run.py step head loader shard_cache corpus_builder checkpoint restart --save

# The interpreters must be on the PATH, as python3.11 and so on.
matrix: $(VENV)/ready-test
	$(BIN)/pip install --quiet --disable-pip-version-check nox
	$(BIN)/nox

docs/config.md: $(VENV)/ready
	$(BIN)/python -m electra_dist.config.reference > $@

# --strict fails on a broken link or an unknown name.
docs: docs/config.md
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --strict
	@echo "site/index.html"

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
