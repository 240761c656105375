# Every target sets up what it needs on a machine with Python 3.11 and g++: see `make help`.
# Environments are in .venvs/; the stamps in .venvs/*/.stamps/ say how far each one is set up.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help

KERAS_ENVS := keras2 keras3
ALL_ENVS := $(KERAS_ENVS) tf221 protobuf7

# ENV and ARGS count only on make's command line: a machine may have variables of these names for other purposes.
ifneq ($(origin ENV),command line)
ENV :=
endif
ifneq ($(origin ARGS),command line)
ARGS :=
endif
unexport ENV ARGS
ifneq ($(filter-out $(ALL_ENVS),$(ENV)),)
$(error ENV=$(ENV): expected one of $(ALL_ENVS))
endif
DEMO_ENV := $(or $(ENV),keras2)
NP ?= 2

TF_CPP_MIN_LOG_LEVEL ?= 3
export TF_CPP_MIN_LOG_LEVEL
# Tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# A program that calls make itself, as Horovod's build may, must not take this make's options and job server for its own.
NO_MAKE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL

LINT_BIN := .venvs/keras2/bin
FIND_CXX := find . \( -name '.?*' -o -name build -o -name dist \) -prune -o \
  -type f \( -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' \) -print0

.PHONY: help
help: ## this list
	@awk -F ':[^#]*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile
	echo
	echo 'make test ENV=keras3         pytest in that environment only (keras2, keras3, tf221, protobuf7), no lint'
	echo 'make test ARGS="-k window"   with these arguments for pytest, in keras2 and keras3 (or ENV), no lint'
	echo 'make demo NP=3 ARGS="..."     another number of ranks, arguments for the script'
	echo 'make resume-check ENV=keras3 ARGS="--seed 1"   in that environment only, arguments for the script'
	echo 'make bench ENV=keras3 ARGS="--ranks 2"   in that environment, arguments for the suite; so the other bench-...'
	echo 'PYTHON=/path/to/python3.11 names the Python for new environments; `rm -r .venvs` removes all of them.'

# --- environments -----------------------------------------------------------------------------------------------------

.PHONY: env-keras2 env-keras3 env-tf221 env-protobuf7
env-keras2: .venvs/keras2/.stamps/project ## TensorFlow 2.15, Keras 2, Horovod; lint, mypy and protoc are here too
env-keras3: .venvs/keras3/.stamps/project ## TensorFlow 2.18, Keras 3, Horovod
env-tf221: .venvs/tf221/.stamps/project ## TensorFlow 2.21, Keras 3, no Horovod
env-protobuf7: .venvs/protobuf7/.stamps/packages ## Protobuf 7, gRPC and pytest only

# Shell: with $venv set, make sure that a Python 3.11 environment is there.
define make_venv
is_311() { "$$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }
if ! is_311 "$$venv/bin/python" || ! [ -x "$$venv/bin/pip" ]; then
  python=
  for candidate in $(or $(PYTHON),python3.11 python3); do
    if is_311 "$$candidate"; then python=$$candidate; break; fi
  done
  if [ -z "$$python" ]; then
    echo "kerasfeed's environments need Python 3.11, with the venv module. Tried:" >&2
    for candidate in $(or $(PYTHON),python3.11 python3); do
      echo "  $$candidate: $$("$$candidate" --version 2>&1 | head -n 1 || true)" >&2
    done
    echo "Install Python 3.11, or name one: make PYTHON=/path/to/python3.11 ..." >&2
    exit 1
  fi
  echo "== $$venv: new environment with $$("$$python" --version)"
  rm -rf "$$venv"
  "$$python" -m venv "$$venv"
fi
endef

# The requirements files are exact and complete: pip has nothing to resolve, and `pip check` says whether that is so.
define install_packages
@venv=.venvs/$*
$(make_venv)
echo "== $$venv: packages of $(filter requirements/%,$^)"
"$$venv/bin/python" -m pip install --quiet --no-deps $(patsubst %,-r %,$(filter requirements/%,$^))
# The project asks for tensorflow, which tensorflow-cpu is not for pip. It is installed anew after this.
[ $* != tf221 ] || "$$venv/bin/python" -m pip uninstall -qq --yes kerasfeed
"$$venv/bin/python" -m pip check
mkdir -p $(@D)
touch $@
endef

$(patsubst %,.venvs/%/.stamps/packages,$(KERAS_ENVS) tf221): .venvs/%/.stamps/packages: requirements/%.txt requirements/build.txt
	$(install_packages)

.venvs/protobuf7/.stamps/packages: .venvs/%/.stamps/packages: requirements/%.txt
	$(install_packages)

# Horovod is built against the TensorFlow of its environment. pip's cache would hand a wheel that was built against one
# TensorFlow to the other: hence --no-cache-dir. The stamp holds what the build depends on, so that a change of other
# pins costs no build.
HOROVOD_BUILD := HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO

$(KERAS_ENVS:%=.venvs/%/.stamps/horovod): .venvs/%/.stamps/horovod: .venvs/%/.stamps/packages requirements/horovod.txt
	@venv=.venvs/$*
	horovod_works() { TF_CPP_MIN_LOG_LEVEL=3 "$$venv/bin/python" -c 'import horovod.tensorflow as hvd; hvd.init()'; }
	built_for=$$(grep -hE '^(horovod|tensorflow)==' requirements/horovod.txt requirements/$*.txt | paste -sd ' ')
	if [ "$$(cat $@ 2>/dev/null)" = "$$built_for" ] && horovod_works; then
	  touch $@
	  exit 0
	fi
	command -v g++ >/dev/null || { echo "Horovod's build needs g++, which is not in PATH." >&2; exit 1; }
	echo "== $$venv: building $$built_for (some 3 minutes)"
	PATH="$$PWD/$$venv/bin:$$PATH" $(NO_MAKE) $(HOROVOD_BUILD) "$$venv/bin/python" -m pip install --quiet \
	  --no-build-isolation --no-cache-dir --no-deps --force-reinstall -r requirements/horovod.txt
	horovod_works
	echo "$$built_for" > $@

define install_project
@.venvs/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
touch $@
endef

$(KERAS_ENVS:%=.venvs/%/.stamps/project): .venvs/%/.stamps/project: .venvs/%/.stamps/horovod setup.py pyproject.toml
	$(install_project)

.venvs/tf221/.stamps/project: .venvs/%/.stamps/project: .venvs/%/.stamps/packages setup.py pyproject.toml
	$(install_project)

# What only `make bench` needs: its plot.
$(KERAS_ENVS:%=.venvs/%/.stamps/bench): .venvs/%/.stamps/bench: requirements/bench.txt .venvs/%/.stamps/project
	$(install_packages)

# --- tests and lint ---------------------------------------------------------------------------------------------------

# What a newer TensorFlow may break: the native engine, and how Keras takes what it feeds.
TF221_TESTS := tests/tf221 $(wildcard tests/unit/test_native_*.py) tests/integration/test_fit.py

TEST_ENVS := $(or $(ENV),$(if $(ARGS),$(KERAS_ENVS),$(ALL_ENVS)))

# Shell: a function that runs every linter, then fails if one did. mypy sees the package as it is installed, with
# callbacks/ inside kerasfeed/.
define lint_function
lint() {
local lint_failed=()
$(LINT_BIN)/ruff check . || lint_failed+=("ruff check")
$(LINT_BIN)/ruff format --check . || lint_failed+=("ruff format")
mkdir -p .build/typecheck/kerasfeed
for entry in kerasfeed/* callbacks; do ln -sfn "../../../$$entry" .build/typecheck/kerasfeed/; done
find -L .build/typecheck/kerasfeed -maxdepth 1 -type l -delete
(cd .build/typecheck && ../../$(LINT_BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache kerasfeed) |
  sed 's,^kerasfeed/callbacks/,callbacks/,' || lint_failed+=("mypy")
$(FIND_CXX) | xargs -0 -r $(LINT_BIN)/clang-format --dry-run -Werror || lint_failed+=("clang-format")
if (($${#lint_failed[@]})); then printf 'lint: %s failed\n' "$${lint_failed[@]}" >&2; fi
((! $${#lint_failed[@]}))
}
endef

# Shell: builds the native engine for the TensorFlow of $$env, if it is not built yet. Where it can't be, its tests say so.
build_engine = .venvs/$$env/bin/python -c 'from kerasfeed.native import build; build.library()' || true

.PHONY: test
test: $(TEST_ENVS:%=env-%) ## all tests in all environments, then lint; runs on after a failure
	@$(lint_function)
	failed=() jobs=()
	mkdir -p .build
	trap 'kill "$${jobs[@]}" 2>/dev/null || true' EXIT
	# Before tests with timeouts need it.
	for env in $(filter-out protobuf7,$(TEST_ENVS)); do $(build_engine); done
	run() {  # the tests of one environment
	  local env=$$1 options=()
	  : >".build/pytest-$$env.log"  # the reader below must not see the last run's
	  # No project settings, no conftest.py from above: those are for environments with TensorFlow and the plug-ins.
	  if [ "$$env" = protobuf7 ]; then
	    options=(-c /dev/null --rootdir . --confcutdir tests/protobuf7 -p no:cacheprovider tests/protobuf7)
	  elif [ "$$env" = tf221 ]; then
	    options=($(TF221_TESTS))
	  fi
	  PATH="$$PWD/.venvs/$$env/bin:$$PATH" $(NO_MAKE) .venvs/$$env/bin/python -m pytest "$${options[@]}" $(ARGS) \
	    >".build/pytest-$$env.log" 2>&1 </dev/null & jobs+=($$!)
	}
	show() {  # what the first job prints, as it prints it
	  echo "== pytest in $$1"
	  tail -n +1 -f --pid="$${jobs[0]}" ".build/pytest-$$1.log"
	  wait "$${jobs[0]}" || failed+=("$$1")
	  jobs=("$${jobs[@]:1}")
	}
	$(if $(ENV)$(ARGS),,lint >.build/lint.log 2>&1 & lint_job=$$!)
	# Side by side: much of a run is waiting for processes to start. Compilers and sanitizers come when that is over.
	for env in $(filter-out tf221,$(TEST_ENVS)); do run "$$env"; done
	for env in $(filter-out tf221,$(TEST_ENVS)); do show "$$env"; done
	for env in $(filter tf221,$(TEST_ENVS)); do run "$$env"; done
	$(if $(ENV)$(ARGS),,echo "== native"; $(NO_MAKE) $(MAKE) --no-print-directory -k test-native test-ops || failed+=(native))
	for env in $(filter tf221,$(TEST_ENVS)); do show "$$env"; done
	$(if $(ENV)$(ARGS),,echo "== lint"; wait "$$lint_job" || failed+=(lint); cat .build/lint.log)
	if (($${#failed[@]})); then echo "make test: failed: $${failed[*]}" >&2; exit 1; fi
	echo "make test: passed: $(TEST_ENVS)$(if $(ENV)$(ARGS),, native lint)"

# The engine's core and its tests, compiled once for each sanitizer.
NATIVE_SOURCES := $(wildcard kerasfeed/native/core/*.cc tests/native/*.cc)
NATIVE_FLAGS := -std=c++17 -O1 -g -pthread -Wall -Wextra -Werror -Ikerasfeed/native -Itests/native
NATIVE_SANITIZERS := address,undefined thread
NATIVE_TESTS := $(NATIVE_SANITIZERS:%=.build/native/%/all-tests)

.PHONY: test-native
test-native: $(NATIVE_TESTS) ## the native engine's core, under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer
	@failed=()
	for sanitizer in $(NATIVE_SANITIZERS); do
	  echo "== $$sanitizer"
	  .build/native/$$sanitizer/all-tests $(ARGS) || failed+=("$$sanitizer")
	done
	if (($${#failed[@]})); then echo "make test-native: failed: $${failed[*]}" >&2; exit 1; fi

define native_rules
.build/native/$(1)/%.o: %.cc
	@mkdir -p $$(@D)
	$$(or $$(CXX),g++) $$(NATIVE_FLAGS) -fsanitize=$(1) -fno-sanitize-recover=all -MMD -c $$< -o $$@
.build/native/$(1)/all-tests: $(NATIVE_SOURCES:%.cc=.build/native/$(1)/%.o)
	@$$(or $$(CXX),g++) -pthread -fsanitize=$(1) $$^ -o $$@
-include $(NATIVE_SOURCES:%.cc=.build/native/$(1)/%.d)
endef
$(foreach sanitizer,$(NATIVE_SANITIZERS),$(eval $(call native_rules,$(sanitizer))))

# The whole engine under AddressSanitizer, in a Python and a TensorFlow that know nothing of it: so it comes first, with
# the library whose exceptions it watches. Leaks are Python's by the thousand.
OPS_ENV := $(or $(filter keras2 keras3 tf221,$(ENV)),keras3)
OPS_TESTS := tests/unit/test_native_ops.py

.PHONY: test-ops
test-ops: env-$(OPS_ENV) ## the native engine's TensorFlow ops, under AddressSanitizer
	@export KERASFEED_ENGINE=native KERASFEED_SANITIZE=address KERASFEED_CACHE="$$PWD/.build/sanitized"
	echo "== ops"
	python=.venvs/$(OPS_ENV)/bin/python
	"$$python" -c 'from kerasfeed.native import build; build.library()'
	LD_PRELOAD="$$($(or $(CXX),g++) -print-file-name=libasan.so) $$($(or $(CXX),g++) -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0 $(NO_MAKE) "$$python" -m pytest -p no:cacheprovider $(OPS_TESTS) $(ARGS)

.PHONY: lint
lint: .venvs/keras2/.stamps/packages ## ruff, mypy --strict, clang-format: says what is wrong, changes nothing
	@$(lint_function)
	lint || exit 1

.PHONY: format
format: .venvs/keras2/.stamps/packages ## let ruff and clang-format put the code in order
	@$(LINT_BIN)/ruff check --fix --exit-zero .
	$(LINT_BIN)/ruff format .
	$(FIND_CXX) | xargs -0 -r $(LINT_BIN)/clang-format -i

# --- the rest ---------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(if $(filter $(KERAS_ENVS),$(DEMO_ENV)),env-$(DEMO_ENV)) ## train examples/digits.py on two ranks; ENV=keras3: on Keras 3
	@if [ -z "$(filter $(KERAS_ENVS),$(DEMO_ENV))" ]; then
	  echo "make demo: ENV must be one of: $(KERAS_ENVS), which have Horovod. Received: $(DEMO_ENV)" >&2
	  exit 1
	fi
	bin="$$PWD/.venvs/$(DEMO_ENV)/bin"
	PATH="$$bin:$$PATH" $(NO_MAKE) "$$bin/horovodrun" --gloo -np $(NP) "$$bin/python" examples/digits.py $(ARGS) |
	  sed -u 's/^\[0\]<stdout>://'  # what rank 0 prints, as it prints it

ENGINES := $(or $(ENGINE),native python)
RESUME_ENVS := $(filter $(KERAS_ENVS),$(or $(ENV),$(KERAS_ENVS)))

.PHONY: resume-check
resume-check: $(RESUME_ENVS:%=env-%) ## kill a training again and again: it must end with the same bits (3 minutes for each environment and engine)
	@$(if $(RESUME_ENVS),,echo "make resume-check: ENV=$(ENV): expected one of $(KERAS_ENVS)" >&2; exit 1)
	failed=()
	for env in $(RESUME_ENVS); do
	  for engine in $(ENGINES); do
	    echo "== resume-check in $$env, with the $$engine engine"
	    KERASFEED_ENGINE="$$engine" $(NO_MAKE) ".venvs/$$env/bin/python" benchmarks/resume_check.py $(ARGS) ||
	      failed+=("$$env/$$engine")
	  done
	done
	if (($${#failed[@]})); then echo "make resume-check: failed: $${failed[*]}" >&2; exit 1; fi

BENCH_ENV := $(or $(ENV),keras2)

.PHONY: bench bench-memory bench-backup bench-digests
bench: BENCHMARK := -m benchmarks.suite
bench: $(patsubst %,.venvs/%/.stamps/bench,$(filter $(KERAS_ENVS),$(BENCH_ENV))) ## feed ranks by kerasfeed and by what else there is, into benchmarks/results/ (under 15 minutes)
bench-memory: BENCHMARK := benchmarks/memory_growth.py
bench-memory: $(filter env-keras%,env-$(BENCH_ENV)) ## whether memory grows over 100,000 elements of varied size
bench-backup: BENCHMARK := benchmarks/backup_cost.py
bench-backup: $(filter env-keras%,env-$(BENCH_ENV)) ## what a backup adds to Keras's own saving of weights
bench-digests: BENCHMARK := benchmarks/digest_cost.py
bench-digests: $(filter env-keras%,env-$(BENCH_ENV)) ## what the digest of an element costs, beside copying the element
bench bench-memory bench-backup bench-digests:
	@$(if $(filter $(KERAS_ENVS),$(BENCH_ENV)),,echo "make $@: ENV=$(ENV): expected one of $(KERAS_ENVS)" >&2; exit 1)
	PATH="$$PWD/.venvs/$(BENCH_ENV)/bin:$$PATH" $(NO_MAKE) ".venvs/$(BENCH_ENV)/bin/python" $(BENCHMARK) $(ARGS)

.PHONY: proto
proto: .venvs/keras2/.stamps/packages ## generate kerasfeed/proto/feed_pb2.py and .pyi from feed.proto
	@.venvs/keras2/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. kerasfeed/proto/feed.proto

.PHONY: clean
clean: ## remove what was built and cached, but for the environments
	@rm -rf .build .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name .venvs -prune -o -type d -name __pycache__ -print0 | xargs -0 -r rm -rf
