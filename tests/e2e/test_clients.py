"""Clients that know nothing but the published protos, or not even those."""

import json
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from orchestrator.client import Client
from tests.e2e.conftest import Tiny

NODE = Path(__file__).parent.parent.parent / "examples" / "node"
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


@pytest.fixture(scope="module")
def node() -> Path:
    """The Node example with its packages installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent"]
    installed = subprocess.run(command, cwd=NODE, capture_output=True, text=True, timeout=240, check=False)
    assert installed.returncode == 0, installed.stderr
    return NODE


def run_node(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["node", "generate.js", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)


def test_node_streams_the_same_text_with_nothing_but_the_protos(stacks: Tiny, node: Path) -> None:
    address = stacks.orchestrators["good"].address
    result = run_node(node, address, "Once upon", "20")
    assert result.returncode == 0, result.stderr
    with Client(address) as client:
        assert result.stdout == client.generate("Once upon", temperature=0, max_new_tokens=20).text
    assert "draft tokens accepted" in result.stderr


def test_node_sees_what_was_wrong_with_a_request(stacks: Tiny, node: Path) -> None:
    result = run_node(node, stacks.orchestrators["good"].address, "Once upon", "0")
    assert result.returncode == 1
    assert "INVALID_ARGUMENT" in result.stderr
    assert "max_new_tokens" in result.stderr
