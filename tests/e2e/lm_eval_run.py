"""Commands that use lm-eval, one after the other in one process: `python -m tests.e2e.lm_eval_run JSON`.

JSON is a list of command lines, each of which begins with the module that it runs; of each, a line
[status, standard output, standard error] is written. To import lm-eval takes seconds, and so does
reading its 14,000 task files, of which none is read here.

The module `compare` is `compare` below: lm-eval on three tasks of texts that a test writes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any


def compare(folder: str, model: str, model_args: str) -> None:
    """lm-eval's `simple_evaluate` of `model` with these model_args, a JSON object.

    FOLDER has docs.jsonl with `context` and `rest`; FOLDER/answers.json becomes: task -> what the model
    answered for each document. As `local-completions`, lm-eval has neither a tokenizer nor anything
    else of the model: it asks the server.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    import freight.lm_eval  # noqa: F401  # registers "freight"

    data = {"data_files": {"test": f"{folder}/docs.jsonl"}, "cache_dir": f"{folder}/cache"}
    common = {
        "dataset_path": "json",
        "dataset_kwargs": data,
        "test_split": "test",
        "target_delimiter": "",
    }
    pair = {"doc_to_text": "{{context}}", "doc_to_target": "{{rest}}"}
    whole = {"doc_to_text": "", "doc_to_target": "{{context}}{{rest}}"}
    until = {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12}}
    forms: dict[str, dict[str, Any]] = {
        "loglikelihood_rolling": whole | {"metric_list": [{"metric": "word_perplexity"}]},
        "loglikelihood": pair | {"metric_list": [{"metric": "acc"}]},
        "generate_until": pair | {"metric_list": [{"metric": "exact_match"}]} | until,
    }
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=json.loads(model_args),
        tasks=[common | {"task": name, "output_type": name} | form for name, form in forms.items()],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    answers = {}
    for task, samples in results["samples"].items():
        ordered = sorted(samples, key=lambda sample: sample["doc_id"])
        answers[task] = [sample["resps"][0][0] for sample in ordered]
    Path(folder, "answers.json").write_text(json.dumps(answers))


def main() -> None:
    from lm_eval.tasks import TaskManager

    TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
    for module, *argv in json.loads(sys.argv[1]):
        sys.argv, status = [module, *argv], 0
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                if module == "compare":
                    compare(*argv)
                else:
                    runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                status = ended.code or 0
        print(json.dumps([status, out.getvalue(), errors.getvalue()]))


if __name__ == "__main__":
    main()
