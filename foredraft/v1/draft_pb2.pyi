from foredraft.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("open", "commit", "verifying", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenDraft
    commit: Commit
    verifying: Verifying
    close: CloseDraft
    def __init__(self, open: _Optional[_Union[OpenDraft, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., verifying: _Optional[_Union[Verifying, _Mapping]] = ..., close: _Optional[_Union[CloseDraft, _Mapping]] = ...) -> None: ...

class OpenDraft(_message.Message):
    __slots__ = ("token_ids", "prompt_length", "sample_index", "sampling", "drafter", "eos_token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sample_index: int
    sampling: _common_pb2.Sampling
    drafter: _common_pb2.Drafter
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sample_index: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., drafter: _Optional[_Union[_common_pb2.Drafter, str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("base", "token_ids", "max_tokens")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    def __init__(self, base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class Verifying(_message.Message):
    __slots__ = ("round_id", "base", "token_ids", "max_tokens", "min_tokens", "commit")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    commit: Commit
    def __init__(self, round_id: _Optional[int] = ..., base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class CloseDraft(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("proposal", "prepared")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    proposal: Proposal
    prepared: Prepared
    def __init__(self, proposal: _Optional[_Union[Proposal, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("base", "token_ids", "q", "compute_us", "queue_us", "prepared_token_count")
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREPARED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    q: _common_pb2.SparseDistributions
    compute_us: int
    queue_us: int
    prepared_token_count: int
    def __init__(self, base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_common_pb2.SparseDistributions, _Mapping]] = ..., compute_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., prepared_token_count: _Optional[int] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("round_id", "continuations")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    def __init__(self, round_id: _Optional[int] = ..., continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("accepted", "next_token", "token_ids", "q")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    next_token: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    q: _common_pb2.SparseDistributions
    def __init__(self, accepted: _Optional[int] = ..., next_token: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., q: _Optional[_Union[_common_pb2.SparseDistributions, _Mapping]] = ...) -> None: ...

class DraftServiceGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelResponse(_message.Message):
    __slots__ = ("model", "drafters", "default_drafter")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.Model
    drafters: _containers.RepeatedScalarFieldContainer[_common_pb2.Drafter]
    default_drafter: _common_pb2.Drafter
    def __init__(self, model: _Optional[_Union[_common_pb2.Model, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[_common_pb2.Drafter, str]]] = ..., default_drafter: _Optional[_Union[_common_pb2.Drafter, str]] = ...) -> None: ...
