#!/usr/bin/env bash
# test_tiles.sh: compiles the AMX build of csrc/ with its tile instructions emulated (tests/kernels/tiles/emulated_tiles.h)
# into build/tiles, and runs the kernels' tests with it; arguments are pytest's. For machines without AMX: needs AVX-512
# with VBMI and BF16. Bits are those of AMX, speed is not.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python folder=$PWD/build/tiles
PATH=$PATH:$PWD/.venv/bin
command -v cmake >/dev/null || .venv/bin/pip install -q cmake  # as the installation does where the system has none
$python - <<'END'
import sys
from freight.settings.cpu_builds import X86_BUILDS
from freight.settings.device import cpu_features
lacks = X86_BUILDS["avx512"] - set(cpu_features())
if lacks:
    sys.exit(f"emulated tiles need AVX-512 with VBMI and BF16; this processor lacks {', '.join(sorted(lacks))}")
END
mkdir -p "$folder"
{ cmake -S csrc -B "$folder" -DFREIGHT_EMULATE_TILES=ON && cmake --build "$folder" -j2 --target freight_amx freight_avx512; } \
  >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
export FREIGHT_TEST_KERNELS=$folder FREIGHT_TEST_TILES=emulated
tests=tests/kernels
$python -m pytest -p no:cacheprovider -k "not avx512" "$@" \
  $tests/test_cpu_{linear,int8,mxfp4,experts,by_head,route,attention,attention_tiles,store,elementwise,rowwise,replay,recording}.py \
  $tests/test_{emulated_tiles,cpu_int8_groups,cpu_blocks,key_centers,page_layouts,int8_cache,group_scales}.py \
  $tests/test_cpu_library.py::test_the_amx_build_computes_on_tiles
