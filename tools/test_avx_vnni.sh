#!/usr/bin/env bash
# test_avx_vnni.sh: compiles the avx_vnni build of csrc/ into build/avx_vnni with the instruction of AVX-512 in the place of
# AVX-VNNI's (tests/kernels/evex/as), and runs the kernels' tests of products in INT8 and in 4 bits with it; arguments are
# pytest's. For machines without AVX-VNNI: needs GCC, and AVX-512 VNNI.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python folder=$PWD/build/avx_vnni
PATH=$PATH:$PWD/.venv/bin
command -v cmake >/dev/null || .venv/bin/pip install -q cmake  # as the installation does where the system has none
$python - <<'END'
import sys
from freight.settings.cpu_builds import X86_BUILDS
from freight.settings.device import cpu_features
lacks = X86_BUILDS["avx512_vnni"] - set(cpu_features())
if lacks:
    sys.exit(f"this needs AVX-512 VNNI; this processor lacks {', '.join(sorted(lacks))}")
END
mkdir -p "$folder"
{ cmake -S csrc -B "$folder" -DCMAKE_CXX_FLAGS="-B$PWD/tests/kernels/evex" &&
  cmake --build "$folder" -j2 --target freight_avx_vnni; } >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
export FREIGHT_TEST_KERNELS=$folder FREIGHT_TEST_FEATURES=avx_vnni
tests=tests/kernels
$python -m pytest -p no:cacheprovider "$@" $tests/test_cpu_{int8,four_bit,mxfp4,linear,experts}.py $tests/test_cpu_{int8_groups,blocks}.py
