#!/usr/bin/env bash
# compile_kernels.sh best | runnable: compiles csrc/ into build/kernels and installs the libraries beside the module that
# loads them. best: the build that this processor loads, which `make demo` needs. runnable: every build that it runs, which
# the tests compare. What is compiled already is kept. Without a C++17 compiler the slow reference kernels run.
set -uo pipefail
cd "$(dirname "$0")/.."
builds=$1
folder=build/kernels
log=$folder/log
jobs=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
unset MAKEFLAGS MFLAGS MAKELEVEL  # this is a make of its own, with as many jobs as there are processors
PATH="$PATH:$PWD/.venv/bin"

fail() {
  echo "the CPU kernels were not compiled: the slow reference kernels will run ($log says why)" >&2
  exit 0
}

mkdir -p $folder
cmake -S csrc -B $folder -G "Unix Makefiles" -DFREIGHT_BUILDS="$builds" -DSKBUILD_STATE=editable >$log 2>&1 || fail
sed -n 's/^-- CPU kernels: /compiling the CPU kernels: /p' $log
# a line for each fifth that is compiled: "[ 40%] Building CXX object …"
cmake --build $folder -j "$jobs" 2>&1 | tee -a $log |
  awk -F'[][%]' '/^\[ *[0-9]+%\] Building/ { part = int($2 / 20); if (part > last) { printf "  %d %% of the CPU kernels\n", part * 20; fflush(); last = part } }' || fail
rm -f src/freight/kernels/cpu/*.so
cmake --install $folder >>$log 2>&1 || fail
