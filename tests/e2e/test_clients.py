"""Clients that know nothing but the published protos, or not even those."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from foredraft.serving.auth import new_token, token_hash
from orchestrator.client import Client
from tests.e2e import processes
from tests.e2e.conftest import Tiny
from tests.serving.pki import Authority

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
GENERATE = "/foredraft.v1.GenerationService/Generate"


@pytest.mark.parametrize(
    ("which", "service"), [("orchestrator", "Generation"), ("target", "Target"), ("draft", "Draft")]
)
def test_reflection_lists_each_service_with_health(stacks: Tiny, which: str, service: str) -> None:
    server = {"orchestrator": stacks.orchestrators["good"], "target": stacks.target, "draft": stacks.drafts["good"]}
    with grpc.insecure_channel(server[which].address) as channel:
        listed = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert listed >= {
        f"foredraft.v1.{service}Service",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_a_client_without_stubs_can_call_by_reflection(stacks: Tiny) -> None:
    """What grpcurl does: ask for the descriptors, build the request from JSON, call, print the answer as JSON."""
    address = stacks.orchestrators["good"].address
    with grpc.insecure_channel(address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("foredraft.v1.GenerationService").FindMethodByName("Generate")
        request = json_format.Parse(
            '{"text": "Once upon", "sampling": {"temperature": 0, "maxNewTokens": 12}}',
            GetMessageClass(method.input_type)(),
        )
        call = channel.unary_unary(
            GENERATE,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = json.loads(json_format.MessageToJson(call(request, timeout=60)))
    with Client(address) as client:
        expected = client.generate("Once upon", temperature=0, max_new_tokens=12)
    assert answer["completions"][0]["text"] == expected.text
    assert answer["completions"][0]["completed"]["usage"]["completionTokenCount"] == len(
        expected.completions[0].token_ids
    )


@dataclass
class Example:
    """A client of `examples/` that is ready to run."""

    language: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment, "FOREDRAFT_TOKEN": token}
        return subprocess.run(
            [*self.command, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )


def succeed(*command: str, cwd: Path) -> None:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def python_example(build: Path) -> Example:
    shutil.copy(EXAMPLES / "python" / "generate.py", build)
    protos = ["foredraft/v1/common.proto", "foredraft/v1/generation.proto"]
    output = [f"--python_out={build}", f"--grpc_python_out={build}"]
    succeed(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *output, *protos, cwd=build)
    # With -S there is gRPC but not this project, which is installed through a .pth file.
    environment = {"PYTHONPATH": sysconfig.get_path("purelib")}
    return Example("python", [sys.executable, "-S", str(build / "generate.py")], environment)


def node_example(_: Path) -> Example:
    succeed("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent", cwd=EXAMPLES / "node")
    return Example("node", ["node", str(EXAMPLES / "node" / "generate.js")])


def made(language: str) -> Callable[[Path], Example]:
    """An example that has a Makefile."""

    def make(build: Path) -> Example:
        succeed("make", f"BUILD={build}", cwd=EXAMPLES / language)
        return Example(language, [str(build / "generate")])

    return make


# How each example is built, and the commands and files that it needs.
EXAMPLE_OF = {
    "python": (python_example, []),
    "node": (node_example, ["node", "npm"]),
    "cpp": (made("cpp"), ["c++", "pkg-config", "protoc", "grpc_cpp_plugin", "/usr/include/grpcpp/grpcpp.h"]),
    "go": (
        made("go"),
        ["go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc", "/usr/share/gocode/src/google.golang.org/grpc"],
    ),
    "java": (made("java"), ["javac", "protoc", "/usr/bin/grpc_java_plugin", "/usr/share/java/grpc-netty.jar"]),
}


@pytest.fixture(scope="module", params=list(EXAMPLE_OF))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The example in each language; skips where its toolchain is not installed."""
    build, needs = EXAMPLE_OF[request.param]
    missing = [need for need in needs if not (Path(need).exists() if need[0] == "/" else shutil.which(need))]
    if missing:
        pytest.skip(f"the {request.param} example needs {', '.join(missing)}; examples/README.md says what to install")
    return build(tmp_path_factory.mktemp(request.param))


def test_an_example_streams_the_text_that_its_seed_gives(stacks: Tiny, example: Example) -> None:
    address = stacks.orchestrators["good"].address
    result = example.run(address, "Once upon", "20")
    assert result.returncode == 0, result.stderr
    with Client(address) as client:
        assert result.stdout == client.generate("Once upon", seed=1, max_new_tokens=20).text
    assert "20 tokens in" in result.stderr
    assert "draft tokens accepted" in result.stderr


def test_an_example_tells_which_field_was_wrong(stacks: Tiny, example: Example) -> None:
    result = example.run(stacks.orchestrators["good"].address, "Once upon", "0")
    assert result.returncode == 1
    assert "sampling.max_new_tokens: is 0" in result.stderr
    violations = [line for line in result.stderr.splitlines() if line.startswith("  sampling.max_new_tokens: is 0")]
    assert len(violations) == (0 if example.language == "cpp" else 1)


@dataclass
class Guarded:
    """An orchestrator that wants TLS and a token."""

    address: str
    tls_ca: str
    token: str


@pytest.fixture(scope="module")
def guarded(stacks: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    authority, token = Authority(directory / "pki"), new_token()
    cert, key = authority.issue("server")
    tokens = directory / "tokens"
    tokens.write_text(f"{token_hash(token).hex()} the examples\n")
    server = processes.orchestrator(
        stacks.log("guarded"), stacks.target, None, tls_cert=cert, tls_key=key, auth_tokens=tokens
    )
    try:
        trust = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
        with grpc.secure_channel(server.address, trust) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            states = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=120)
            next(state for state in states if state.status == health_pb2.HealthCheckResponse.SERVING)
        yield Guarded(server.address, str(authority.certificate), token)
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_an_example_gets_in_with_the_authority_and_the_token_only(example: Example, guarded: Guarded) -> None:
    if example.language == "java":
        pytest.skip("the java example speaks no TLS, which Debian's Netty cannot")
    arguments = ["--tls-ca", guarded.tls_ca, guarded.address, "Once upon", "5"]
    let_in = example.run(*arguments, token=guarded.token)
    assert let_in.returncode == 0, let_in.stderr
    assert let_in.stdout
    refused = example.run(*arguments, token=new_token())
    assert refused.returncode == 1
    assert "not one of those that this server lets in" in refused.stderr
