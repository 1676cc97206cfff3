"""A server with nothing behind it, as a process: `python -m tests.serving.tiny_server ADDRESS GRACE_S [hang]`."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from foredraft.errors import Violation, invalid
from foredraft.serving.logs import configure_logging
from foredraft.serving.server import Server, run
from foredraft.v1 import generation_pb2, generation_pb2_grpc, target_pb2, target_pb2_grpc

SERVICES = ("foredraft.v1.GenerationService", "foredraft.v1.TargetService")


class TinyGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Generate fails as the prompt's text says; GenerateStream counts."""

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> generation_pb2.GenerateResponse:
        if request.text == "invalid":
            raise invalid([Violation("sampling.top_p", "must be in (0, 1], is 2"), Violation("text", "must be longer")])
        if request.text == "invalid everywhere":
            raise invalid([Violation(f"field_{index:030}", "d" * 1000) for index in range(1000)])
        if request.text.startswith("broken"):
            raise KeyError(request.text)
        return generation_pb2.GenerateResponse(request_id=request.request_id)

    async def GenerateStream(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateStreamResponse]:
        for index in range(3):
            yield generation_pb2.GenerateStreamResponse(chunk=generation_pb2.Chunk(sample_index=index))
        if request.text == "invalid":
            raise invalid([Violation("text", "must be longer")])


class TinyTarget(target_pb2_grpc.TargetServiceServicer):
    """Verify echoes round ids; `released` is set whenever a session has been freed."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def Verify(
        self, request_iterator: AsyncIterator[target_pb2.VerifyRequest], context: Any
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
        try:
            async for request in request_iterator:
                if request.HasField("close"):
                    return
                yield target_pb2.VerifyResponse(verdict=target_pb2.Verdict(round_id=request.round.round_id))
        finally:
            self.released.set()


def add_services(server: Server) -> TinyTarget:
    target = TinyTarget()
    server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, TinyGeneration())
    server.add(target_pb2_grpc.add_TargetServiceServicer_to_server, target)
    return target


async def main(address: str, grace_s: float, *, hang: bool) -> int:
    server = Server(address, SERVICES, grace_s=grace_s)
    await server.start()
    print(server.address, flush=True)
    if hang:
        await asyncio.to_thread(threading.Event().wait)
    add_services(server)
    await server.set_serving()
    return await server.wait()


if __name__ == "__main__":
    configure_logging("info")
    sys.exit(run(main(sys.argv[1], float(sys.argv[2]), hang="hang" in sys.argv)))
