"""One sample on its way to the client: tokens get their text, and a stop string may end it."""

from foredraft.v1 import common_pb2, generation_pb2
from orchestrator.decode import Emission
from orchestrator.text import OutputText
from orchestrator.tokenizer import Tokenizer


class Sample:
    """Turns emissions into chunks until `finish_reason` is set. The decoder fills `statistics`."""

    def __init__(self, tokenizer: Tokenizer, request: generation_pb2.GenerateRequest, index: int) -> None:
        self.finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.statistics = generation_pb2.SpeculationStatistics()
        self._index = index
        self._keep_special_tokens = request.keep_special_tokens
        self._text = OutputText(
            tokenizer,
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            keep_special_tokens=request.keep_special_tokens,
        )
        self._token_count = 0
        self._stop_token_id: int | None = None

    def take(self, emission: Emission) -> generation_pb2.Chunk:
        """What the emission adds to the output: all of it, or the tokens up to the one that completes a stop string."""
        ends_by_eos = emission.finish_reason == common_pb2.FINISH_REASON_EOS
        silent = 1 if ends_by_eos and not self._keep_special_tokens else 0
        shown = emission.token_ids[: len(emission.token_ids) - silent]
        text, count = self._text.push(shown)
        if self._text.stop_string is None:
            count = len(emission.token_ids)
            self.finish_reason, self._stop_token_id = emission.finish_reason, emission.stop_token_id
            if self.finish_reason:
                text += self._text.finish()
        if self._text.stop_string is not None:
            self.finish_reason, self._stop_token_id = common_pb2.FINISH_REASON_STOP_STRING, None
            self._uncount(emission, count)
        self._token_count += count
        return generation_pb2.Chunk(
            sample_index=self._index,
            text=text,
            token_ids=emission.token_ids[:count],
            drafted=emission.drafted[:count],
            logprobs=emission.logprobs[:count],
        )

    def completed(self, prompt_token_count: int) -> generation_pb2.Completed:
        """How the sample ended; to be asked once its sessions have."""
        if self.statistics.rounds:
            self.statistics.mean_accepted_length = self._token_count / self.statistics.rounds
        return generation_pb2.Completed(
            sample_index=self._index,
            finish_reason=self.finish_reason,
            stop_string=self._text.stop_string or "",
            stop_token_id=self._stop_token_id,
            usage=generation_pb2.Usage(prompt_token_count=prompt_token_count, completion_token_count=self._token_count),
            statistics=self.statistics,
        )

    def _uncount(self, emission: Emission, count: int) -> None:
        """Take the round's draft tokens after its first `count` output tokens out of the statistics again."""
        statistics, accepted = self.statistics, sum(emission.drafted)
        for position in range(min(count, accepted), emission.proposed):
            statistics.drafted -= 1
            statistics.drafted_per_position[position] -= 1
            statistics.accepted -= position < accepted
            statistics.accepted_per_position[position] -= position < accepted
