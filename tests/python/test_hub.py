"""Repository ids: what is downloaded, and what is said when that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import flint_rs
import huggingface_hub
import pytest
from flint_rs import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cached snapshot of `owner/name`, laid out as huggingface_hub does, which is told to stay offline."""
    folder = tmp_path / "models--owner--name"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_no_name_is_not_the_current_folder() -> None:
    with pytest.raises(flint_rs.InvalidValueError, match="path_or_repo: expected a path or a repository id, found ''"):
        flint_rs.Flint("")
    with pytest.raises(TypeError, match="dims: expected"):
        flint_rs.Flint.synthetic(dims="")


def test_paths_come_first(gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve(gguf_path) == gguf_path
    assert hub.resolve(str(gguf_path)) == gguf_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/name") == Path("owner/name")
    # A mistyped path to a file is no repository either.
    for name in (
        "models/flint.gguf",
        "models/flint.safetensors",
        "none.gguf",
        "./owner/none",
        "/owner/none",
        "a/b/c",
        "owner/na me",
        "../x/y",
    ):
        assert hub.resolve(name) == Path(name)


def test_offline_from_the_cache(repository: Path, gguf_path: Path) -> None:
    shutil.copy(gguf_path, repository / "tiny.gguf")
    assert hub.resolve("owner/name") == repository / "tiny.gguf"
    assert hub.resolve("owner/name/tiny.gguf") == repository / "tiny.gguf"
    with flint_rs.Flint("owner/name") as flint:
        assert flint.generate("the", max_tokens=2).usage.completion_tokens >= 1
    with pytest.raises(flint_rs.InvalidValueError, match=r"other\.gguf"):
        hub.resolve("owner/name/other.gguf")


def test_which_file(repository: Path) -> None:
    with pytest.raises(flint_rs.InvalidValueError, match="neither"):
        hub.resolve("owner/name")
    (repository / "config.json").touch()
    (repository / "model.safetensors").touch()
    assert hub.resolve("owner/name") == repository
    for part in (1, 2, 3):
        (repository / f"big-0000{part}-of-00003.gguf").touch()
    assert hub.resolve("owner/name") == repository / "big-00001-of-00003.gguf"
    (repository / "small.gguf").touch()
    with pytest.raises(flint_rs.InvalidValueError, match=r"owner/name/big-00001.*owner/name/small\.gguf"):
        hub.resolve("owner/name")


def test_offline_without_a_copy(repository: Path) -> None:
    assert repository.is_dir()
    with pytest.raises(flint_rs.UnavailableError, match="owner/absent"):
        flint_rs.Flint("owner/absent")


@pytest.mark.parametrize(
    ("files", "patterns", "chosen"),
    [
        (["README.md", "a.gguf", "model.safetensors", "config.json"], ["a.gguf"], "a.gguf"),
        (["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"], ["a-*.gguf"], "a-00001-of-00002.gguf"),
        (["config.json", "model.safetensors"], ["*.safetensors", "*.json", "*.jinja"], ""),
    ],
)
def test_downloads_only_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], patterns: list[str], chosen: str
) -> None:
    asked = []

    def snapshot_download(repo: str, *, allow_patterns: list[str], tqdm_class: type) -> str:
        asked.append((repo, allow_patterns))
        with open(os.devnull, "w") as no_terminal, tqdm_class(total=1, file=no_terminal) as bar:
            assert bar.disable
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda _, repo: files if repo == "owner/name" else [])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("owner/name") == tmp_path / chosen
    assert asked == [("owner/name", patterns)]


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import flint_rs\n"
        "try: flint_rs.Flint('owner/name')\n"
        "except flint_rs.UnavailableError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "flint-rs[hub]" in found.stdout
