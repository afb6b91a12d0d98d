"""Run a task of lm-eval on a model under an FP8 cache (`pip install '.[eval]'`). Needs no network.

    python examples/lm_eval_task.py [MODEL]

The task is a local one: how well the model knows held-out text. With the network, lm-eval's own
tasks run by name: `freight evaluate tasks MODEL --tasks arc_easy --kv-cache-dtype fp8`, which also
runs them under the 16-bit cache and prints the difference.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import freight.lm_eval  # registers the model "freight"

TEXT = (Path(freight.__file__).parent / "demo" / "heldout.txt").read_text()


def main(model: str = "demo") -> None:
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder) / "documents.jsonl"
        parts = [TEXT[at : at + 600] for at in range(0, 4800, 600)]
        documents.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
        task = {
            "task": "heldout",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(documents)}, "cache_dir": folder},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        }
        for dtype in ("bfloat16", "fp8"):
            found = lm_eval.simple_evaluate(
                model="freight",
                model_args={"pretrained": model, "kv_cache_dtype": dtype},
                tasks=[task],
                task_manager=TaskManager(include_defaults=False),
                bootstrap_iters=0,
            )
            bits = found["results"]["heldout"]["bits_per_byte,none"]
            print(f"{dtype}: {bits:.4f} bits per byte")


if __name__ == "__main__":
    main(*sys.argv[1:])
