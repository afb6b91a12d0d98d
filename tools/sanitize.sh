#!/usr/bin/env bash
# sanitize.sh address,undefined | thread: compiles csrc/ with these checks into build/sanitize/, the best build that
# runs here or $BUILD, and runs it. The first error ends the run with a report and a status that is not 0.
#
# address,undefined: the kernels' tests; further arguments are pytest's. Loads and stores of AMX tiles are not checked,
# because the compiler adds no check to those instructions; what they read is written and sized by code that is checked.
# BUILD=emulated-tiles: the AMX build with its tiles in C++ (tests/kernels/tiles/emulated_tiles.h), which are checked.
# thread: tests/kernels/stress.cpp, without Python, whose interpreter and torch are not compiled with the checks.
set -euo pipefail
cd "$(dirname "$0")/.."
checks=$1 python=.venv/bin/python compiler=${CXX:-c++}
folder=$PWD/build/sanitize/${checks%%,*}
PATH=$PATH:$PWD/.venv/bin
command -v cmake >/dev/null || .venv/bin/pip install -q cmake  # as the installation does where the system has none
build=${BUILD:-$($python -c 'from freight.kernels.cpu import library; print(library.runnable()[0])')} emulate=OFF
if [ "$build" = emulated-tiles ]; then
  export FREIGHT_TEST_TILES=emulated
  build=amx emulate=ON folder=$folder-tiles
fi
echo "compiling the $build build with -fsanitize=$checks"
mkdir -p "$folder"
{ cmake -S csrc -B "$folder" -DFREIGHT_SANITIZE="$checks" -DFREIGHT_EMULATE_TILES=$emulate && cmake --build "$folder" -j2 --target "freight_$build"; } \
  >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }

if [ "$checks" = thread ]; then
  $compiler -std=c++17 -O1 -g1 -Wall -Wextra -fsanitize=thread tests/kernels/stress.cpp -o "$folder/stress" -ldl -pthread
  fixed="setarch -R"  # GCC 12's runtime does not know the addresses that vm.mmap_rnd_bits=32 gives
  $fixed true 2>/dev/null || fixed=""
  TSAN_OPTIONS=halt_on_error=1 exec $fixed "$folder/stress" "$folder/freight_$build.so" "${@:2}"
fi
# Python itself is compiled without the checks, so their runtime comes first; libstdc++ with it, for exceptions.
LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libstdc++.so.6)"
export LD_PRELOAD FREIGHT_TEST_KERNELS=$folder
export ASAN_OPTIONS=detect_leaks=0  # Python's own
export UBSAN_OPTIONS=print_stacktrace=1
$python -m pytest --capture=sys -p no:cacheprovider tests/kernels/test_cpu_{linear,mxfp4,experts,route,attention,attention_tiles,store,elementwise,rowwise,states,by_head}.py tests/kernels/test_{adapters,group_scales,cpu_int8_groups,cpu_four_bit,cpu_blocks,states_taken_back}.py \
  -k "not soft_caps and not every_value" "${@:2}"
