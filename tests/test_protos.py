"""The protos are clean, compatible, and what the stubs were made from."""

import filecmp
import shutil
from pathlib import Path

import pytest

from tools import check_protos
from tools.generate_stubs import ROOT, generate

in_git = pytest.mark.skipif(not (ROOT / ".git").is_dir(), reason="needs the repository's git metadata")


def test_the_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    generate(tmp_path)
    made, kept = tmp_path / "foredraft/v1", ROOT / "foredraft/v1"
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in kept.glob("*_pb2*.py*"))
    assert filecmp.cmpfiles(made, kept, names, shallow=False) == (names, [], [])


def test_the_protos_follow_the_style() -> None:
    result = check_protos.lint()
    assert result.returncode == 0, result.stdout + result.stderr


@in_git
def test_the_protos_are_compatible_with_the_last_commit() -> None:
    result = check_protos.breaking("HEAD")
    assert result.returncode == 0, result.stdout + result.stderr


@in_git
def test_a_removed_field_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    target = tmp_path / "protos/foredraft/v1/target.proto"
    field = "  uint64 forwards = 1;\n"
    assert field in target.read_text()
    target.write_text(target.read_text().replace(field, ""))
    result = check_protos.breaking("HEAD", tmp_path)
    assert result.returncode != 0
    assert 'field "1" with name "forwards" on message "Progress" was deleted' in result.stdout
