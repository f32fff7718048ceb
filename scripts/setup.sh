#!/usr/bin/env bash
# Makes .venv with the pinned packages, the project itself (editable) and the embedded model. Safe to run again: a stamp
# over everything that decides what is installed makes a second run take less than a second.
#
#   PYTHON=python3.12      the interpreter to use (default: the first of python3, python3.13 ... with version >= 3.11)
#   SELFGC_BUILD=cpu|cuda  which pinned set (default: cuda if nvidia-smi finds a GPU, else cpu)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[setup] %s\n' "$*"; }
die() { # problem, remedy
  printf 'error: %s → %s\n' "$1" "$2" >&2
  exit 2
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (tried: ${PYTHON:-python3, python3.13, python3.12, python3.11})" \
    "install one, or name it: make setup PYTHON=/path/to/python3.11"
}

need_bubblewrap() {
  command -v bwrap >/dev/null && return
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing bubblewrap (the sandbox of the agent's commands)"
    if apt-get update -qq >/dev/null && apt-get install -y -qq bubblewrap >/dev/null; then return; fi
    die "apt-get could not install bubblewrap" "apt-get update && apt-get install bubblewrap"
  fi
  die "bubblewrap, the sandbox of the agent's commands, is missing" "sudo apt-get install bubblewrap, then make setup"
}

# Run a step with its output in the log; show the log's end if it fails.
quietly() {
  if ! "$@" >>"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "this step failed: $*" "see $log above; then make setup again continues"
  fi
}

need_bubblewrap
if [ -n "${SELFGC_BUILD:-}" ]; then
  build=$SELFGC_BUILD
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  build=cuda
else
  build=cpu
fi
[ -f "requirements/$build.txt" ] || die "SELFGC_BUILD=$build is not known" "use cpu or cuda"

stamp=.venv/setup-stamp
log=.venv/setup.log
wanted=$({ echo "$PWD $build"; cat scripts/setup.sh pyproject.toml requirements/*.txt; } | sha256sum | cut -d ' ' -f 1)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  python=$(find_python)
  if ! new_enough .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    say "making .venv with $python"
    "$python" -m venv --clear .venv || die "$python cannot make a virtual environment" "sudo apt-get install python3-venv"
  fi
  : >"$log"
  say "installing the pinned packages ($build; gigabytes, some minutes; log: $log)"
  quietly .venv/bin/python -m pip install -r "requirements/$build.txt"
  quietly .venv/bin/python -m pip install --no-deps -r "requirements/$build-nodeps.txt"
  quietly .venv/bin/python -m pip install -r requirements/dev.txt
  quietly .venv/bin/python -m pip install --no-deps --no-build-isolation -e .
  echo "$wanted" >"$stamp.new"
  mv "$stamp.new" "$stamp"
fi
model=$(.venv/bin/python -m selfgc_rl.models) || exit $?
say "ready (embedded model: $model)"
