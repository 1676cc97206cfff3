"""Between the contract's messages and what drafters take and answer."""

from draft_service.drafter import Continuation, Opening, Prepared, Proposal
from foredraft.errors import failed_precondition
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.proposal import SparseQ
from foredraft.v1 import common_pb2, draft_pb2


def opening(message: draft_pb2.OpenDraft, params: SamplingParams) -> Opening:
    """What a checked message says."""
    return Opening(
        text=list(message.token_ids),
        prompt_length=message.prompt_length,
        sample_index=message.sample_index,
        params=params,
        eos_token_ids=frozenset(message.eos_token_ids),
    )


def check_fits(base: int, added: int, *, length: int, opening: Opening) -> None:
    """Raises RequestError FAILED_PRECONDITION if `added` tokens after `base` do not fit a text of `length` tokens."""
    if base > length:
        raise failed_precondition(f"base is {base}; the session's text has {length} tokens")
    if base < opening.prompt_length:
        raise failed_precondition(f"base is {base}; the prompt has {opening.prompt_length} tokens and is final")
    output, most = base + added - opening.prompt_length, opening.params.max_new_tokens
    if output > most:
        raise failed_precondition(f"the output would have {output} tokens; max_new_tokens is {most}")


def response(answer: Proposal | Prepared) -> draft_pb2.DraftResponse:
    """The message for a drafter's answer."""
    if isinstance(answer, Prepared):
        continuations = map(_continuation, answer.continuations)
        return draft_pb2.DraftResponse(
            prepared=draft_pb2.Prepared(round_id=answer.round_id, continuations=continuations)
        )
    proposal = draft_pb2.Proposal(
        base=answer.base,
        token_ids=answer.token_ids,
        q=sparse_distributions(answer.q),
        compute_us=round(answer.compute_s * 1e6),
        queue_us=round(answer.queue_s * 1e6),
        prepared_token_count=answer.prepared_count,
    )
    return draft_pb2.DraftResponse(proposal=proposal)


def _continuation(continuation: Continuation) -> draft_pb2.Continuation:
    return draft_pb2.Continuation(
        accepted=continuation.accepted,
        next_token=continuation.next_token,
        token_ids=continuation.token_ids,
        q=sparse_distributions(continuation.q),
    )


def sparse_distributions(q: SparseQ | None) -> common_pb2.SparseDistributions | None:
    """Packed little-endian. `q` is on the CPU: this runs in the event loop, which must not wait for a device."""
    if q is None:
        return None
    return common_pb2.SparseDistributions(
        support=q.token_ids.shape[1],
        token_ids=q.token_ids.numpy().astype("<u4").tobytes(),
        probabilities=q.probabilities.numpy().astype("<f4").tobytes(),
    )
