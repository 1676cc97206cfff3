"""The orchestrator as a server."""

import asyncio

import grpc

from foredraft.serving.auth import Tokens, TokensError
from foredraft.serving.server import Server, StartError
from foredraft.serving.tls import TlsError
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import generation_pb2, generation_pb2_grpc
from orchestrator.backends import Backends, PairError
from orchestrator.decode import Decoder
from orchestrator.metrics import Failovers, Metrics
from orchestrator.service import GenerationServicer
from orchestrator.tokenizer import Tokenizer, TokenizerError

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


async def main(settings: OrchestratorSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Not ready until the target has answered.

    Raises StartError if the address cannot be had, the draft does not fit or the tokenizer cannot be used.
    """
    try:
        tokens = Tokens(settings.auth_tokens) if settings.auth_tokens is not None else None
    except TokensError as error:
        raise StartError(str(error)) from error
    server = Server.configured(settings, [SERVICE], tokens)
    await server.start()
    try:
        backends = Backends(settings)
    except TlsError as error:
        await server.stop()
        raise StartError(str(error)) from error
    server.metrics.register(
        Failovers(lambda: {"target": backends.targets.failovers, "draft": backends.drafts.failovers})
    )
    tracing = server.tracing if settings.trace_rounds else None
    metrics = Metrics(server.metrics, tracing.tracer if tracing is not None else None)
    try:
        servicer = await _connect(backends, settings, metrics)
        server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, servicer)
        await server.set_serving()
        return await server.wait()
    except BaseException:
        await server.stop()
        raise
    finally:
        await backends.close()


async def _connect(backends: Backends, settings: OrchestratorSettings, metrics: Metrics) -> GenerationServicer:
    try:
        await backends.connect()
        tokenizer = await asyncio.to_thread(Tokenizer, await backends.fetch_tokenizer())
    except (PairError, TokenizerError) as error:
        raise StartError(str(error)) from error
    except grpc.aio.AioRpcError as error:
        raise StartError(
            f"the target at {', '.join(settings.target)} did not give its tokenizer: {error.details()}"
        ) from error
    return GenerationServicer(tokenizer, Decoder(backends, settings), backends, settings, metrics)
