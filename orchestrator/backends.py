"""The services behind the orchestrator: their replicas, identities, and whether a draft fits the target."""

# The stubs' asyncio classes exist for type checkers only.
from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TypeAlias

from foredraft.serving.tls import ClientTls
from foredraft.settings import OrchestratorSettings
from foredraft.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from orchestrator.replicas import Replica, Replicas, UnfitError

logger = logging.getLogger(__name__)

# Seconds a unary call to a healthy service may take at most.
CALL_TIMEOUT = 10.0


class PairError(UnfitError):
    """The draft does not fit the target."""


@dataclass(frozen=True)
class Draft:
    """What a draft service is. `model` is None if it drafts without one."""

    model: common_pb2.Model | None
    drafters: list[common_pb2.Drafter]


TargetReplica: TypeAlias = "Replica[target_pb2_grpc.TargetServiceAsyncStub, common_pb2.Model]"
DraftReplica: TypeAlias = "Replica[draft_pb2_grpc.DraftServiceAsyncStub, Draft]"


class Backends:
    """The replicas of one target, and those of draft services if there are any. Create it inside the event loop.

    The first target that answers decides `target_model`; others are its replicas if weights, type and context length
    are the same, and are not used if they are not. Raises TlsError for files that cannot be used.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        tls = None
        if settings.tls_ca is not None:
            tls = ClientTls(settings.tls_ca, settings.tls_client_cert, settings.tls_client_key)
        self.target_model = common_pb2.Model()
        self._speculates = settings.draft is not None and settings.speculation_enabled
        self.targets = Replicas(
            settings.target,
            target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
            target_pb2_grpc.TargetServiceStub,
            self._admit_target,
            lambda model: model.max_sessions,
            tls,
        )
        self.drafts = Replicas(
            (settings.draft or ()) if self._speculates else (),
            draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
            draft_pb2_grpc.DraftServiceStub,
            self._admit_draft,
            lambda draft: draft.model.max_sessions if draft.model is not None else 0,
            tls,
        )

    async def connect(self) -> None:
        """Wait for a target, then look for the drafts once and keep looking in the background.

        Raises PairError if a draft answers and does not fit: a pair that was given by mistake should not pass unseen.
        """
        self.targets.start()
        told = ""
        while not self.targets.usable:
            if self.targets.reason != told:
                told = self.targets.reason
                logger.info("waiting for the target: %s", told)
            await self.targets.wait()
        self.drafts.start()
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                while any(not replica.tried for replica in self.drafts.all.values()):
                    await self.drafts.wait()
        except TimeoutError:
            logger.warning("no answer from all draft services yet: %s", self.drafts.reason)
        unfit = [replica for replica in self.drafts.all.values() if replica.unfit]
        if unfit:
            raise PairError(unfit[0].reason)

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(self.targets.close(), self.drafts.close())

    @property
    def draft(self) -> Draft | None:
        """What drafts, if any draft service can be used now."""
        usable = self.drafts.usable
        return usable[0].admitted if usable else None

    @property
    def degraded_reason(self) -> str:
        """Why there is no speculation; empty if there is."""
        if not self._speculates:
            return "speculation is switched off"
        return "" if self.drafts.usable else f"no draft service can be used: {self.drafts.reason}"

    async def fetch_tokenizer(self) -> dict[str, bytes]:
        """The target's tokenizer files by name."""
        while not self.targets.usable:  # It may have gone while the drafts were waited for.
            await self.targets.wait()
        files: dict[str, bytes] = {}
        stub = self.targets.usable[0].stub
        async for part in stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=CALL_TIMEOUT):
            files[part.file_name] = files.get(part.file_name, b"") + part.data
        return files

    async def _admit_target(self, stub: target_pb2_grpc.TargetServiceAsyncStub) -> common_pb2.Model:
        response = await stub.GetModel(target_pb2.TargetServiceGetModelRequest(), timeout=CALL_TIMEOUT)
        model, known = response.model, self.target_model
        if not known.weights_hash:
            self.target_model = model
        elif model.weights_hash != known.weights_hash:
            raise UnfitError(
                f"has other weights ({model.weights_hash[:12]}, expected {known.weights_hash[:12]}); restart the "
                "orchestrator to use them"
            )
        elif (model.dtype, model.context_length) != (known.dtype, known.context_length):
            raise UnfitError(
                f"computes in {model.dtype or 'an unknown type'} with a context of {model.context_length}, and the "
                f"other targets in {known.dtype or 'an unknown type'} with {known.context_length}"
            )
        return model

    async def _admit_draft(self, stub: draft_pb2_grpc.DraftServiceAsyncStub) -> Draft:
        response = await stub.GetModel(draft_pb2.DraftServiceGetModelRequest(), timeout=CALL_TIMEOUT)
        model = response.model if response.HasField("model") else None
        if model is not None and model.vocabulary_hash != self.target_model.vocabulary_hash:
            raise PairError(await self._difference(stub, model))
        logger.info("drafting with %s", model.name if model is not None else "n-grams of the text")
        return Draft(model, list(response.drafters))

    async def _difference(self, stub: draft_pb2_grpc.DraftServiceAsyncStub, draft: common_pb2.Model) -> str:
        """Say in a sentence that the two vocabularies differ and, if a target can be asked, where they do first."""
        target, where = self.target_model, ""
        if self.targets.usable:
            ours, theirs = await asyncio.gather(_vocabulary(self.targets.usable[0].stub), _vocabulary(stub))
            pairs = enumerate(zip(ours, theirs, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            a, b = (repr(tokens[first]) if first < len(tokens) else "missing" for tokens in (ours, theirs))
            where = f": token {first} is {a} for the target and {b} for the draft"
        return (
            f"the draft {draft.name} (vocabulary {draft.vocabulary_hash[:12]}) does not fit the target {target.name} "
            f"(vocabulary {target.vocabulary_hash[:12]}){where}; choose a draft with the target's tokenizer"
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
