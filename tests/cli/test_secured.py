"""`foredraft up` with TLS and tokens: who gets in, and that neither text nor tokens are in the logs."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foredraft.cli import app
from foredraft.cli.up import Stack
from foredraft.serving.auth import new_token, token_hash
from orchestrator.client import AsyncClient, GenerationError
from tests import tiny
from tests.serving.pki import Authority


@dataclass
class Secured:
    """A running stack; `lines` is all that its services have printed."""

    address: str
    authority: Authority
    token: str
    lines: list[str] = field(default_factory=list)

    @property
    def flags(self) -> list[str]:
        return ["--address", self.address, "--tls-ca", str(self.authority.certificate)]


@pytest.fixture(scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority, token = Authority(directory / "pki"), new_token()
    cert, key = authority.issue("server")
    tokens = directory / "tokens"
    tokens.write_text(f"{token_hash(token).hex()} the tests\n")
    model = str(tiny.save_model(directory / "model"))
    options = {"model": model, "draft_model": model, "dtype": "float32", "draft_dtype": "float32", "threads": 1}
    options |= {"max_model_len": 256, "draft_max_model_len": 256}
    options |= {"tls_cert": str(cert), "tls_key": str(key), "auth_tokens": str(tokens), "log_level": "debug"}
    secured = Secured("", authority, token)
    stack = Stack({**options, "listen": "127.0.0.1:0"}, on_line=lambda _, line: secured.lines.append(line))
    async with stack:
        secured.address = stack.address
        yield secured


def run(*arguments: str, token: str | None = None, text: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=text, env={"FOREDRAFT_TOKEN": token})


def test_generate_and_chat_get_in_with_the_authority_and_the_token(secured: Secured) -> None:
    result = run("generate", "Once", "--max-new-tokens", "3", *secured.flags, token=secured.token)
    assert result.exit_code == 0, result.stderr
    result = run("chat", "--max-new-tokens", "3", *secured.flags, token=secured.token, text="Hello\n")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", [["generate", "Once"], ["chat"]])
def test_what_is_missing_is_said(secured: Secured, command: list[str], tmp_path: Path) -> None:
    def message(*flags: str, token: str | None = secured.token) -> str:
        result = run(*command, *flags, token=token)
        assert result.exit_code in (1, 2)
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "if it speaks TLS, give --tls-ca" in message("--address", secured.address)
    assert "environment variable FOREDRAFT_TOKEN" in message(*secured.flags, token=None)
    assert "not one of those" in message(*secured.flags, token=new_token())
    other = Authority(tmp_path / "other").certificate
    assert "do not fit together" in message("--address", secured.address, "--tls-ca", str(other))
    assert "tls_ca: cannot read" in message("--address", secured.address, "--tls-ca", "/nonexistent")


async def test_logs_have_neither_text_nor_tokens(secured: Secured) -> None:
    secret, wrong = secrets.token_hex(8), new_token()
    async with AsyncClient(secured.address, tls_ca=secured.authority.certificate, token=secured.token) as client:
        generated = await client.generate(f"{secret} Once upon a time", max_new_tokens=20, temperature=0, logprobs=2)
        await client.generate(messages=[{"role": "user", "content": secret}], max_new_tokens=5, sample_count=2)
        await client.tokenize(secret)
        for refused in (
            client.generate(secret, temperature=-1),
            client.generate(secret * 1000, max_new_tokens=5),
            client.generate(secret, stop=[secret] * 100),
        ):
            with pytest.raises(GenerationError):
                await refused
        stream = client.stream(secret, max_new_tokens=200, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        request = await client.generate("the last", request_id="the-last-one", max_new_tokens=1)
        assert request.request_id == "the-last-one"
    async with AsyncClient(secured.address, tls_ca=secured.authority.certificate, token=wrong) as client:
        with pytest.raises(GenerationError):
            await client.generate(secret)
    while not any("the-last-one" in line for line in secured.lines):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    logs = os.linesep.join(secured.lines)
    for text in (secret, secured.token, wrong, generated.text, token_hash(secured.token).hex()):
        assert text not in logs
