"""Proto enums and the words that settings and Python code use for them."""

from collections.abc import Mapping
from typing import Final

from foredraft.sampling.params import Method
from foredraft.v1 import common_pb2, generation_pb2

METHODS: Final[Mapping[common_pb2.Method, Method]] = {
    common_pb2.METHOD_COUPLED: Method.COUPLED,
    common_pb2.METHOD_REJECTION: Method.REJECTION,
    common_pb2.METHOD_BLOCK: Method.BLOCK,
}
DRAFTERS: Final[Mapping[common_pb2.Drafter, str]] = {
    common_pb2.DRAFTER_MODEL: "model",
    common_pb2.DRAFTER_NGRAM: "ngram",
    common_pb2.DRAFTER_COMBINED: "combined",
}
MODES: Final[Mapping[generation_pb2.Mode, str]] = {
    generation_pb2.MODE_PLAIN: "plain",
    generation_pb2.MODE_SEQUENTIAL: "sequential",
    generation_pb2.MODE_OVERLAPPED: "overlapped",
}

METHOD_VALUES: Final = {method: value for value, method in METHODS.items()}
DRAFTER_VALUES: Final = {word: value for value, word in DRAFTERS.items()}
MODE_VALUES: Final = {word: value for value, word in MODES.items()}
