# Every target sets up what it needs on a machine with Python 3.11 and g++: see `make help`.
# Environments are in .venvs/; the stamps in .venvs/*/.stamps/ say how far each one is set up.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.SUFFIXES:
.DEFAULT_GOAL := help

KERAS_ENVS := keras2 keras3
ALL_ENVS := $(KERAS_ENVS) protobuf7

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
	echo 'make test ENV=keras3         pytest in that environment only (keras2, keras3, protobuf7), no lint'
	echo 'make test ARGS="-k window"   with these arguments for pytest, in keras2 and keras3 (or ENV), no lint'
	echo 'make demo NP=3 ARGS="..."     another number of ranks, arguments for the script'
	echo 'make resume-check ENV=keras3 ARGS="--seed 1"   in that environment only, arguments for the script'
	echo 'PYTHON=/path/to/python3.11 names the Python for new environments; `rm -r .venvs` removes all of them.'

# --- environments -----------------------------------------------------------------------------------------------------

.PHONY: env-keras2 env-keras3 env-protobuf7
env-keras2: .venvs/keras2/.stamps/project ## TensorFlow 2.15, Keras 2, Horovod; lint, mypy and protoc are here too
env-keras3: .venvs/keras3/.stamps/project ## TensorFlow 2.18, Keras 3, Horovod
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
"$$venv/bin/python" -m pip check
mkdir -p $(@D)
touch $@
endef

$(KERAS_ENVS:%=.venvs/%/.stamps/packages): .venvs/%/.stamps/packages: requirements/%.txt requirements/build.txt
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

$(KERAS_ENVS:%=.venvs/%/.stamps/project): .venvs/%/.stamps/project: .venvs/%/.stamps/horovod setup.py pyproject.toml
	@.venvs/$*/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# --- tests and lint ---------------------------------------------------------------------------------------------------

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

.PHONY: test
test: $(TEST_ENVS:%=env-%) ## all tests in all environments, then lint; runs on after a failure
	@$(lint_function)
	failed=() jobs=()
	mkdir -p .build
	trap 'kill "$${jobs[@]}" 2>/dev/null || true' EXIT
	# Side by side: much of a run is waiting for processes to start. The first one's output is shown as it comes.
	for env in $(TEST_ENVS); do
	  : >".build/pytest-$$env.log"  # the reader below must not see the last run's
	  options=()
	  # No project settings, no conftest.py from above: those are for environments with TensorFlow and the plug-ins.
	  if [ "$$env" = protobuf7 ]; then
	    options=(-c /dev/null --rootdir . --confcutdir tests/protobuf7 -p no:cacheprovider tests/protobuf7)
	  fi
	  PATH="$$PWD/.venvs/$$env/bin:$$PATH" $(NO_MAKE) .venvs/$$env/bin/python -m pytest "$${options[@]}" $(ARGS) \
	    >".build/pytest-$$env.log" 2>&1 </dev/null & jobs+=($$!)
	done
	$(if $(ENV)$(ARGS),,lint >.build/lint.log 2>&1 & lint_job=$$!)
	for env in $(TEST_ENVS); do
	  echo "== pytest in $$env"
	  tail -n +1 -f --pid="$${jobs[0]}" ".build/pytest-$$env.log"
	  wait "$${jobs[0]}" || failed+=("$$env")
	  jobs=("$${jobs[@]:1}")
	done
	$(if $(ENV)$(ARGS),,echo "== lint"; wait "$$lint_job" || failed+=(lint); cat .build/lint.log)
	if (($${#failed[@]})); then echo "make test: failed: $${failed[*]}" >&2; exit 1; fi
	echo "make test: passed: $(TEST_ENVS)$(if $(ENV)$(ARGS),, lint)"

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
demo: $(if $(filter keras2,$(DEMO_ENV)),env-keras2) ## train examples/digits.py on two ranks
	@if [ $(DEMO_ENV) != keras2 ]; then
	  echo "make demo: ENV=$(DEMO_ENV): the example uses Horovod's Keras callbacks, which need keras2" >&2
	  exit 1
	fi
	bin="$$PWD/.venvs/$(DEMO_ENV)/bin"
	PATH="$$bin:$$PATH" $(NO_MAKE) "$$bin/horovodrun" --gloo -np $(NP) "$$bin/python" examples/digits.py $(ARGS) |
	  sed -u 's/^\[0\]<stdout>://'  # what rank 0 prints, as it prints it

RESUME_ENVS := $(filter $(KERAS_ENVS),$(or $(ENV),$(KERAS_ENVS)))

.PHONY: resume-check
resume-check: $(RESUME_ENVS:%=env-%) ## kill a training again and again: it must end with the same bits (3 to 4 minutes for each environment)
	@$(if $(RESUME_ENVS),,echo "make resume-check: ENV=$(ENV): expected one of $(KERAS_ENVS)" >&2; exit 1)
	failed=()
	for env in $(RESUME_ENVS); do
	  echo "== resume-check in $$env"
	  $(NO_MAKE) ".venvs/$$env/bin/python" benchmarks/resume_check.py $(ARGS) || failed+=("$$env")
	done
	if (($${#failed[@]})); then echo "make resume-check: failed: $${failed[*]}" >&2; exit 1; fi

BENCH_ENV := $(or $(ENV),keras2)

.PHONY: bench bench-digests
bench: BENCHMARK := backup_cost.py
bench: $(filter env-keras%,env-$(BENCH_ENV)) ## what a backup adds to Keras's own saving of weights
bench-digests: BENCHMARK := digest_cost.py
bench-digests: $(filter env-keras%,env-$(BENCH_ENV)) ## what the digest of an element costs, beside copying the element
bench bench-digests:
	@$(if $(filter $(KERAS_ENVS),$(BENCH_ENV)),,echo "make $@: ENV=$(ENV): expected one of $(KERAS_ENVS)" >&2; exit 1)
	$(NO_MAKE) ".venvs/$(BENCH_ENV)/bin/python" benchmarks/$(BENCHMARK) $(ARGS)

.PHONY: proto
proto: .venvs/keras2/.stamps/packages ## generate kerasfeed/proto/feed_pb2.py and .pyi from feed.proto
	@.venvs/keras2/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. kerasfeed/proto/feed.proto

.PHONY: clean
clean: ## remove what was built and cached, but for the environments
	@rm -rf .build .cache build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name .venvs -prune -o -type d -name __pycache__ -print0 | xargs -0 -r rm -rf
