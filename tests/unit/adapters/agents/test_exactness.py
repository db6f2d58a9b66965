"""What is sampled is what is scored, and only what was sampled has a loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, Message, speakers
from adapters.agents.messages import tool_message
from adapters.agents.templates import CALLED, TOOL
from adapters.llm import SamplingConfig, scoring
from adapters.llm import policy as llm_policy
from tests.support.agents import (
    CHATML,
    ENDS,
    FORGETFUL,
    ORIGINALS,
    Echo,
    chat_tokenizer,
    language_model,
    original_template,
    scores_one_by_one,
)
from tests.support.llm_models import FAMILIES, FLOAT32_GRADIENT, gradients, relative_difference

STOP = tuple("abcdefghikmnoprstu12345XYZ\n")
"""Turns end at these letters, so that a model with random weights holds conversations of three turns."""


class Results(Echo):
    """Answers every message with the result of a tool, for three turns."""

    def step(self, action: Message) -> Any:
        observation, *others = super().step(action)
        calls = action.get("tool_calls") or CALLED["tool_calls"]
        return tool_message(calls[0], observation), *others


class CallsOnly(Results):
    """The same, and the template shows the tool."""

    def tools(self) -> list[Any]:
        return [TOOL]


def held(family: str, template: str, *, size: int = 3) -> tuple[Any, AgentPolicy, Any, list[Conversation]]:
    """A language model, and conversations of it with tool results between the turns."""
    sampling = SamplingConfig(max_new_tokens=40, stop=STOP)
    policy = language_model(family, tokenizer=chat_tokenizer(template), sampling=sampling)
    agent = AgentPolicy(policy, Results)
    torch.manual_seed(0)
    sampled = agent.sample_actions(["you", "me"], size)
    return policy, agent, sampled, [row for group in sampled.actions for row in group]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_scored_log_probs(family: str) -> None:
    """Every model family, three turns with tool results in between, for a template that appends and one that rewrites."""
    for template in (CHATML, FORGETFUL):
        policy, agent, sampled, rows = held(family, template)
        longest = max(rows, key=lambda row: len(row.turns))
        assert [message["role"] for message in longest.messages] == ["user", *["assistant", "tool"] * 3]
        counts = [sum(len(getattr(row, name)) for row in rows) for name in ("turns", "segments")]
        is_blank = family == "gpt2"  # with random weights, it only repeats the line break, and nothing is rewritten
        assert counts[0] > counts[1] if template == CHATML or is_blank else counts[1] > len(rows)
        scores = agent.score_actions([None] * len(rows), rows)
        assert torch.equal(scores.mask, sampled.mask)
        assert scores.mask.sum(1).tolist() == [len(row) for row in rows]
        torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
        assert sampled.scores is not None
        for row, log_probs in zip(rows, scores.log_probs, strict=True):
            torch.testing.assert_close(log_probs[: len(row)], scores_one_by_one(policy.model, row), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral", "mamba"])
def test_the_gradient_is_the_sum_over_contexts_one_by_one(family: str) -> None:
    """In float64, for models with shared prompts, with sliding windows, and with states."""
    for template in (CHATML, FORGETFUL):
        policy, agent, sampled, rows = held(family, template, size=2)
        policy.model.double()
        weights = torch.randn(sampled.mask.shape, dtype=torch.float64)
        found = gradients(policy.model, (agent.score_actions([None] * len(rows), rows).log_probs * weights).sum())
        one_by_one = [
            (scores_one_by_one(policy.model, row) * own[: len(row)]).sum()
            for row, own in zip(rows, weights, strict=True)
        ]
        expected = gradients(policy.model, torch.stack(one_by_one).sum())
        assert relative_difference(found, expected) < FLOAT32_GRADIENT


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_labels_of_observations_change_neither_loss_nor_gradient(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label is the token that a position is trained to predict. Inputs stay as they are, and labels are exchanged: first
    those of all tokens that were not sampled, then those of the first sampled tokens."""
    policy, agent, _, rows = held(family, CHATML)
    hidden_states = {name: getattr(scoring, name) for name in ("hidden_with_shared_prompts", "hidden_of_whole_rows")}
    score = scoring.score_tokens
    num_exchanged = 0

    def loss_and_gradient() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -agent.score_actions([None] * len(rows), rows).log_probs.sum()
        return loss, gradients(policy.model, loss)

    def exchange(which: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Exchange labels where `which(mask)` is True."""

        def scored(lm: Any, prompts: Any, prompt_of_row: Any, tokens: Any, mask: Any, **options: Any) -> Any:
            nonlocal num_exchanged
            exchanged = which(mask)
            num_exchanged += int(exchanged.sum())
            for name, of in hidden_states.items():
                monkeypatch.setattr(scoring, name, lambda lm, p, r, _, *rest, of=of: of(lm, p, r, tokens, *rest))
            labels = torch.where(exchanged, (tokens + 7) % lm.vocabulary_size, tokens)
            return score(lm, prompts, prompt_of_row, labels, mask, **options)

        monkeypatch.setattr(llm_policy, "score_tokens", scored)

    loss, slopes = loss_and_gradient()
    exchange(lambda mask: ~mask)
    again, found = loss_and_gradient()
    assert num_exchanged > 100
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], slope) for name, slope in slopes.items())
    exchange(lambda mask: mask & (mask.cumsum(1) == 1))
    other, found = loss_and_gradient()
    assert not torch.equal(other, loss)
    assert relative_difference(found, slopes) > 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:AgentPolicy. the (prompt ends in|model writes):UserWarning")
@pytest.mark.parametrize("name", ORIGINALS)
def test_sampled_log_probs_are_scored_log_probs_with_any_template(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns that the model samples, with tool results in between where the template shows tools. What the model says
    is read as a call, because a model with random weights makes none."""
    tokenizer = chat_tokenizer(original_template(name))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS.get(name, ())))]
    sampling = SamplingConfig(max_new_tokens=40, stop=STOP)
    policy = language_model(tokenizer=tokenizer, positions=8192, end_token_ids=ends, end_scale=0.1, sampling=sampling)
    agent = AgentPolicy(policy, Echo)
    if agent.template.shows_tools:
        agent = AgentPolicy(policy, CallsOnly)
        monkeypatch.setattr(speakers, "read_turn", lambda *args, number, **_: (as_call(number), False))
    turns: list[tuple[int, ...]] = []
    real = policy.sample_tokens

    def keeping(prompts: Any, **options: Any) -> Any:
        found = real(prompts, **options)
        turns.extend(map(tuple, found.token_ids))
        return found

    policy.sample_tokens = keeping
    for seed in range(20):  # until no turn is truncated
        turns.clear()
        torch.manual_seed(seed)
        sampled = agent.sample_actions(["you"], 1)
        (row,) = sampled.actions[0]
        if len(row.turns) == 3:
            break
    between = "tool" if agent.template.shows_tools else "user"
    assert [message["role"] for message in row.messages] == ["user", *["assistant", between] * 3]
    kept = [token for s in row.segments for token, own in zip(s.token_ids, s.sampled, strict=True) if own]
    assert kept == [token for turn in turns for token in turn]
    scores = agent.score_actions([None], [row])
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.log_probs[0], scores_one_by_one(policy.model, row), atol=1e-5, rtol=0)


def as_call(number: int) -> Message:
    """A message with a call, and with an id of its own as some templates need it."""
    (call,) = CALLED["tool_calls"]
    return {**CALLED, "tool_calls": [{**call, "id": f"call{number:05d}"}]}
