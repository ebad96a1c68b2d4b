"""From what a caller names to a checkpoint on this machine.

A path that exists is taken as it is. Otherwise `owner/name` is a repository of the Hugging Face hub, and
`owner/name/FILE.gguf` one file in it. Of a repository with both forms, the GGUF is taken: it is one file and needs
the least memory. The library `huggingface_hub` downloads, keeps its own cache, and does not ask the network when
HF_HUB_OFFLINE is set.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flint_rs._core import InvalidValueError, UnavailableError

_REPOSITORY = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w./-]+\.gguf))?")
_SPLIT = re.compile(r"-(?P<part>\d{5})-of-\d{5}\.gguf$")
# Everything that a folder of safetensors needs.
_SAFETENSORS = ["*.safetensors", "*.json", "*.jinja"]


def resolve(path_or_repo: str | os.PathLike[str]) -> Path:
    """Finds the checkpoint that a caller names, downloading it when it is a repository.

    Args:
        path_or_repo: A GGUF file, a folder of safetensors, `owner/name`, or `owner/name/FILE.gguf`.

    Returns:
        A file or folder. A name that is neither a path nor a repository comes back as it is: opening it says why.

    Raises:
        TypeError: If the argument is no path.
        UnavailableError: If `huggingface_hub` is not installed, or could not deliver.
        InvalidValueError: If the repository holds no checkpoint, or several to choose from.
    """
    if not isinstance(path_or_repo, (str, os.PathLike)):
        msg = f"path_or_repo: expected a path or a repository id, found {path_or_repo!r}"
        raise TypeError(msg)
    if not os.fspath(path_or_repo):
        # A path object would make the current folder of it.
        msg = f"path_or_repo: expected a path or a repository id, found {path_or_repo!r}"
        raise InvalidValueError(msg)
    path = Path(path_or_repo)
    match = _REPOSITORY.fullmatch(path_or_repo) if isinstance(path_or_repo, str) else None
    # `models/flint.gguf` is a mistyped path: no repository is named like a file.
    if match is None or path.exists() or match["repo"].endswith((".gguf", ".safetensors")):
        return path
    return _download(match["repo"], match["file"])


def _download(repo: str, file: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import tqdm
    except ImportError:
        msg = (
            f"repository {repo} is not available: no such path exists, and downloading needs the extra hub: "
            "pip install 'flint-rs[hub]'"
        )
        raise UnavailableError(msg) from None
    try:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            folder = Path(huggingface_hub.snapshot_download(repo))
            return folder / _choose(repo, file, _files_below(folder))
        chosen = _choose(repo, file, huggingface_hub.HfApi().list_repo_files(repo))
        patterns = [_SPLIT.sub("-*.gguf", chosen)] if chosen else _SAFETENSORS

        class Bar(tqdm):
            """Draws on a terminal only."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": None})  # type: ignore[no-untyped-call]

        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, tqdm_class=Bar))
        return folder / chosen
    except InvalidValueError:
        raise
    # The library raises many classes, its own and those of its HTTP client; each means that there is no checkpoint.
    except Exception as error:
        msg = f"repository {repo} is not available: {error}"
        raise UnavailableError(msg) from error


def _files_below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _choose(repo: str, file: str | None, files: Iterable[str]) -> str:
    """The GGUF to open, by its first part when it is split; empty for the folder of safetensors itself."""
    files = sorted(files)
    if file is not None:
        if file in files:
            return file
        msg = f"path_or_repo: expected a file of {repo}, found {file!r}, which it does not hold"
        raise InvalidValueError(msg)
    parts = ((name, _SPLIT.search(name)) for name in files if name.endswith(".gguf"))
    ggufs = [name for name, split in parts if split is None or int(split["part"]) == 1]
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        choices = ", ".join(f"{repo}/{name}" for name in ggufs)
        msg = f"path_or_repo: expected one GGUF, found several; name one of {choices}"
        raise InvalidValueError(msg)
    if "config.json" in files and any(name.endswith(".safetensors") for name in files):
        return ""
    msg = f"path_or_repo: expected a repository with a GGUF or safetensors, found neither in {repo}"
    raise InvalidValueError(msg)
