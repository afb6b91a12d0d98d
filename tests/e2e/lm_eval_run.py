"""lm-eval on three tasks, in a process of its own: python lm_eval_run.py FOLDER MODEL MODEL_ARGS.

FOLDER has docs.jsonl with `context` and `rest`; MODEL_ARGS is a JSON object. FOLDER/found.json
becomes: task -> what the model answered for each document. As `local-completions`, lm-eval has
neither a tokenizer nor anything else of the model: it asks the server.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

import freight.lm_eval  # noqa: F401  # registers "freight"


def main(folder: Path, model: str, model_args: dict[str, object]) -> None:
    data = {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "target_delimiter": "",
    }
    pair = {"doc_to_text": "{{context}}", "doc_to_target": "{{rest}}"}
    whole = {"doc_to_text": "", "doc_to_target": "{{context}}{{rest}}"}
    until = {"until": ["\n\n"], "max_gen_toks": 12}
    forms: dict[str, dict[str, object]] = {
        "loglikelihood_rolling": whole | {"metric_list": [{"metric": "word_perplexity"}]},
        "loglikelihood": pair | {"metric_list": [{"metric": "acc"}]},
        "generate_until": pair
        | {"metric_list": [{"metric": "exact_match"}], "generation_kwargs": until},
    }
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=[
            {**common, "task": name, "output_type": name, **form} for name, form in forms.items()
        ],
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
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
