"""stub"""

from pathlib import Path
from freight.evaluate.figures import Evaluation


def write_report(evaluation: Evaluation, folder: Path) -> None:
    import json

    (folder / "report.json").write_text(json.dumps(evaluation.as_json()))
