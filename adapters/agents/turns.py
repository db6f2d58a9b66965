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
        """One turn for each request. Those of a model are sampled together, each with its own limit and stop strings.

        If the model's sampler is a `GivesRows`, `give` gets each turn as soon as it ends, perhaps in another thread.
        """
        turns: dict[int, SampledTurn] = {}
        for speaker in dict.fromkeys(request.speaker for request in requests):
            own = {i: request for i, request in enumerate(requests) if request.speaker is speaker}
            if speaker is None:
                config, sampling = self._config, self._sampling
                sampled = self._sampled(self._policy, self._template, config, [*own.values()], give, sampling)
                self.is_exact = self.is_exact and sampled.policy_log_probs is sampled.behaviour_log_probs
            else:
                policy = speaker.policy
                sampled = self._sampled(policy, speaker.template, policy.sampling, [*own.values()], give, {})
            rows = zip(own, sampled.token_ids, sampled.behaviour_log_probs, sampled.finish_reasons, strict=True)
            for i, ids, log_probs, reason in rows:
                turns[i] = SampledTurn(token_ids=ids, log_probs=log_probs, finish_reason=reason)
        return [turns[i] for i in range(len(requests))]

    @staticmethod
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


class ScriptedTurns:
    """Gives each conversation the turns of its script. Their log-probs are NaN, because nobody sampled them."""

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
        given = [next(self._left[request.index]) for request in requests]
        return [SampledTurn(token_ids=ids, log_probs=[math.nan] * len(ids), finish_reason="end") for ids in given]
