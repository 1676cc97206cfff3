"""The command line: help, what it refuses, and what it does with real services on a tiny model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from foredraft.cli import app, up
from foredraft.cli.up import OnStack, Stack
from foredraft.serving.server import Server
from tests import tiny

COMMANDS = ("up", "generate", "chat", "demo", "top", "target-server", "draft-server", "orchestrator", "token")
NOTHING_THERE = "unix:/nonexistent/foredraft.sock"


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
async def address(model: Path) -> AsyncIterator[str]:
    async with Stack({"model": str(model), "dtype": "float32", "threads": 1, "listen": "127.0.0.1:0"}) as stack:
        yield stack.address


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert run(command, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["up"], "model is required"),
        (
            ["up", "--model", "m", "--max-draft-tokens", "65"],
            "max_draft_tokens: input should be less than or equal to 64",
        ),
        (["up", "--model", "m", "--config", "/nonexistent.yaml"], "cannot read the configuration"),
        (["target-server", "--model", "m", "--listen", "nowhere"], "target_listen: must be host:port"),
        (["draft-server", "--speculative-config", '{"method": "medusa"}'], "is medusa, which foredraft does not have"),
        (["generate", "x", "--backend", "hf"], "needs --model"),
        (["generate", "x", "--backend", "manual", "--model", "m", "--stop", "x"], "has no stop"),
        (["generate", "x", "--model", "m"], "leave --model and --draft-model out"),
        (["generate", "x", "--logit-bias", "a=b"], "must be a token id and a number"),
        (["demo", "--draft", "self-prune:x"], "self-prune needs a number of layers"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("foredraft.default_model.ensure", lambda: tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_flag_names_the_nearest() -> None:
    result = run("up", "--max-draft-token", "3")
    assert result.exit_code == 2
    assert "--max-draft-tokens" in result.stderr


def test_up_refuses_addresses_of_servers_that_run_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_TARGET", "127.0.0.1:1")
    result = run("up", "--model", "m")
    assert result.exit_code == 2
    assert "up starts its own" in result.stderr


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_without_a_server_it_says_how_to_start_one(command: list[str]) -> None:
    result = run(*command, "--address", NOTHING_THERE)
    assert result.exit_code == 1
    assert "foredraft up --model" in result.stderr


async def test_another_servers_address_is_told_from_an_orchestrators() -> None:
    server = Server("127.0.0.1:0", [])  # as the target's or the draft's: without the service that is asked for
    await server.start()
    await server.set_serving()
    for command in (["generate", "x"], ["chat"]):
        result = await asyncio.to_thread(run, *command, "--address", server.address)
        assert result.exit_code == 1
        assert f"what answers at {server.address} is no orchestrator" in result.stderr
    await server.stop()


def test_generate_prints_the_text(address: str) -> None:
    options = ["--address", address, "--seed", "1", "--max-new-tokens", "8", "--ignore-eos"]
    argument = run("generate", "The quick", *options)
    assert argument.exit_code == 0, argument.stderr
    assert argument.stdout.strip()
    assert run("generate", *options, text="The quick").stdout == argument.stdout
    assert run("generate", "The quick", *options, "--mode", "plain").stdout == argument.stdout


def test_generate_as_json(address: str) -> None:
    result = run(
        *("generate", "The quick", "--address", address, "--json", "--seed", "1", "--max-new-tokens", "5"),
        *("--ignore-eos", "--sample-count", "2", "--logprobs", "1", "--temperature", "0"),
    )
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["seed"] == 1
    assert [len(completion["token_ids"]) for completion in answer["completions"]] == [5, 5]
    # At temperature 0, which must not be lost for being 0, every token is the most probable one.
    for completion in answer["completions"]:
        assert all(entry["chosen"] == entry["top"][0] for entry in completion["logprobs"])


def test_generate_names_the_fields_that_a_server_refuses(address: str) -> None:
    result = run("generate", "x", "--address", address, "--top-p", "2", "--temperature", "-1")
    assert result.exit_code == 2
    assert "top_p is 2" in result.stderr
    assert "temperature is -1" in result.stderr


@pytest.mark.parametrize("backend", ["hf", "manual"])
def test_other_backends_generate_the_same_greedy_text(backend: str, address: str, model: Path) -> None:
    options = ["--temperature", "0", "--max-new-tokens", "8", "--ignore-eos"]
    served = run("generate", "The quick", "--address", address, *options)
    models = ["--model", str(model), "--draft-model", str(model), "--dtype", "float32"]
    here = run("generate", "The quick", "--backend", backend, *models, *options)
    assert here.exit_code == 0, here.stderr
    assert here.stdout == served.stdout


def test_chat_keeps_the_conversation_until_reset(address: str) -> None:
    options = ["--address", address, "--seed", "1", "--max-new-tokens", "6", "--ignore-eos"]
    once = run("chat", *options, text="Hello\n/quit\n")
    assert once.exit_code == 0, once.stderr
    again = run("chat", *options, text="Hello\n/reset\nHello\n")
    assert again.stdout == once.stdout * 2
    assert run("chat", *options, text="Hello\nHello\n").stdout != again.stdout
    assert "6 tokens" in once.stderr


def test_chat_goes_on_after_an_answer_without_text(address: str) -> None:
    eos = tiny.tokenizer().eos_token_id
    result = run("chat", "--address", address, "--logit-bias", f"{eos}=1000", text="Hello\nHello\n")
    assert result.exit_code == 0
    assert result.stderr.count("1 tokens") == 2
    assert "error" not in result.stderr


def test_chat_fails_if_the_last_message_did(address: str) -> None:
    refused = run("chat", "--address", address, "--top-p", "2", text="Hello\nHello\n")
    assert refused.exit_code == 1
    assert refused.stderr.count("top_p is 2") == 2
    assert run("chat", "--address", address, "--top-p", "2", text="Hello\n/reset\n").exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("command", [["generate", "x"], ["generate", "x", "--json"], ["chat"], ["--help"]])
def test_output_that_cannot_be_written_is_told_in_a_sentence(command: list[str], address: str) -> None:
    options = [] if command == ["--help"] else ["--address", address, "--max-new-tokens", "3"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "foredraft.cli", *command, *options],
            input="Hello\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "error: the output cannot be written: No space left on device"
    assert "Traceback" not in result.stderr


def test_chat_says_what_no_request_can_hold(address: str) -> None:
    result = run("chat", "--address", address, "--seed", "-1", text="Hello\n")
    assert result.exit_code == 2
    assert "seed: " in result.stderr
    assert "Traceback" not in result.stderr


async def test_a_second_ctrl_c_hurries_the_services_that_measure(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = [Stack({"model": str(model), "listen": "127.0.0.1:0"}) for _ in range(2)]
    hurried = asyncio.Event()
    monkeypatch.setattr(stacks[1].supervisor, "hurry", hurried.set)

    async def first(on_stack: OnStack) -> None:
        on_stack(stacks[1])
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:  # As long as services stop.
            os.kill(os.getpid(), signal.SIGINT)
            async with asyncio.timeout(10):
                await hurried.wait()

    try:
        assert await up.run(stacks[0], up.Display(Console(stderr=True)), first) == 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_ctrl_c_stops_the_services_in_order_and_a_dead_one_stops_all(model: Path) -> None:
    command = [sys.executable, "-m", "foredraft.cli", "up", "--model", str(model), "--listen", "127.0.0.1:0"]

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        assert process.stdout is not None
        assert "foredraft serves on 127.0.0.1:" in process.stdout.readline()
        return process

    process = start()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    stopped = [line.split()[0] for line in errors.splitlines() if line.endswith("stopped") and ":" not in line]
    assert stopped == ["orchestrator", "draft", "target"]

    process = start()
    children = psutil.Process(process.pid).children()
    [draft] = [child for child in children if "draft-server" in child.cmdline()]
    draft.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: draft was ended by signal 9" in errors
    assert not any(child.is_running() for child in children)
