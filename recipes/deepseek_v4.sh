#!/usr/bin/env bash
# DeepSeek-V4's compressed caches, on a small random model: bytes, requests, a long decode step.
#
#   bash recipes/deepseek_v4.sh
#
# It sets up an environment on the first run (minutes, mostly downloads) and finds it ready
# afterwards, then runs recipes/deepseek_v4.yaml, in which every key is explained, on the CPU.
# What the results mean: recipes/deepseek_v4.md.
# Environment variables: PYTHON, VENV, TORCH_INDEX_URL, ASCEND_KV_CPU_LEVEL; see
# tools/setup_env.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help "${BASH_SOURCE[0]}"
  exit
fi

setup_env
say "python $ROOT/tools/deepseek_v4.py $ROOT/recipes/deepseek_v4.yaml $*"
exec "$VENV/bin/python" "$ROOT/tools/deepseek_v4.py" "$ROOT/recipes/deepseek_v4.yaml" "$@"
