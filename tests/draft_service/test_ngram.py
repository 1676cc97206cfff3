"""Drafting by n-grams."""

import random
import time

from draft_service.drafter import Continuation, Prepared, Proposal
from draft_service.ngram import NgramDrafter, NgramIndex, NgramSession
from foredraft.sampling.params import Method, SamplingParams
from tests.draft_service.reference import EOS, opening

PARAMS = SamplingParams(max_new_tokens=100)


def ids(text: str) -> list[int]:
    """A token for each letter."""
    return [ord(letter) for letter in text]


def start(text: list[int], params: SamplingParams = PARAMS) -> tuple[NgramSession, list[Proposal | Prepared]]:
    answers: list[Proposal | Prepared] = []
    return NgramDrafter(1, 3).open(opening(params, text), answers.append), answers


def propose(text: list[int], k: int, params: SamplingParams = PARAMS) -> Proposal:
    session, answers = start(text[:1], params)
    session.commit(1, text[1:], k, time.perf_counter())
    (proposal,) = answers
    assert isinstance(proposal, Proposal)
    return proposal


def test_repeats_what_followed_the_latest_occurrence_of_the_last_tokens() -> None:
    assert propose(ids("abcdzabcezabc"), k=3).token_ids == ids("eza")


def test_prefers_the_longest_run() -> None:
    assert propose(ids("abcdxceyabc"), k=2).token_ids == ids("dx")


def test_falls_back_on_a_shorter_run() -> None:
    assert propose(ids("zcdxabc"), k=2).token_ids == ids("dx")


def test_goes_on_with_a_repetition_that_reaches_the_end() -> None:
    assert propose(ids("zabab"), k=5).token_ids == ids("ababa")


def test_proposes_nothing_where_nothing_repeats() -> None:
    assert propose(ids("abc"), k=4).token_ids == []


def test_ends_with_a_token_that_ends_the_text() -> None:
    text = [*ids("ab"), EOS, *ids("cab")]
    assert propose(text, k=4).token_ids == [EOS]
    ignoring = SamplingParams(max_new_tokens=100, ignore_eos=True)
    assert propose(text, k=4, params=ignoring).token_ids == [EOS, *ids("cab")]


def test_drafts_no_more_than_the_request_has_place_for() -> None:
    assert propose(ids("aaa"), k=8, params=SamplingParams(max_new_tokens=5)).token_ids == ids("aa")


def test_q_is_certain_of_each_token() -> None:
    text, tokens = ids("abcab"), ids("ca")
    q = propose(text, k=2, params=SamplingParams(max_new_tokens=100, method=Method.REJECTION)).q
    assert q is not None
    assert q.token_ids.tolist() == [[token] for token in tokens]
    assert q.probabilities.tolist() == [[1.0], [1.0]]
    assert propose(text, k=2).q is None


def test_prepares_for_the_verdict_that_the_text_goes_on_repeating() -> None:
    session, answers = start(ids("abcdefab"))
    session.verifying(7, 8, ids("c"), 2, 1)
    assert answers == [Prepared(7, [Continuation(1, ord("d"), ids("ef"), None)])]
    session.commit(8, ids("cd"), 2, time.perf_counter())
    assert isinstance(answers[1], Proposal)
    assert (answers[1].base, answers[1].token_ids, answers[1].prepared_count) == (10, ids("ef"), 2)


def test_a_round_on_another_text_is_ignored() -> None:
    session, answers = start(ids("abab"))
    session.verifying(7, 3, ids("b"), 2, 1)
    assert answers == []


def test_an_index_forgets_what_is_truncated() -> None:
    rng = random.Random(1)
    index = NgramIndex(1, 3)
    text: list[int] = []
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(6))]
        base = rng.randint(max(0, len(text) - 8), len(text))
        text = [*text[:base], *tokens]
        index.truncate(base)
        index.extend(tokens)
        fresh = NgramIndex(1, 3)
        fresh.extend(text)
        assert index.continuation(4) == fresh.continuation(4)
        assert vars(index) == vars(fresh)
