"""Options that contradict each other are refused before torch is imported, and so at once."""

from __future__ import annotations

import json
import subprocess
import sys

from freight.settings.cpu_builds import builds

BUILD = next(iter(builds()))
REFUSED = {  # command line -> what the error says
    "generate demo --kv-cache-dtype bfloat16 --kv-scales dynamic": "--kv-scales dynamic with --kv-cache-dtype bfloat16",
    "generate demo --kv-cache-dtype fp8_e5m2 --kv-scales checkpoint": "static scales are made for E4M3",
    "generate demo --kv-cache-dtype fp8_e5m2 --kv-scales 0.03": "static scales are made for E4M3",
    "generate demo --kv-cache-dtype int8 --kv-scales unit": "INT8 scales are measured as values are stored",
    "generate demo --kv-cache-dtype fp8 --kv-scales 0.03,-1": "finite and above 0",
    "generate demo --kv-cache-dtype int8 --device cuda": "no INT8 cache",
    f"generate demo --kernels cpu-{BUILD} --device cuda": "a build of the CPU kernels",
    "generate demo --kernels cpu-i386": "--kernels 'cpu-i386' is unknown",
    "generate demo --attention-compute fp8 --kv-cache-dtype fp8_e5m2": "--attention-compute fp8 with a cache in",
    "generate demo --attention-compute fp8 --dtype float32": "--attention-compute fp8 with --dtype float32",
    "generate demo --attention-compute fp8 --device cpu": "--attention-compute fp8 with a CPU",
    "generate demo --prompt x --skip-tokenizer-init": "--prompt-token-ids",
    "generate demo --prompt-token-ids 1 --regex a --skip-tokenizer-init": "need a tokenizer",
    "chat demo --skip-tokenizer-init": "omit --skip-tokenizer-init",
    "serve demo --kv-cache-dtype float16 --kv-scales unit": "--kv-scales unit with --kv-cache-dtype float16",
    "evaluate demo --kv-cache-dtype bfloat16 --kv-scales checkpoint": "--kv-scales checkpoint with",
    "bench latency demo --kv-cache-dtype bfloat16 --kv-scales 0.5": "--kv-scales 0.5 with --kv-cache-dtype bfloat16",
    "generate demo --prompt x -pp 0": "--pipeline-parallel-size 0 must be an integer from 1",
    "serve demo -pp 65": "--pipeline-parallel-size 65 must be an integer from 1",
    "chat demo --pp-layers 3,3": "add --pipeline-parallel-size",
    "generate demo --prompt x -pp 2 --pp-layers 6": "--pp-layers '6' must give the layers of each of the 2 stages",
    "serve demo -pp 2 --pp-layers 6,0": "as in 20,20",
    "serve demo -tp 2 --enable-weight-updates": "weights of several ranks do not change",
    "inspect demo --picture scales.png": "--picture scales.png",
}
RUN = """
import io, json, sys
from contextlib import redirect_stderr
from freight.cli.main import main
answers = []
for line in json.load(sys.stdin):
    sys.argv, said, code = ["freight", *line.split()], io.StringIO(), None
    with redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    answers.append((code, said.getvalue(), "torch" in sys.modules))
print(json.dumps(answers))
"""


def test_a_contradiction_is_refused_without_torch() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(list(REFUSED)),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for (line, says), (code, said, torch_loaded) in zip(
        REFUSED.items(), json.loads(ran.stdout), strict=True
    ):
        assert (code, torch_loaded) == (2, False), line
        assert says in said, line
