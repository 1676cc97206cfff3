"""`foredraft token`."""

from pathlib import Path

import pytest

from foredraft.cli.token import token
from foredraft.serving.auth import LINE, Tokens, token_hash


def test_it_prints_a_token_and_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token("a laptop")
    made, line = (text.partition(": ")[2] for text in capsys.readouterr().out.splitlines())
    assert line == f"{token_hash(made).hex()} a laptop"
    assert LINE.fullmatch(line)
    (tmp_path / "tokens").write_text(line)
    Tokens(tmp_path / "tokens")


def test_every_token_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    token()
    token()
    assert len(set(capsys.readouterr().out.splitlines())) == 4
