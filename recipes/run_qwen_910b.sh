#!/usr/bin/env bash
# The main job: a real model on a paged, quantized KV cache, measured side by side.
#
#   bash recipes/run_qwen_910b.sh [arguments for `ascend-kv bench`]
#
#   bash recipes/run_qwen_910b.sh                          # NPU if there is one, else CPU
#   bash recipes/run_qwen_910b.sh --quick                  # the short version
#   bash recipes/run_qwen_910b.sh --model DIR|ID|FILE.gguf # a model of your own
#
# It sets up an environment on the first run (minutes, mostly downloads) and finds it ready
# afterwards, then runs recipes/qwen_910b.yaml, in which every key is explained.
# Environment variables: PYTHON, VENV, TORCH_INDEX_URL, ASCEND_KV_CPU_LEVEL; see
# tools/setup_env.sh.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tools/setup_env.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help "${BASH_SOURCE[0]}"
  exit
fi

setup_env
say "ascend-kv bench $ROOT/recipes/qwen_910b.yaml $*"
exec "$VENV/bin/ascend-kv" bench "$ROOT/recipes/qwen_910b.yaml" "$@"
