"""`AgentPolicy.replay`: conversations with given messages, for supervised training."""

import copy
import math
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import ContractError
from tests.support.agent_parts import fails, model_with
from tests.support.agents import CHATML, FORGETFUL, Echo, Scripted, Tools, converse, language_model, says_call
from tests.unit.adapters.agents.test_templates import CALL

zeros = lambda states, actions: [0.0] * len(states)  # noqa: E731
SCRIPTS = [[says_call(), "fine"], ["fine"]]


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_a_replay_is_the_conversation_of_a_model_that_says_the_script(template: str) -> None:
    """Two conversations with scripts of different length. Tokens, masks, messages and rewards are those of a rollout."""
    policy = AgentPolicy(model_with(template, max_new_tokens=90), Tools)
    replayed = policy.replay(["you", "me"], SCRIPTS)
    for state, script, found in zip(["you", "me"], SCRIPTS, replayed, strict=True):
        agent = Scripted(script, tokenizer=policy.policy.tokenizer, max_new_tokens=90)
        (sampled,) = converse(agent.policy, Tools, state)
        ids, expected = ([(s.token_ids, s.sampled) for s in row.segments] for row in (found, sampled))
        assert ids == expected
        assert (found.messages, found.turns, found.ended_by) == (sampled.messages, sampled.turns, "environment")
        assert all(math.isnan(log_prob) for log_prob in found.behaviour_log_probs)
    scores = policy.score_actions(["you", "me"], replayed)
    assert scores.mask.sum(1).tolist() == [len(row) for row in replayed]
    assert scores.log_probs.isfinite().all()


def test_a_supervised_run_makes_the_steps_of_a_loop_by_hand() -> None:
    """The mean over all tokens of both conversations, in plain SGD without clipping."""
    torch.manual_seed(0)
    policy = AgentPolicy(language_model(max_new_tokens=20), lambda state: Echo(state, turns=2))
    states, scripts = ["you", "me"], [["yes", "no"], ["a longer turn", "no"]]
    by_hand = copy.deepcopy(policy)
    conversations = by_hand.replay(states, scripts)
    optimizer = torch.optim.SGD([*by_hand.get_parameters().values()], lr=0.1)
    for _ in range(3):
        scores = by_hand.score_actions(states, conversations)
        (-scores.log_probs[scores.mask].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = GRPOConfig(seed=0, max_grad_norm=None, objective=ObjectiveConfig(aggregation="step_mean"))
    optimizer = torch.optim.SGD([*policy.get_parameters().values()], lr=0.1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=zeros, optimizer=optimizer)
    before = {name: value.detach().clone() for name, value in policy.get_parameters().items()}
    given = policy.demonstrations(states, scripts)
    assert given.mask.sum(1).tolist() == [len(conversation) for conversation in conversations]
    trainer.train(None, demonstrations=given, num_iterations=3, progress=False)
    for name, value in policy.get_parameters().items():
        torch.testing.assert_close(value, by_hand.get_parameters()[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(value, before[name]) for name, value in policy.get_parameters().items())


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_observations_are_the_tokens_that_the_policy_did_not_sample(template: str) -> None:
    """Their log-probs are those of one forward pass over each context, and the steps have the same scores as without them."""
    model = model_with(template, max_new_tokens=90)
    policy, plain = AgentPolicy(model, Tools, observations=True), AgentPolicy(model, Tools)
    conversations = policy.replay(["you", "me"], SCRIPTS)
    with torch.no_grad():
        scores, without = (each.score_actions(["you", "me"], conversations) for each in (policy, plain))
    assert without.observed_log_probs is None
    torch.testing.assert_close(scores.log_probs, without.log_probs)
    assert torch.equal(scores.mask, without.mask)
    for row, conversation in enumerate(conversations):
        steps, seen = list[float](), list[float]()
        for segment in conversation.segments:
            tokens = torch.tensor([segment.token_ids])
            with torch.no_grad():
                log_softmax = model.model(input_ids=tokens).logits[0].log_softmax(1)
            for place in range(segment.num_context_tokens, len(segment.token_ids)):
                (steps if segment.sampled[place] else seen).append(float(log_softmax[place - 1, tokens[0, place]]))
        observed = (scores.observed_log_probs, scores.observed_mask, seen)
        for found, mask, expected in ((scores.log_probs, scores.mask, steps), observed):
            torch.testing.assert_close(found[row][mask[row]], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert scores.observed_mask.sum(1).tolist()[1] == 0, "nothing was answered after a single turn"
    assert int(scores.observed_mask[0].sum()) > 0
    assert torch.equal(policy.demonstrations(["you", "me"], SCRIPTS).observed_mask, scores.observed_mask)


def test_a_model_learns_what_its_environment_answers() -> None:
    """The environment repeats what it was told. All rewards are equal, so that only its answers teach."""
    torch.manual_seed(0)
    policy = AgentPolicy(language_model(max_new_tokens=4), lambda state: Echo(state, turns=2), observations=True)
    config = GRPOConfig(group_size=2, learning_rate=1e-2, seed=0, objective=ObjectiveConfig(observation_coef=1.0))
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=zeros)
    history = trainer.train(["you"], num_iterations=12, progress=False)
    assert history[-1]["train/observation_loss"] < history[0]["train/observation_loss"] / 2


def test_a_message_and_its_text_are_the_same_turn() -> None:
    template = AgentPolicy(language_model(), Tools).template
    call = says_call(arguments='{"topic": "rain"}')
    assert template.turn(CALL) == template.turn(call) == template.turn(call + "<|im_end|>")
    assert template.turn({"role": "assistant", "content": "fine"}) == template.turn("fine")
    policy = AgentPolicy(language_model(max_new_tokens=90), Tools)
    (found,) = policy.replay(["you"], [[CALL, "fine"]])
    assert (found.messages[1], found.messages[2]["content"]) == (CALL, "rain is fine")


def test_a_conversation_ends_after_its_script() -> None:
    (found,) = AgentPolicy(language_model(), lambda state: Echo(state, turns=3)).replay(["you"], [["a", "b"]])
    assert (found.ended_by, found.rewards) == ("max_turns", (1.0, 2.0))


@pytest.mark.parametrize(
    ("scripts", "options", "message"),
    [
        ([["a"] * 4], {}, r"must have the 4 turns of its script; it ended after 3 by 'environment'"),
        ([["a"] * 3], {"max_turns": 2}, r"ended after 2 by 'max_turns'"),
        ([["a"]], {"make": lambda state: fails()}, r"by 'error', info=.*lost"),
        ([["a long turn"]], {}, r"at most sampling.max_new_tokens=6 tokens; got 12"),
        ([["a"], ["b"]], {}, r"scripts must have one entry per row = 1"),
    ],
)
def test_a_script_that_cannot_be_said_is_refused(scripts: Any, options: dict[str, Any], message: str) -> None:
    policy = AgentPolicy(language_model(), options.pop("make", Echo), **options)
    with pytest.raises(ContractError, match=message):
        policy.replay(["you"], scripts)
