"""From the messages of a session to what the scheduler takes. Pure functions."""

import torch

from foredraft.errors import failed_precondition
from foredraft.sampling.proposal import SparseQ
from foredraft.v1 import common_pb2, target_pb2
from foredraft.validation import check_open_target, check_round
from target_service.session import Limits, Session, finish, useful_draft_length


def open_session(message: target_pb2.OpenTarget, limits: Limits) -> Session:
    """The session that `message` starts.

    Raises RequestError: INVALID_ARGUMENT naming every bad field; FAILED_PRECONDITION if the output to resume has ended.
    """
    params = check_open_target(message, vocabulary_size=limits.vocabulary_size, context_length=limits.context_length)
    prompt_length = message.prompt_length
    output = message.token_ids[prompt_length:]
    ended_at, reason = finish(output, length=prompt_length, prompt_length=prompt_length, params=params, limits=limits)
    if reason:
        name = common_pb2.FinishReason.Name(reason)
        raise failed_precondition(
            f"token {ended_at} of the {len(output)} output tokens to resume from ended the sample ({name}); "
            "resume only samples that have not ended"
        )
    return Session(
        text=list(message.token_ids),
        prompt_length=prompt_length,
        sample_index=message.sample_index,
        params=params,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def read_round(
    message: target_pb2.Round, session: Session, limits: Limits, *, last_round_id: int
) -> tuple[list[int], SparseQ | None]:
    """The draft tokens of `message` that can still be of use, and what they were drawn from, if that matters.

    Raises RequestError: FAILED_PRECONDITION for a round that does not fit the session; INVALID_ARGUMENT for bad fields.
    """
    if session.finish_reason:
        name = common_pb2.FinishReason.Name(session.finish_reason)
        raise failed_precondition(f"the sample has ended ({name}) and takes no more rounds")
    if message.round_id <= last_round_id:
        raise failed_precondition(f"round_id is {message.round_id}; must be greater than the last, {last_round_id}")
    if message.base != len(session.text):
        raise failed_precondition(f"base is {message.base}; must be {len(session.text)}, the length of the text")
    decoded = check_round(message, session.params, vocabulary_size=limits.vocabulary_size)
    draft = message.token_ids[: useful_draft_length(session, limits)]
    if decoded is None or not draft:
        return draft, None
    token_ids, probabilities = (torch.from_numpy(array[: len(draft)]) for array in decoded)
    return draft, SparseQ(token_ids, probabilities)
