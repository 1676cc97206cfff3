"""The containers' health check: `healthcheck.py host:port` exits with 0 if a gRPC server there reports SERVING."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main(address: str) -> int:
    """Ask for the whole server's health; returns the exit code and prints what is wrong."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return int(status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
