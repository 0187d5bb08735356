#!/usr/bin/env bash
# All checks: linter, types, tests.
#
#   bash tests/run.sh [arguments for pytest]
#
#   bash tests/run.sh                       # everything
#   bash tests/run.sh tests/ops -k store    # a part of the tests; paths from the checkout's top
#   bash tests/run.sh -n 0                  # in one process, for a debugger; else one a core
#
# It sets up an environment on the first run (minutes, mostly downloads) and finds it ready
# afterwards. All three checks run even if one fails. Fails if any of them does.
# Environment variables: PYTHON, VENV, TORCH_INDEX_URL, ASCEND_KV_CPU_LEVEL; see
# tools/setup_env.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help "${BASH_SOURCE[0]}"
  exit
fi

setup_env dev
cd "$ROOT"
failed=()

say "ruff check"
"$VENV/bin/python" -m ruff check . >&2 || failed+=(ruff)

say "mypy"
"$VENV/bin/python" -m mypy >&2 || failed+=(mypy)

say "pytest $*"
"$VENV/bin/python" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@" || failed+=(pytest)

if [[ ${#failed[@]} -gt 0 ]]; then
  say "failed: ${failed[*]}"
  exit 1
fi
