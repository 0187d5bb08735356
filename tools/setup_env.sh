# shellcheck shell=bash
# The environment in which recipes and tests run: made once, then found ready in a moment.
#
# Sourced by recipes/run_qwen_910b.sh and tests/run.sh, which call `setup_env` or `setup_env dev`;
# afterwards "$VENV/bin" holds python and ascend-kv. What it does is said on standard error, so that
# standard output stays the command's own. It obeys
#
#   PYTHON            the Python to build on, 3.10 or newer (default: python3)
#   VENV              where the environment lies (default: .venv in this checkout)
#   TORCH_INDEX_URL   the wheel index to take torch from (default: PyTorch's own index of CPU builds)
#   ASCEND_KV_CPU_LEVEL
#                     on x86, the most that the native operators are compiled for: amx, avx512,
#                     avx2 or baseline (default: what this CPU has)
#   CXX               the C++ compiler of the native operators
#
# and pip's own settings for everything else (PIP_INDEX_URL, proxies, certificates).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CONSTRAINTS=$ROOT/tools/constraints.txt
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '[ascend_kv] %s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }

# print_help SCRIPT: the comment at the head of a script is its help.
print_help() { sed -n '2,/^[^#]/{ s/^# \{0,1\}//p; }' "$1"; }

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@" >&2; }

# CANN tells of itself in the environment once its set_env.sh was sourced.
has_cann() { [[ -n ${ASCEND_HOME_PATH:-} && -d ${ASCEND_HOME_PATH} ]]; }

# What an environment is made from: when this changes, it is installed anew. The native CPU
# operators are made from their sources, by a compiler, for a CPU. $1: extras
fingerprint() {
  {
    cat "$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT/ascend_kv/build_targets.py" "$CONSTRAINTS"
    if has_cann; then  # the kernels are built with the package
      cat "$ROOT"/tools/build_npu.py "$ROOT"/op_kernels/*.* "$ROOT"/op_kernels/*/*.*
    fi
    printf '%s\n' "$ROOT" "$1" "${TORCH_INDEX_URL:-}" "${ASCEND_KV_CPU_LEVEL:-}" "${CXX:-}"
    find "$ROOT/op_kernels" \( -name '*_cpu.cpp' -o -name 'cpu_*.h' \) -print0 2>/dev/null |
      sort -z | xargs -0 -r cat
    command -v c++ g++ clang++
    # those that setup.py compiles for
    grep -owE 'avx2|avx512(f|bw|dq|vl)|fma|f16c|amx_(tile|int8)' /proc/cpuinfo 2>/dev/null | sort -u
  } | cksum
}

# Whether the package is installed with these extras, from what is here now. $1: extras
is_installed() {
  local stamp=$VENV/.installed-${1:-plain}
  [[ -f $stamp && $(<"$stamp") == "$(fingerprint "$1")" ]]
}

# What else was installed here was built from other sources, or is about to be overwritten.
forget_installations() {
  local stamp
  for stamp in "$VENV"/.installed-*; do
    [[ ! -e $stamp ]] || : >"$stamp"
  done
}

# pip hides what the build says.
say_what_was_built() {
  if [[ -f $ROOT/ascend_kv/ops/_native_cpu.json ]]; then
    say "the native CPU operators are built"
  else
    say "no native CPU operators were built (they need a C++ compiler): the Python references serve,"
    say "several times slower; $VENV/bin/python -m pip install -v --no-build-isolation -e . says why"
  fi
}

# "Python 3.11"
python_version() { "$PYTHON" -V 2>&1 | cut -d. -f1,2; }

check_python() {
  command -v "$PYTHON" >/dev/null ||
    die "no Python found as '$PYTHON'; name one, 3.10 or newer: PYTHON=/path/to/python3 bash $0"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$PYTHON is $("$PYTHON" -V 2>&1), and 3.10 or newer is needed; name another:" \
      "PYTHON=/path/to/python3.11 bash $0"
}

# Whether there is an environment of ours, with the Python asked for if one was. $1: PYTHON as given
is_usable() {
  [[ -x $VENV/bin/python && -f $VENV/.made-by-ascend_kv ]] &&
    [[ -z $1 || $(<"$VENV/.made-by-ascend_kv") == "$(python_version)" ]]
}

