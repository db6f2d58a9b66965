"""The turns of conversations: sampled by the language model, or written by a script."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from adapters.llm import FinishReason, HFPolicy, RowLimit, SampledTokens, SamplingConfig
from grpo.errors import ContractError

from .chat import SampledTurn
from .messages import Message
from .rollouts import GiveTurn, Request
from .templates import ChatTemplate


class ModelTurns:
    """Samples the turns that conversations wait for."""

    def __init__(self, policy: HFPolicy, template: ChatTemplate, sampling: Mapping[str, Any]) -> None:
        self._policy, self._template, self._sampling = policy, template, dict(sampling)
        self._config = SamplingConfig.from_dict(policy.sampling.to_dict() | self._sampling)
        self.is_exact = True
        """Whether all turns so far were drawn from the policy itself."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of a turn."""
        return self._config.max_new_tokens

    def max_turns(self, index: int) -> int:
        """Maximum number of turns of one of the conversations: there is none."""
        return sys.maxsize

    def __call__(self, requests: Sequence[Request], give: GiveTurn) -> list[SampledTurn]:
        """One turn for each request. Those of a model are sampled together.

        If the model's sampler is a `GivesRows`, `give` gets each turn as soon as it ends, perhaps in another thread.
        """
        own = [request for request in requests if request.speaker is None]
        turns = sampled_by_others(requests, give)
        if own:
            sampled = _sampled(self._policy, self._template, self._config, own, give, self._sampling)
            self.is_exact = self.is_exact and sampled.policy_log_probs is sampled.behaviour_log_probs
            turns |= zip(own, _turns(sampled), strict=True)
        return [turns[request] for request in requests]


class ScriptedTurns:
    """Gives each conversation the turns of its script. Their log-probs are NaN, because nobody sampled them.

    Frozen models speak for themselves.
    """

    def __init__(self, policy: HFPolicy, template: ChatTemplate, scripts: Sequence[Sequence[str | Message]]) -> None:
        self._turns = [[template.turn(said) for said in script] for script in scripts]
        self._left = [iter(turns) for turns in self._turns]
        self.max_new_tokens = policy.sampling.max_new_tokens
        """Maximum number of tokens of a turn."""
        longest = max((len(turn) for turns in self._turns for turn in turns), default=0)
        if longest > self.max_new_tokens:
            raise ContractError(
                f"AgentPolicy.replay: a turn must have at most sampling.max_new_tokens={self.max_new_tokens} tokens; got "
                f"{longest}. Raise max_new_tokens, so that the model can say it too."
            )

    def max_turns(self, index: int) -> int:
        """Number of turns of a conversation's script."""
        return len(self._turns[index])

    def __call__(self, requests: Sequence[Request], give: GiveTurn) -> list[SampledTurn]:
        """The next turn of each conversation that waits for one."""
        turns = sampled_by_others(requests, give)
        for request in requests:
            if request.speaker is None:
                ids = next(self._left[request.index])
                turns[request] = SampledTurn(token_ids=ids, log_probs=[math.nan] * len(ids), finish_reason="end")
        return [turns[request] for request in requests]


def sampled_by_others(requests: Sequence[Request], give: GiveTurn) -> dict[Request, SampledTurn]:
    """The turns of frozen models. Those of one model are sampled together, each with its own limit and stop strings."""
    turns: dict[Request, SampledTurn] = {}
    for speaker in dict.fromkeys(request.speaker for request in requests):
        if speaker is not None:
            own = [request for request in requests if request.speaker is speaker]
            sampled = _sampled(speaker.policy, speaker.template, speaker.policy.sampling, own, give, {})
            turns |= zip(own, _turns(sampled), strict=True)
    return turns


def _turns(sampled: SampledTokens) -> list[SampledTurn]:
    rows = zip(sampled.token_ids, sampled.behaviour_log_probs, sampled.finish_reasons, strict=True)
    return [SampledTurn(token_ids=ids, log_probs=found, finish_reason=reason) for ids, found, reason in rows]


def _sampled(
    policy: HFPolicy,
    template: ChatTemplate,
    config: SamplingConfig,
    requests: Sequence[Request],
    give: GiveTurn,
    sampling: Mapping[str, Any],
) -> SampledTokens:
    def on_row(row: int, token_ids: Sequence[int], log_probs: Sequence[float], reason: FinishReason) -> None:
        give(requests[row], SampledTurn(token_ids=token_ids, log_probs=log_probs, finish_reason=reason))

    always = (*config.stop, *template.stop)
    return policy.sample_tokens(
        [request.context for request in requests],
        seeds=[request.seed for request in requests],
        end_token_ids=template.end_token_ids + template.opening_token_ids,
        limits=[
            RowLimit(max_new_tokens=request.max_new_tokens, stop=tuple(dict.fromkeys((*always, *request.stop))))
            for request in requests
        ],
        on_row=on_row,
        **sampling,
    )
