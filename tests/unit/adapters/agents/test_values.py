"""A value head with conversations: values in each context, what follows a limit, and credit per turn."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward, Segment, Turn
from adapters.llm import ValueHead
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.agent_parts import changed, conversation, model_with, rows_of
from tests.support.agents import CHATML, FORGETFUL, Echo, Scripted, language_model
from tests.support.llm_models import FLOAT32_GRADIENT, gradients, relative_difference
from tests.unit.adapters.agents.test_rollouts import ENDS, LONG


def with_head(family: str = "qwen3", *, template: str = CHATML, **options: Any) -> Any:
    """A language model with a random value head."""
    head = ValueHead(16 if family == "mamba" else 32, width=8)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model_with(template, family, value_head=head, **options)


def values_one_by_one(policy: Any, row: Conversation) -> tuple[Tensor, Tensor]:
    """Values before each step of a conversation, and after its last step, one forward pass per context."""
    before, after = [torch.zeros(0)], torch.zeros(())
    for segment in row.segments:
        ids = torch.tensor([segment.token_ids])
        hidden = policy.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        values = policy.value_head(hidden)
        before.append(values[:-1][torch.tensor(segment.sampled[1:])])
        after = values[-1]
    return torch.cat(before), after


def made(*segments: str, ended_by: Any = "environment") -> Conversation:
    """A conversation of one turn per segment, with `.` for context and `s` for sampled tokens."""

    def segment(number: int, marks: str) -> Segment:
        ids = tuple((7 * place + 5 * number) % 90 for place in range(len(marks)))
        sampled = tuple(mark == "s" for mark in marks)
        return Segment(token_ids=ids, sampled=sampled, log_probs=(0.0,) * marks.count("s"))

    turns = [Turn(num_tokens=marks.count("s"), reward=0.0) for marks in segments]
    turns[-1] = replace(turns[-1], is_truncated=ended_by == "length")
    made_of = tuple(segment(number, marks) for number, marks in enumerate(segments))
    return conversation(segments=made_of, turns=tuple(turns), ended_by=ended_by)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "mamba"])
def test_values_are_those_of_each_context_alone(family: str) -> None:
    policy = with_head(family)
    rows = [
        made("...sss", ".....ssss", ended_by="length"),
        made("....ss...s..sss"),
        made(".s", "..........ss", ".....s..s"),
        made("..ss", ended_by="length"),
    ]
    scores = AgentPolicy(policy, Echo).score_actions([None] * 4, rows)
    for row, values, final in zip(rows, scores.values, scores.final_values, strict=True):
        before, after = values_one_by_one(policy, row)
        torch.testing.assert_close(values[: len(row)], before, atol=1e-5, rtol=0)
        assert not values[len(row) :].any()
        torch.testing.assert_close(final, after * (row.ended_by == "length"), atol=1e-5, rtol=0)


def test_the_gradient_of_values_is_the_sum_over_contexts_one_by_one() -> None:
    policy = with_head(template=FORGETFUL, max_new_tokens=40)
    torch.manual_seed(0)
    agent = AgentPolicy(policy, Echo)
    rows = rows_of(agent.generate_actions(["you", "me"], 4))
    assert sum(len(row.segments) for row in rows) > len(rows)
    scores = agent.score_actions([None] * 8, rows)
    weights = torch.randn(scores.values.shape)
    pairs = zip(rows, weights, strict=True)
    one_by_one = [(values_one_by_one(policy, row)[0] * own[: len(row)]).sum() for row, own in pairs]
    both = torch.nn.ModuleList([policy.model, policy.value_head])
    expected = gradients(both, torch.stack(one_by_one).sum())
    assert relative_difference(gradients(both, (scores.values * weights).sum()), expected) < FLOAT32_GRADIENT


def test_only_a_truncated_message_has_a_value_after_it(subtests: pytest.Subtests) -> None:
    """After all other ends, nothing follows that the policy is trained on."""
    for mask_truncated, kinds in ((False, ("environment", "max_turns", "length")), (True, ("length",))):
        for ended_by, make, turns, options, _, _ in ENDS:
            if make is not Echo or ended_by not in kinds:
                continue
            follows = LONG in turns
            with subtests.test(ended_by=ended_by, turns=turns, mask_truncated=mask_truncated):
                head = ValueHead(32, width=8)
                torch.nn.init.ones_(head.layers[3].bias)
                said = Scripted(turns, max_new_tokens=8, value_head=head, mask_truncated=mask_truncated)
                agent = AgentPolicy(said.policy, Echo, **options)
                (row,) = agent.generate_actions(["you"], 1)[0]
                assert row.ended_by == ended_by
                assert [turn.is_truncated for turn in row.turns] == [False] * (len(turns) - 1) + [follows] * bool(turns)
                assert Conversation.from_state(row.to_state()) == row
                scores = agent.score_actions([None], [row])
                is_masked = mask_truncated and ended_by == "length"
                assert scores.values.tolist() == [[1.0] * (0 if is_masked else len(row))]
                assert scores.final_values.tolist() == [float(follows and not is_masked)]


@pytest.mark.slow
def test_gae_learns_from_the_rewards_of_turns() -> None:
    def wants_short_messages(self: Any, said: Any) -> Any:
        observation, _, *others = Echo.step(self, said)
        return observation, 1 / (1 + len(said["content"])), *others

    torch.manual_seed(1)
    policy = language_model(value_head=True, max_new_tokens=8)
    agent = AgentPolicy(policy, changed(Echo, step=wants_short_messages))
    parts = {"advantage": AdvantageConfig(credit="gae", scale="batch"), "objective": ObjectiveConfig(value_clip=0.5)}
    config = GRPOConfig(group_size=16, seed=1, learning_rate=5e-3, num_epochs_per_update=2, **parts)
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward(per_turn=True))
    history = trainer.train(["be brief"], num_iterations=24, progress=False)
    assert history[0]["rewards/mean"] < 0.5
    assert history[-1]["rewards/mean"] > 2.5
    (row,) = agent.generate_actions(["be brief"], 1, temperature=0)[0]
    values = agent.eval().score_actions([None], [row]).values[0]
    left = torch.tensor([3.0, 2.0, 1.0])  # what the turns left will bring
    torch.testing.assert_close(values, left, atol=0.5, rtol=0)