make_venv() {
  if [[ -n $(ls -A "$VENV" 2>/dev/null) && ! -e $VENV/.made-by-ascend_kv ]]; then
    # Installing pinned versions would change an environment that serves something else.
    die "$VENV exists and was not made by this script; name another place with VENV=..., remove it," \
      "or install into it yourself: pip install -c $CONSTRAINTS -e $ROOT"
  fi
  check_python
  say "[1/4] environment $VENV with $("$PYTHON" -V 2>&1)"
  "$PYTHON" -m venv --clear "$VENV" >&2 || {
    rm -rf "$VENV"
    die "$PYTHON cannot make environments (on Debian and Ubuntu: apt install python3-venv)"
  }
  python_version >"$VENV/.made-by-ascend_kv"
}

# torch comes first, so that nothing that depends on it chooses the build, and with all that it
# needs to be imported, since the native operators are compiled against it. An NPU needs the CPU
# build too: torch_npu brings the device.
install_torch() {
  install_torch_alone
  pip_install -c "$CONSTRAINTS" torch # is there; this brings what it depends on
}

install_torch_alone() {
  local version
  version=$(sed -n 's/^torch==//p' "$CONSTRAINTS")
  if [[ -n ${TORCH_INDEX_URL:-} ]]; then
    say "[3/4] torch $version from $TORCH_INDEX_URL"
    pip_install --no-deps --index-url "$TORCH_INDEX_URL" "torch==$version"
    return
  fi
  if [[ $(uname -s) == Linux ]]; then
    say "[3/4] torch $version, the CPU build, from pip's sources or $TORCH_CPU_INDEX"
    # Naming the build leaves no room for another one; an index out of reach costs half a minute.
    if pip_install --no-deps --retries 1 --timeout 15 --extra-index-url "$TORCH_CPU_INDEX" \
      "torch==$version+cpu"; then
      return
    fi
    say "the CPU build is not to be had here, so the build of pip's own index is taken. On x86 it"
    say "brings several GB of CUDA libraries, which stay unused; TORCH_INDEX_URL names another index."
  fi
  say "[3/4] torch $version from pip's own index"
  pip_install --no-deps "torch==$version"
}

# setup_env [dev]: make the environment or find it ready.
setup_env() {
  local extras=${1:-} asked_python=${PYTHON:-} with_tools
  PYTHON=${PYTHON:-python3}
  VENV=${VENV:-$ROOT/.venv}
  case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac

  if has_cann; then
    extras=${extras:+$extras,}npu
  elif [[ -n ${ASCEND_HOME_PATH:-} ]]; then
    say "ASCEND_HOME_PATH=$ASCEND_HOME_PATH is no folder. Going on with the CPU."
    unset ASCEND_HOME_PATH
  elif [[ -d /usr/local/Ascend ]]; then
    say "CANN lies in /usr/local/Ascend but its environment is not loaded: to use the NPU, source its"
    say "set_env.sh and start again. Going on with the CPU."
  fi

  is_usable "$asked_python" || make_venv
  with_tools=dev${extras:+,$extras} # an environment of the tests serves the recipes too
  [[ $extras != dev* ]] || with_tools=$extras
  if ! is_installed "$extras" && ! is_installed "$with_tools"; then
    forget_installations
    say "[2/4] pip and what builds, in the versions of tools/constraints.txt"
    pip_install -c "$CONSTRAINTS" pip setuptools ninja
    install_torch
    if has_cann; then
      # What the NPU kernels are built with, while the package is installed.
      pip_install --no-deps -c "$CONSTRAINTS" torch_npu
      command -v cmake >/dev/null || pip_install cmake
    fi
    say "[4/4] ascend_kv${extras:+ with [$extras]} and what it needs"
    (cd "$ROOT" && pip_install --no-build-isolation -c "$CONSTRAINTS" -e ".${extras:+[$extras]}")
    printf '%s\n' "$(fingerprint "$extras")" >"$VENV/.installed-${extras:-plain}"
    say_what_was_built
  fi
  say "environment $VENV is ready"

  # torch loads torch_npu by itself, and that fails without CANN.
  if ! has_cann && [[ -e $VENV/.installed-npu || -e $VENV/.installed-dev,npu ]]; then
    say "torch_npu is installed, CANN's environment is not loaded: using the CPU"
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0
  fi
}
