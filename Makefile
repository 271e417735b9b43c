# make demo      set up .venv and train a small network on real images
# make test      set up .venv and run the tests; make gpu-test: those that need a GPU
# make bench     time the convolutions on this GPU beside XLA and PyTorch; SUITE=membound: other ops, SUITE=models: training
# make build     every CUDA kernel into jaxprims/_cuda.so (needs nvcc, no GPU)
# make notebooks run the notebooks and write their outputs into them
# make lint      ruff and pyright
# make check     what CI runs (.ci/run)
# make clean     remove .venv and everything built
#
# PYTHON=<interpreter> instead of the first Python >= 3.11 found, VENV=<folder> instead of .venv,
# EXTRAS=<names> instead of what the machine asks for, ARGS=<arguments of the demo, of pytest or of bench>.
.DEFAULT_GOAL := help
VENV ?= .venv
EXTRAS ?= auto
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
OLDEST_JAXLIB := 0.10.0
FFI_INCLUDE ?= $(CURDIR)/build/jaxlib/jaxlib/include
SOURCES := $(wildcard cuda/*/*.cu cuda/*/*.h cuda/*/*.cuh)

.PHONY: help demo test gpu-test bench build notebooks lint check clean
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -n 11

demo: $(VENV)/.done
	$(BIN)/python -m jaxprims demo $(ARGS)

test: $(VENV)/.done
	$(BIN)/python -m pytest -n auto -m "not gpu" -q $(ARGS)

gpu-test: $(VENV)/.done
	JAXPRIMS_REQUIRE_CUDA=1 $(BIN)/python -m pytest -m gpu -q $(ARGS)

SUITE ?= conv
bench: $(VENV)/.done
	$(BIN)/python -m jaxprims bench $(SUITE) $(ARGS)

# Made again when an input of the build has changed.
$(VENV)/.done: pyproject.toml CMakeLists.txt $(SOURCES)
	@sh .ci/setup "$(VENV)" "$(EXTRAS)" $(PYTHON)
	@touch $@

# For the release architectures, in place, incremental. A register spill is an error. Built on the headers of the oldest
# supported jaxlib, so that every supported version takes the library.
build: $(FFI_INCLUDE)/xla/ffi/api/ffi.h
	cmake -S . -B build/cmake -G Ninja -DJAXPRIMS_CUDA=ON -DJAXPRIMS_SPILLS_FAIL=ON \
	  -DJAXPRIMS_CUDA_ARCHS="$(JAXPRIMS_CUDA_ARCHS)" -DJAXPRIMS_FFI_INCLUDE="$(FFI_INCLUDE)" $(CMAKE_ARGS)
	cmake --build build/cmake --parallel $(JOBS)

$(CURDIR)/build/jaxlib/jaxlib/include/xla/ffi/api/ffi.h:
	"$$(sh .ci/python $(PYTHON))" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target build/jaxlib jaxlib==$(OLDEST_JAXLIB)
	@touch $@

notebooks: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[notebooks]"
	$(BIN)/python notebooks/run.py $(ARGS)

lint: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[lint]"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

check:
	bash .ci/run

clean:
	rm -rf build "$(VENV)" jaxprims/_cuda.so
