"""The header of a GGUF file on the Hugging Face hub, by range requests: for a plan, no weight is fetched.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from freight.base.gguf import GGUFFile, GGUFTensor, join_parts, parse_gguf
from freight.checkpoint.gguf.describe import as_numbers
from freight.checkpoint.gguf.places import chosen_file
from freight.errors import CheckpointError, first_line

SECONDS = 10.0  # that the hub may be silent for


def file_on_hub(repo: str, wanted: str, revision: str | None = None) -> str:
    """Return the path in the repository that `wanted` names (`places.chosen_file`): a FILE.gguf is
    taken as it is. Raises CheckpointError if there is none, or the hub does not answer.
    """
    if wanted.endswith(".gguf"):
        return wanted
    from huggingface_hub import list_repo_files

    try:
        files = list_repo_files(repo, revision=revision)
    except Exception as error:  # the client's own errors, and whatever its network stack raises
        raise CheckpointError(
            f"the files of {repo} could not be listed; check the name and the connection, or name a file as "
            f"{repo}:FILE.gguf ({first_line(error)})"
        ) from error
    return chosen_file(files, wanted, f"{repo}:{wanted}")


def header_on_hub(repo: str, file: str, revision: str | None = None) -> GGUFFile:
    """Return the header of `file` in the hub's repository `repo`, and those of the other parts of a
    split.

    What is fetched grows with the header, to MAX_HEADER bytes a part at most. Paths in what is
    returned are those in the repository, and all parts come from one commit. Raises CheckpointError, a
    line that names the file, if it cannot be had.
    """
    place = PurePosixPath(file)
    if place.is_absolute() or ".." in place.parts or not file:
        raise CheckpointError(f"{repo}:{file}: that is no path in a repository; give its FILE.gguf")
    parts = _Parts(repo, revision)
    try:
        return join_parts(parts.read(Path(file)), parts.read)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"the repository {repo} on the hub has no file {file}{parts.at_revision}; see the names there"
        ) from error


def numbers_on_hub(repo: str, revision: str | None = None) -> Callable[[GGUFTensor], list[float]]:
    """Return a reader of the small float32 tensors of a header that came from the hub."""

    def read(tensor: GGUFTensor) -> list[float]:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(repo, tensor.file.as_posix(), revision=revision)
        try:
            return as_numbers(_range(url, tensor.offset, tensor.size))
        except Exception as error:  # as in `_Parts.read`
            raise CheckpointError(
                f"{repo}:{tensor.file}: tensor {tensor.name} could not be read from the hub ({first_line(error)})"
            ) from error

    return read


class _Parts:
    """The parts of a file in a repository, all at the commit of the first that is read."""

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo = repo
        self.revision = revision
        self.at_revision = f" at revision {revision!r}" if revision is not None else ""

    def read(self, path: Path) -> GGUFFile:
        """Read a part's header. Raises FileNotFoundError, else CheckpointError."""
        from huggingface_hub.errors import EntryNotFoundError

        name = f"{self.repo}:{path.as_posix()}"
        try:
            remote = _remote(self.repo, path.as_posix(), self.revision)
            self.revision = remote.commit or self.revision
            return parse_gguf(remote.read, remote.size, name, path)
        except CheckpointError:
            raise
        except EntryNotFoundError as error:
            raise FileNotFoundError(name) from error
        except Exception as error:  # the client's own errors, and whatever its network stack raises
            raise CheckpointError(
                f"{name}{self.at_revision} could not be read from the Hugging Face hub; check the name and the "
                f"connection, or give a file ({first_line(error)})"
            ) from error


@dataclass(frozen=True)
class _Remote:
    """A file on the hub: its bytes, and the commit that was found."""

    size: int
    commit: str | None
    read: Callable[[int, int], bytes]


def _remote(repo: str, file: str, revision: str | None) -> _Remote:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    about = get_hf_file_metadata(hf_hub_url(repo, file, revision=revision), timeout=SECONDS)
    if about.size is None:
        raise OSError("the hub did not say how many bytes it has")
    url = hf_hub_url(repo, file, revision=about.commit_hash or revision)

    def read(offset: int, size: int) -> bytes:
        return _range(url, offset, size)

    return _Remote(about.size, about.commit_hash, read)


def _range(url: str, offset: int, size: int) -> bytes:
    """Return `size` bytes of the file. Of an answer that has more, no more is read."""
    from huggingface_hub import get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers() | {
        "Range": f"bytes={offset}-{offset + size - 1}",
        "Accept-Encoding": "identity",
    }
    data = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=SECONDS) as response:
        hf_raise_for_status(response)
        if response.status_code != 206 and offset:
            raise OSError("the hub answers requests for a range with the whole file")
        for chunk in response.iter_raw():
            data += chunk
            if len(data) >= size:
                break
    return bytes(data[:size])
