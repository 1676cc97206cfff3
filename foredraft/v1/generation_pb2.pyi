import datetime

from foredraft.v1 import common_pb2 as _common_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_PLAIN: _ClassVar[Mode]
    MODE_SEQUENTIAL: _ClassVar[Mode]
    MODE_OVERLAPPED: _ClassVar[Mode]

class Reproducibility(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPRODUCIBILITY_UNSPECIFIED: _ClassVar[Reproducibility]
    REPRODUCIBILITY_SEED: _ClassVar[Reproducibility]
    REPRODUCIBILITY_SEED_AND_DRAFT: _ClassVar[Reproducibility]
    REPRODUCIBILITY_NONE: _ClassVar[Reproducibility]
MODE_UNSPECIFIED: Mode
MODE_PLAIN: Mode
MODE_SEQUENTIAL: Mode
MODE_OVERLAPPED: Mode
REPRODUCIBILITY_UNSPECIFIED: Reproducibility
REPRODUCIBILITY_SEED: Reproducibility
REPRODUCIBILITY_SEED_AND_DRAFT: Reproducibility
REPRODUCIBILITY_NONE: Reproducibility

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "drafter", "draft_tokens", "max_draft_tokens")
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    drafter: _common_pb2.Drafter
    draft_tokens: int
    max_draft_tokens: int
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., drafter: _Optional[_Union[_common_pb2.Drafter, str]] = ..., draft_tokens: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "sampling", "stop_strings", "include_stop_string", "sample_count", "logprobs", "keep_special_tokens", "speculation", "report_queue", "max_response_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REPORT_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: _common_pb2.Sampling
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    include_stop_string: bool
    sample_count: int
    logprobs: int
    keep_special_tokens: bool
    speculation: Speculation
    report_queue: bool
    max_response_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., include_stop_string: _Optional[bool] = ..., sample_count: _Optional[int] = ..., logprobs: _Optional[int] = ..., keep_special_tokens: _Optional[bool] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., report_queue: _Optional[bool] = ..., max_response_bytes: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "prompt_token_count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    prompt_token_count: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_token_count: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sample_index", "text", "token_ids", "drafted", "logprobs")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, sample_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("sample_index", "finish_reason", "stop_string", "stop_token_id", "usage", "statistics")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    finish_reason: _common_pb2.FinishReason
    stop_string: str
    stop_token_id: int
    usage: Usage
    statistics: SpeculationStatistics
    def __init__(self, sample_index: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., statistics: _Optional[_Union[SpeculationStatistics, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_token_count", "completion_token_count")
    PROMPT_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    prompt_token_count: int
    completion_token_count: int
    def __init__(self, prompt_token_count: _Optional[int] = ..., completion_token_count: _Optional[int] = ...) -> None: ...

class SpeculationStatistics(_message.Message):
    __slots__ = ("mode", "reproducibility", "rounds", "plain_rounds", "drafted", "accepted", "drafted_per_position", "accepted_per_position", "mean_accepted_length", "hits", "misses", "prepared_tokens", "used_tokens", "time_to_first_token", "total_time", "target_time", "queue_time", "draft_wait_time", "wire_time", "degraded_reason", "hits_all_accepted", "misses_all_accepted", "late_hits", "draft_time", "failovers")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBILITY_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PREPARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    TARGET_TIME_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_TIME_FIELD_NUMBER: _ClassVar[int]
    WIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_REASON_FIELD_NUMBER: _ClassVar[int]
    HITS_ALL_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MISSES_ALL_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LATE_HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIME_FIELD_NUMBER: _ClassVar[int]
    FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    reproducibility: Reproducibility
    rounds: int
    plain_rounds: int
    drafted: int
    accepted: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    mean_accepted_length: float
    hits: int
    misses: int
    prepared_tokens: int
    used_tokens: int
    time_to_first_token: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    target_time: _duration_pb2.Duration
    queue_time: _duration_pb2.Duration
    draft_wait_time: _duration_pb2.Duration
    wire_time: _duration_pb2.Duration
    degraded_reason: str
    hits_all_accepted: int
    misses_all_accepted: int
    late_hits: int
    draft_time: _duration_pb2.Duration
    failovers: int
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., reproducibility: _Optional[_Union[Reproducibility, str]] = ..., rounds: _Optional[int] = ..., plain_rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., mean_accepted_length: _Optional[float] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., prepared_tokens: _Optional[int] = ..., used_tokens: _Optional[int] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., target_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draft_wait_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., wire_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., degraded_reason: _Optional[str] = ..., hits_all_accepted: _Optional[int] = ..., misses_all_accepted: _Optional[int] = ..., late_hits: _Optional[int] = ..., draft_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., failovers: _Optional[int] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("sample_index", "position")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    position: int
    def __init__(self, sample_index: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("started", "chunk", "completed", "queued")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    completed: Completed
    queued: Queued
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("text", "token_ids", "drafted", "logprobs", "completed")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    completed: Completed
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "seed", "completions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "keep_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., keep_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GenerationServiceGetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerationServiceGetModelResponse(_message.Message):
    __slots__ = ("target", "draft", "drafters", "degraded_reason", "default_mode", "max_draft_tokens", "max_new_tokens_limit")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_REASON_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.Model
    draft: _common_pb2.Model
    drafters: _containers.RepeatedScalarFieldContainer[_common_pb2.Drafter]
    degraded_reason: str
    default_mode: Mode
    max_draft_tokens: int
    max_new_tokens_limit: int
    def __init__(self, target: _Optional[_Union[_common_pb2.Model, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.Model, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[_common_pb2.Drafter, str]]] = ..., degraded_reason: _Optional[str] = ..., default_mode: _Optional[_Union[Mode, str]] = ..., max_draft_tokens: _Optional[int] = ..., max_new_tokens_limit: _Optional[int] = ...) -> None: ...
