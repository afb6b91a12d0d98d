#!/usr/bin/env bash
# sanitize.sh address,undefined | thread: compiles csrc/ with these checks into build/sanitize/, the best build that
# runs here or $BUILD, and runs the kernels' tests with it. An error ends the run with a report and a status that is
# not 0. Further arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."
checks=$1 python=.venv/bin/python
folder=$PWD/build/sanitize/${checks%%,*}
PATH=$PATH:$PWD/.venv/bin
command -v cmake >/dev/null || .venv/bin/pip install -q cmake  # as the installation does where the system has none
build=${BUILD:-$($python -c 'from freight.kernels.cpu import library; print(library.runnable()[0])')}
cmake -S csrc -B "$folder" -DFREIGHT_SANITIZE="$checks" >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
cmake --build "$folder" -j2 --target "freight_$build" >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }

# Python itself is compiled without the checks, so their runtime comes first; libstdc++ with it, for exceptions.
compiler=${CXX:-c++}
case $checks in
  thread) runtime=libtsan.so ;;
  *) runtime=libasan.so ;;
esac
export LD_PRELOAD="$($compiler -print-file-name=$runtime) $($compiler -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0  # Python's own
export UBSAN_OPTIONS=print_stacktrace=1
# torch's threads wait for each other in ways that the runtime does not see: what its libraries do is not judged
printf 'called_from_lib:%s\n' libtorch_cpu.so libtorch_python.so libgomp.so libc10.so >"$folder.suppressions"
export TSAN_OPTIONS="halt_on_error=1 suppressions=$folder.suppressions"
export FREIGHT_TEST_KERNELS=$folder
$python -m pytest --capture=sys -p no:cacheprovider tests/kernels/test_cpu_{linear,attention,store,elementwise}.py \
  -k "not prefetched_past and not soft_caps and not every_value" "${@:2}"
