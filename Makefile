# `make demo` and `make test` set everything up by themselves; nothing else needs to be typed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := train,track,text,vision,dna,data,hub,hf,lm-eval,entmax,docs,test
# `make gpu GPU_PYTHON=python3 MINUTES=8 GPU_OUT=out` measures with a Python of your own, and stops in time.
GPU_PYTHON ?= $(BIN)/python
MINUTES    ?= 45
GPU_OUT    ?= benchmarks/gpu
# Test processes, one thread each: one more than two cores, as some wait for files and for processes of their own. They take
# tests that follow each other, so that few fixtures are made twice.
JOBS       ?= 3
# The oldest Triton that is served and the newest, in front of the environment's own. The older interpreter needs an older numpy.
TRITON_OLD := build/triton-3.6.0
TRITON_NEW := build/triton-3.9.0
WITH_OLD   := PYTHONPATH=$(TRITON_OLD) $(BIN)/python
WITH_NEW   := PYTHONPATH=$(TRITON_NEW) TRITON_DEFAULT_FP_FUSION=1 $(BIN)/python

.PHONY: setup demo test suite test-fast lint docs kernels bench gpu weights clean

setup: $(VENV)/.ready

# A finished environment leaves a mark; an interrupted one does not and is made again.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

demo: setup  ## train two methods, measure them beyond the training length, draw the plot
	$(BIN)/python tools/demo.py

test: setup  ## everything: style and types, the site, and the suite, side by side
	$(MAKE) --jobs 3 lint docs suite

suite: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-fast: setup  ## without the tests that launch processes, train, or interpret kernels for seconds
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

lint: setup  ## style, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.py' '*.md' | xargs $(BIN)/codespell
	git ls-files ':!*.safetensors' | xargs $(BIN)/check-added-large-files --enforce-all --maxkb=2000
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_use.py

docs: setup  ## the site, in build/site; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build/triton-%/.ready: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) triton==$* "numpy<2.4"
	@touch $@

kernels: setup $(TRITON_OLD)/.ready $(TRITON_NEW)/.ready  ## every Triton kernel compiled for compute capability 9.0, by three versions: half an hour
	$(BIN)/python tools/compile_kernels.py
	$(WITH_NEW) tools/compile_kernels.py --lenient
	$(WITH_OLD) tools/compile_kernels.py --lenient
	$(WITH_OLD) -m pytest -n 0 -m "not slow" tests/gpu tests/zoo/test_triton_operators.py

bench: setup  ## attention on this machine, as ratios to plain attention
	$(BIN)/python tools/bench.py attention

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)  ## on CUDA: doctor, kernels' tests, a profiled step, benchmarks
	$(GPU_PYTHON) tools/gpu.py --minutes $(MINUTES) --out $(GPU_OUT)

# Letters of `vision` are drawn by version 0.5.0; `scenes` needs `python -m tools.offline scenes`.
weights: setup  ## train every shipped tiny model of text and DNA again, publish and measure it
	$(BIN)/python -m tools.offline sotu genomes
	set -e; for group in text dna; do for step in train publish measure; do $(BIN)/python tools/weights.py $$step $$group; done; done

clean:
	rm -rf $(VENV) build runs results
