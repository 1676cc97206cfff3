"""Pages of a vocabulary."""

from foredraft.errors import Violation
from foredraft.v1 import common_pb2
from foredraft.validation.checks import refuse

MAX_PAGE_SIZE = 10_000


def vocabulary_page(request: common_pb2.ListVocabularyRequest, vocabulary_size: int) -> tuple[range, str]:
    """The token ids of the page asked for, and the token of the next page, empty on the last.

    Raises RequestError (INVALID_ARGUMENT) naming every bad field.
    """
    token = request.page_token
    # Numbers longer than this cannot be ours, and Python refuses to convert very long ones.
    start = int(token) if len(token) <= 10 and token.isdecimal() else 0
    violations = []
    if request.page_size < 0:
        violations.append(Violation("page_size", f"is {request.page_size}; must not be negative"))
    if token and not 0 < start < vocabulary_size:
        violations.append(Violation("page_token", "is unknown; must be empty or the next_page_token of a page"))
    refuse(violations)
    end = min(start + min(request.page_size or MAX_PAGE_SIZE, MAX_PAGE_SIZE), vocabulary_size)
    return range(start, end), str(end) if end < vocabulary_size else ""
