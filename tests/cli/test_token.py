"""`foredraft token`."""

from pathlib import Path

import pytest

from foredraft.cli.token import token
from foredraft.serving.auth import LINE, Tokens, token_hash


def test_it_prints_a_token_and_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token("a laptop")
    _, made, _, line = capsys.readouterr().out.splitlines()
    assert line == f"{token_hash(made).hex()} a laptop"
    assert LINE.fullmatch(line)
    (tmp_path / "tokens").write_text(line)
    Tokens(tmp_path / "tokens")


def test_every_token_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    token()
    token()
    lines = capsys.readouterr().out.splitlines()
    assert len({lines[i] for i in (1, 3, 5, 7)}) == 4
