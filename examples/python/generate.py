"""Streams one completion. Usage: python generate.py [--tls-ca FILE] ADDRESS PROMPT [MAX_NEW_TOKENS]"""

import argparse
import os
import sys
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from foredraft.v1 import common_pb2, generation_pb2, generation_pb2_grpc


def connect(address: str, tls_ca: Path | None) -> grpc.Channel:
    """A channel; the token of the environment is sent through TLS only."""
    if tls_ca is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes())
    if token := os.environ.get("FOREDRAFT_TOKEN"):
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
    return grpc.secure_channel(address, credentials)


def explain(error: grpc.RpcError) -> None:
    """Status and message, and what was wrong with which field."""
    print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            for violation in bad_request.field_violations:
                print(f"  {violation.field}: {violation.description}", file=sys.stderr)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tls-ca", type=Path)
    parser.add_argument("address")
    parser.add_argument("prompt")
    parser.add_argument("max_new_tokens", type=int, nargs="?", default=32)
    arguments = parser.parse_args()
    request = generation_pb2.GenerateRequest(
        text=arguments.prompt, sampling=common_pb2.Sampling(seed=1, max_new_tokens=arguments.max_new_tokens)
    )
    with connect(arguments.address, arguments.tls_ca) as channel:
        stream = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request, timeout=300)
        try:
            for message in stream:
                if message.HasField("chunk"):
                    print(message.chunk.text, end="", flush=True)
                elif message.HasField("completed"):
                    usage, statistics = message.completed.usage, message.completed.statistics
                    print(
                        f"\n{usage.completion_token_count} tokens in {statistics.rounds} rounds, "
                        f"{statistics.accepted} of {statistics.drafted} draft tokens accepted",
                        file=sys.stderr,
                    )
        except KeyboardInterrupt:
            stream.cancel()
            return 130
        except grpc.RpcError as error:
            explain(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
