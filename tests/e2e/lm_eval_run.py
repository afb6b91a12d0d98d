"""lm-eval's `local-completions` on three tasks, in a process of its own: python lm_eval_run.py FOLDER URL MODEL KEY.

FOLDER has docs.jsonl with `context` and `rest`. FOLDER/found.json becomes: task -> what the server answered for each
document. lm-eval has neither a tokenizer nor anything else of the model: it asks the server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager


def main(folder: Path, url: str, model: str, key: str) -> None:
    data = {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "target_delimiter": ""}
    pair = {"doc_to_text": "{{context}}", "doc_to_target": "{{rest}}"}
    whole = {"doc_to_text": "", "doc_to_target": "{{context}}{{rest}}"}
    until = {"until": ["\n\n"], "max_gen_toks": 12}
    forms: dict[str, dict[str, object]] = {
        "loglikelihood_rolling": whole | {"metric_list": [{"metric": "word_perplexity"}]},
        "loglikelihood": pair | {"metric_list": [{"metric": "acc"}]},
        "generate_until": pair | {"metric_list": [{"metric": "exact_match"}], "generation_kwargs": until},
    }
    options = {"tokenizer_backend": "auto", "auth_token": key, "max_length": 1024, "batch_size": 2}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={"model": model, "base_url": f"{url}/v1/completions", **options},
        tasks=[{**common, "task": name, "output_type": name, **form} for name, form in forms.items()],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    found = {}
    for task, samples in results["samples"].items():
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        found[task] = [sample["resps"][0][0] for sample in ordered]
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
