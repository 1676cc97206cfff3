"""The services behind the orchestrator: channels, identities, and whether the draft fits the target."""

# The stubs' asyncio classes exist for type checkers only.
from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import grpc

from foredraft.config import OrchestratorSettings
from foredraft.serving.channel import channel
from foredraft.serving.errors import unavailable
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

logger = logging.getLogger(__name__)

# Seconds a unary call to a healthy service may take at most.
CALL_TIMEOUT = 10.0
# Seconds between attempts to reach a service that is away.
RETRY_INTERVAL = 0.5
# The same for a draft that did not fit: somebody has to restart it with another model first.
PAIR_RETRY_INTERVAL = 10.0


class PairError(ValueError):
    """The draft does not fit the target."""


@dataclass(frozen=True)
class Draft:
    """A connected draft service. `model` is None if it drafts without one."""

    stub: draft_pb2_grpc.DraftServiceAsyncStub
    model: common_pb2.Model | None
    drafters: list[common_pb2.Drafter]


class Backends:
    """One target and at most one draft service.

    `draft` is None while there is none that fits, and `degraded_reason` says why.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._target_channel = channel(settings.target)
        self.target = target_pb2_grpc.TargetServiceStub(self._target_channel)
        self.target_model = common_pb2.Model()
        self.draft: Draft | None = None
        self.degraded_reason = "speculation is switched off"
        self._draft_lost = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Wait for the target, then look for the draft once and keep looking in the background.

        Raises PairError if a draft answers and does not fit: a pair that was given by mistake should not pass unseen.
        """
        while True:
            try:
                self.target_model = await self._get_target_model()
                break
            except grpc.aio.AioRpcError as error:
                logger.info("waiting for the target at %s: %s", self._settings.target, error.details())
                await asyncio.sleep(RETRY_INTERVAL)
        if self._settings.draft is None or not self._settings.speculation_enabled:
            return
        stub = draft_pb2_grpc.DraftServiceStub(channel(self._settings.draft))
        await self._connect_draft(stub)
        self._watcher = asyncio.create_task(self._watch_draft(stub))

    async def close(self) -> None:
        """Close the channels."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self._target_channel.close()

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """The target's tokenizer files by name."""
        files: dict[str, bytes] = {}
        async for part in self.target.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=CALL_TIMEOUT):
            files[part.file_name] = files.get(part.file_name, b"") + part.data
        return files

    async def wait_for_target(self) -> None:
        """Return when the target that was lost is back.

        Raises RequestError UNAVAILABLE if another model answers instead.
        """
        while True:
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                model = await self._get_target_model()
            except grpc.aio.AioRpcError:
                continue
            if model.weights_hash != self.target_model.weights_hash:
                raise unavailable(
                    f"the target came back with other weights ({model.weights_hash[:12]}, expected "
                    f"{self.target_model.weights_hash[:12]}); restart the orchestrator to use them",
                    self._settings.target_wait_s,
                )
            return

    def draft_failed(self, error: grpc.aio.AioRpcError) -> None:
        """Report that a session on the draft ended with this error, so that new ones wait until it is back.

        A masked status (see `orchestrator.target.is_lost`) may also mean that just this session was refused: the next
        one will tell.
        """
        if error.code() is grpc.StatusCode.UNAVAILABLE and self.draft is not None:
            logger.warning("draft service lost, decoding goes on plainly: %s", error.details())
            self.degraded_reason = f"the draft service was lost: {error.details()}"
            self.draft = None
            self._draft_lost.set()

    async def _get_target_model(self) -> common_pb2.Model:
        response = await self.target.GetModel(target_pb2.TargetServiceGetModelRequest(), timeout=CALL_TIMEOUT)
        return response.model

    async def _watch_draft(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        while True:
            if self.draft is not None:
                await self._draft_lost.wait()
                self._draft_lost.clear()
            await asyncio.sleep(RETRY_INTERVAL)
            try:
                await self._connect_draft(stub)
            except PairError as error:
                self.degraded_reason = str(error)
                await asyncio.sleep(PAIR_RETRY_INTERVAL)

    async def _connect_draft(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> None:
        try:
            response = await stub.GetModel(draft_pb2.DraftServiceGetModelRequest(), timeout=CALL_TIMEOUT)
            model = response.model if response.HasField("model") else None
            if model is not None and model.vocabulary_hash != self.target_model.vocabulary_hash:
                raise PairError(await self._difference(stub, model))
        except grpc.aio.AioRpcError as error:
            self.degraded_reason = f"the draft service cannot be reached: {error.details()}"
            return
        logger.info("drafting with %s", model.name if model is not None else "n-grams of the text")
        self.draft = Draft(stub, model, list(response.drafters))
        self.degraded_reason = ""

    async def _difference(self, stub: draft_pb2_grpc.DraftServiceAsyncStub, draft: common_pb2.Model) -> str:
        """Say in a sentence where the two vocabularies differ first."""
        target = self.target_model
        ours, theirs = await asyncio.gather(_vocabulary(self.target), _vocabulary(stub))
        pairs = enumerate(zip(ours, theirs, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        a, b = (repr(tokens[first]) if first < len(tokens) else "missing" for tokens in (ours, theirs))
        return (
            f"the draft {draft.name} (vocabulary {draft.vocabulary_hash[:12]}) does not fit the target {target.name} "
            f"(vocabulary {target.vocabulary_hash[:12]}): token {first} is {a} for the target and {b} for the draft; "
            "choose a draft with the target's tokenizer"
        )


async def _vocabulary(
    stub: target_pb2_grpc.TargetServiceAsyncStub | draft_pb2_grpc.DraftServiceAsyncStub,
) -> list[str]:
    tokens: list[str] = []
    page = ""
    while True:
        response = await stub.ListVocabulary(common_pb2.ListVocabularyRequest(page_token=page), timeout=CALL_TIMEOUT)
        tokens += response.tokens
        page = response.next_page_token
        if not page:
            return tokens
