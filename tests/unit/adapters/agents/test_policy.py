"""`AgentPolicy`: sampled and scored log-probs, gradients, concurrency, and what the core makes of conversations."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward, Segment, Turn, rollouts
from adapters.agents.templates import TOOL
from adapters.llm import Completion, HFPolicy, SamplingConfig
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, RewardConfig, WeightedRewards
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.types import CONTINUES
from tests.support.agents import (
    ENDS,
    FORGETFUL,
    ORIGINALS,
    Echo,
    Scripted,
    Tools,
    chat_tokenizer,
    language_model,
    original_template,
    says_call,
    scores_one_by_one,
)
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    adapted_model,
    forward_shapes,
    gradients,
    relative_difference,
    tiny_model,
)


class Caller(Echo):
    """Answers calls with a tool's result, and other messages as a user, for three turns."""

    def tools(self) -> list[Any]:
        return [TOOL]


pytestmark = pytest.mark.filterwarnings(
    "ignore:AgentPolicy. the prompt ends in <think>:UserWarning",
)


def rows_of(sampled: Any) -> list[Conversation]:
    return [row for group in sampled.actions for row in group]


def sampled_from(policy: Any, make: Any = Echo, states: Any = ("you", "me"), size: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    agent = AgentPolicy(policy, make, **options)
    return agent, agent.sample_actions(list(states), size)


MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, name in enumerate(ORIGINALS)]


@pytest.mark.parametrize("name", MARKED)
def test_no_sampled_token_is_lost_with_any_template(name: str) -> None:
    """Three turns: a call, text with a call, and text, with a tool's results in between where the template shows tools."""
    tokenizer = chat_tokenizer(original_template(name))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS.get(name, ())))]
    policy = language_model(tokenizer=tokenizer, max_new_tokens=12, positions=8192, end_token_ids=ends, end_scale=0.1)
    turns: list[list[int]] = []
    real = policy.sample_tokens
    user = [{"role": "user", "content": "?"}]
    opened = (
        tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True).rstrip().endswith("<think>")
    )
    says = ("</think>" if opened else "") + says_call()  # a call within a thought is none

    def keeping(prompts: Any, on_row: Any, **options: Any) -> Any:
        found = real(prompts, **options)
        call = tokenizer(says, add_special_tokens=False)["input_ids"] if len(turns) < 2 else []
        text = [token for token in found.token_ids[0] if token not in tokenizer.all_special_ids] if turns else []
        forced = [[*text, *call, agent.template.end_token_ids[-1]]]
        scored = policy.score_actions(prompts, [_as_completion(tokens) for tokens in forced]).log_probs.tolist()
        log_probs = [row[: len(tokens)] for row, tokens in zip(scored, forced, strict=True)]
        turns.extend(forced)
        return replace(
            found,
            token_ids=forced,
            finish_reasons=["end"] * len(forced),
            behaviour_log_probs=log_probs,
            policy_log_probs=log_probs,
        )

    policy.sample_tokens = keeping
    agent = AgentPolicy(policy, Echo)
    if agent.template.shows_tools:
        agent = AgentPolicy(policy, Caller)
    with torch.no_grad():
        (row,) = rows_of(agent.sample_actions(["you"], 1))
        scores = agent.score_actions([None], [row])
    roles = [message["role"] for message in row.messages]
    assert roles == ["user", "assistant", *["tool" if agent.template.shows_tools else "user", "assistant"] * 2, "user"]
    kept = [token for s in row.segments for token, own in zip(s.token_ids, s.sampled, strict=True) if own]
    assert kept == [token for turn in turns for token in turn]
    expected = torch.tensor(row.behaviour_log_probs)
    torch.testing.assert_close(scores.log_probs[0], expected, atol=1e-5, rtol=0)


def _as_completion(tokens: list[int]) -> Completion:
    return Completion(token_ids=tuple(tokens), text="", finish_reason="end")


def test_the_gradient_is_the_sum_over_contexts_one_by_one() -> None:
    policy = language_model(tokenizer=chat_tokenizer(FORGETFUL), max_new_tokens=40)
    agent, sampled = sampled_from(policy)
    rows = rows_of(sampled)
    assert sum(len(row.segments) for row in rows) > len(rows)
    weights = torch.randn(sampled.mask.shape)
    scores = agent.score_actions([None] * 6, rows)
    found = gradients(policy.model, (scores.log_probs * weights).sum())
    expected: dict[str, Any] = {}
    for row, weight in zip(rows, weights, strict=True):
        slopes = gradients(policy.model, (scores_one_by_one(policy.model, row) * weight[: len(row)]).sum())
        expected = {name: slope + expected.get(name, 0) for name, slope in slopes.items()}
    assert relative_difference(found, expected) < FLOAT32_GRADIENT


@pytest.mark.slow
def test_a_small_budget_of_tokens_changes_no_score() -> None:
    wide, narrow = (
        language_model(tokenizer=chat_tokenizer(FORGETFUL), max_new_tokens=40, max_tokens_per_forward=budget)
        for budget in (16_384, 60)
    )
    agent, sampled = sampled_from(wide)
    rows = rows_of(sampled)
    scores = agent.score_actions([None] * 6, rows)
    small = AgentPolicy(narrow, Echo)
    again = small.score_actions([None] * 6, rows)
    torch.testing.assert_close(again.log_probs, scores.log_probs, atol=1e-5, rtol=0)
    assert len(small.plan_micro_batches([None] * 6, rows)) > 1
    assert sorted(i for part in small.plan_micro_batches([None] * 6, rows) for i in part) == list(range(6))


def test_what_the_environment_said_has_no_loss() -> None:
    """The last observation is not predicted: other tokens at its places change no score of earlier tokens, and their own
    log-probs are no part of the row."""
    policy = language_model(max_new_tokens=40)
    tokens = tuple(range(5, 45))
    sampled = tuple(10 <= place < 15 or 25 <= place < 30 or place == 39 for place in range(40))
    row = Conversation(
        segments=(Segment(token_ids=tokens, sampled=sampled, log_probs=(0.0,) * 11),),
        turns=(Turn(num_tokens=5, reward=0.0), Turn(num_tokens=6, reward=1.0)),
        messages=(),
        ended_by="environment",
        info={},
    )
    agent = AgentPolicy(policy, Echo)
    scores = agent.score_actions([None], [row])
    assert scores.mask.tolist() == [[True] * 11]
    logits = policy.model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    places = [place for place in range(40) if sampled[place]]
    loss_by_hand = -sum(logits[place - 1, tokens[place]] for place in places)
    by_hand = gradients(policy.model, loss_by_hand)
    assert relative_difference(gradients(policy.model, -scores.log_probs.sum()), by_hand) < FLOAT32_GRADIENT
    # a label is what a position is trained to predict; observations keep their place as inputs
    labels = [tokens[place] if sampled[place] else -100 for place in range(40)]
    loss = torch.nn.functional.cross_entropy(
        policy.model(input_ids=torch.tensor([tokens])).logits[0, :-1], torch.tensor(labels[1:]), reduction="sum"
    )
    assert relative_difference(gradients(policy.model, loss), by_hand) < FLOAT32_GRADIENT


@pytest.mark.slow
def test_concurrency_changes_no_token() -> None:
    policy = language_model(max_new_tokens=30)
    found = []
    for concurrency in (1, 3, 64):
        _, sampled = sampled_from(policy, states=["a", "b"], size=4, concurrency=concurrency)
        found.append([[segment.token_ids for segment in row.segments] for row in rows_of(sampled)])
    assert found[0] == found[1] == found[2]
    assert len({str(row) for row in found[0]}) == 8


def test_conversations_are_sampled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "SHORTEST_WAIT", 30.0)  # however busy this machine is
    policy = language_model(max_new_tokens=30)
    sizes: list[int] = []
    real = policy.sample_tokens

    def counting(prompts: Any, **options: Any) -> Any:
        sizes.append(len(prompts))
        return real(prompts, **options)

    policy.sample_tokens = counting
    _, sampled = sampled_from(policy, states=["a", "b"], size=8)
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)  # finished conversations leave
    assert len(sizes) <= 4
    assert sum(sizes) == sampled.metrics["agents/turns"]
    sizes.clear()
    sampled_from(policy, states=["a", "b"], size=8, concurrency=4)
    assert max(sizes) == 4


def test_no_history_is_computed_twice_within_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted positions: a conversation alone computes each token of its context once, but for the last, which nothing
    follows. In a batch, only the padding of new tokens is added."""
    monkeypatch.setattr(rollouts, "SHORTEST_WAIT", 30.0)
    policy = language_model(max_new_tokens=30)
    shapes = forward_shapes(policy.model)
    for size in (1, 6):
        shapes.clear()
        _, sampled = sampled_from(policy, states=["you"], size=size)
        rows = rows_of(sampled)
        assert max(len(row.turns) for row in rows) == 3
        needed = sum(len(segment.token_ids) - 1 for row in rows for segment in row.segments)
        prompt = rows[0].segments[0].num_context_tokens
        computed = sum(rows * columns for rows, columns in shapes)
        if size == 1:
            assert computed == needed
        else:  # the prompt that the group shares is computed once
            assert computed < 1.1 * (needed - (size - 1) * prompt)


def test_kept_caches_change_no_token() -> None:
    policy = language_model(max_new_tokens=30)
    kept = rows_of(sampled_from(policy, size=5)[1])
    policy.keeping_prefixes = lambda max_rows: nullcontext()
    anew = rows_of(sampled_from(policy, size=5)[1])
    for one, other in zip(kept, anew, strict=True):
        assert one.messages == other.messages
        assert one.behaviour_log_probs == pytest.approx(other.behaviour_log_probs, abs=1e-5)


def test_a_group_shares_the_seed_of_the_environment() -> None:
    made: list[Echo] = []

    def make(state: Any) -> Echo:
        made.append(Echo(state))
        return made[-1]

    sampled_from(language_model(), make, ["a", "b"], 3)
    seeds = {state: {echo.seed for echo in made if echo.state == state} for state in ("a", "b")}
    assert [len(found) for found in seeds.values()] == [1, 1]
    assert seeds["a"] != seeds["b"]


def test_the_random_numbers_follow_the_seed() -> None:
    policy = language_model(max_new_tokens=20)
    first, again = (rows_of(sampled_from(policy)[1]) for _ in range(2))
    assert first == again


def test_settings_of_a_call_reach_the_sampler() -> None:
    policy = language_model(max_new_tokens=40)
    agent = AgentPolicy(policy, Echo)
    one, two = (agent.generate_actions(["you"], 1, temperature=0)[0][0] for _ in range(2))
    assert one == two
    (short,) = agent.generate_actions(["you"], 1, max_new_tokens=2)[0]
    assert all(turn.num_tokens <= 2 for turn in short.turns)


def test_scores_of_sampling_are_given_only_if_sampling_is_exact() -> None:
    _, sampled = sampled_from(language_model(sampling=SamplingConfig(max_new_tokens=10, top_k=5)))
    assert sampled.scores is None
    assert sampled.behaviour_log_probs is not None


def test_truncated_conversations_can_be_masked() -> None:
    policy = language_model(max_new_tokens=12, mask_truncated=True)
    agent, sampled = sampled_from(policy, lambda state: Echo(state, turns=1), size=6)
    rows = rows_of(sampled)
    assert {row.ended_by for row in rows} == {"length", "environment"}
    expected = [0 if row.ended_by == "length" else len(row) for row in rows]
    assert sampled.mask.sum(1).tolist() == expected
    scores = agent.score_actions([None] * 12, rows)
    assert torch.equal(scores.mask, sampled.mask)
    torch.testing.assert_close(scores.log_probs, sampled.scores.log_probs * sampled.mask, atol=1e-5, rtol=0)


def test_the_reference_scores_the_same_steps() -> None:
    policy = language_model(max_new_tokens=30, tokenizer=chat_tokenizer(FORGETFUL))
    assert not hasattr(AgentPolicy(policy, Echo), "reference_log_probabilities")
    tokenizer = policy.tokenizer
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2048}
    reference = tiny_model("llama", **sizes)
    adapted = language_model(max_new_tokens=30, tokenizer=tokenizer, reference_model=reference)
    agent, sampled = sampled_from(adapted)
    rows = rows_of(sampled)
    found = agent.reference_log_probabilities([None] * 6, rows)
    assert found.shape == sampled.mask.shape
    for row, log_probs in zip(rows, found, strict=True):
        torch.testing.assert_close(log_probs[: len(row)], scores_one_by_one(reference, row), atol=1e-5, rtol=0)
        assert not log_probs[len(row) :].any()
    assert hasattr(AgentPolicy(_with_lora(tokenizer), Echo), "reference_log_probabilities")


def _with_lora(tokenizer: Any) -> Any:
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    return HFPolicy(adapted_model(tiny_model(**sizes)), tokenizer, sampling=SamplingConfig(max_new_tokens=4))


def test_the_conformance_kit_passes() -> None:
    agent = AgentPolicy(language_model(max_new_tokens=4, tokenizer=chat_tokenizer(FORGETFUL)), Keyed)
    report = check_policy(agent, ["you", "me"], num_samples=20)
    report.raise_for_failures()
    assert report["sample_actions"].status == report["state_keys"].status == "passed"


# Credit


class Keyed(Echo):
    """Every turn is taken in a state of its own, the same for all conversations of a group."""

    def state_key(self) -> Any:
        return ("turn", self.count)


@pytest.mark.parametrize("credit", ["row", "return_to_go", "gigpo", "process_supervision"])
def test_the_core_trains_on_conversations(credit: Any) -> None:
    policy = language_model(max_new_tokens=20, tokenizer=chat_tokenizer(FORGETFUL))
    agent = AgentPolicy(policy, Keyed, max_turns=3)
    before = {name: weight.clone() for name, weight in agent.get_parameters().items()}
    reward = EnvironmentReward(per_turn=credit in ("return_to_go", "process_supervision"))
    config = GRPOConfig(
        group_size=4,
        seed=0,
        learning_rate=1e-4,
        advantage=AdvantageConfig(credit=credit),
        num_epochs_per_update=2,
        batch_size=4,
    )
    metrics = GRPOTrainer(config=config, policy=agent, reward_model=reward).step(["you", "me"])
    assert metrics["train/num_updates"] == 4
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.02)
    assert any(not torch.equal(before[name], weight) for name, weight in agent.get_parameters().items())


def test_values_of_a_critic_reach_the_core() -> None:
    """The critic values a token at a tenth of its id, and what follows a context at the context's length."""
    policy = language_model(max_new_tokens=20, tokenizer=chat_tokenizer(FORGETFUL))
    weight = torch.nn.Parameter(torch.tensor(0.1))
    real = policy.score_actions

    def with_values(states: Any, completions: Any) -> Any:
        scores = real(states, completions)
        width = scores.mask.shape[1]
        tokens = torch.tensor([[*c.token_ids, *[0] * (width - len(c))] for c in completions])
        lengths = torch.tensor([float(len(s["prompt"]) + len(c)) for s, c in zip(states, completions, strict=True)])
        return replace(scores, values=tokens * weight * scores.mask, final_values=lengths)

    policy.score_actions = with_values
    policy.get_parameters = lambda: dict(policy.model.named_parameters()) | {"critic": weight}
    agent, sampled = sampled_from(policy)
    rows = rows_of(sampled)
    scores = agent.score_actions([None] * 6, rows)
    assert scores.values is not None
    assert scores.final_values is not None
    for row, values, final in zip(rows, scores.values, scores.final_values.tolist(), strict=True):
        pairs = [pair for s in row.segments for pair in zip(s.token_ids, s.sampled, strict=True)]
        expected = torch.tensor([0.1 * token for token, is_sampled in pairs if is_sampled])
        torch.testing.assert_close(values[: len(row)], expected)
        assert final == len(row.segments[-1].token_ids)
    config = GRPOConfig(group_size=4, seed=0, learning_rate=1e-2, advantage=AdvantageConfig(credit="gae"))
    GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward(per_turn=True)).step(["you"])
    assert weight.item() != pytest.approx(0.1)


def test_a_policy_that_has_not_changed_has_the_ratio_1() -> None:
    agent = AgentPolicy(language_model(max_new_tokens=30, tokenizer=chat_tokenizer(FORGETFUL)), Echo)
    config = GRPOConfig(group_size=4, seed=0, objective=ObjectiveConfig(aggregation="step_mean"))
    metrics = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward()).step(["you"])
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_state_keys_are_equal_in_equal_states() -> None:
    agent, sampled = sampled_from(language_model(max_new_tokens=30), Keyed)
    rows = rows_of(sampled)
    keys = agent.state_keys([None] * 6, rows)
    by_turn = {}
    for row, of_row in zip(rows, keys.tolist(), strict=True):
        begin = 0
        for number, turn in enumerate(row.turns):
            decision = [
                by_turn.setdefault(number, of_row[begin]),
                *[CONTINUES] * (turn.num_tokens - 1),
            ]  # a turn counts once
            assert of_row[begin : begin + turn.num_tokens] == decision
            begin += turn.num_tokens
    assert len(set(by_turn.values())) == len(by_turn) == 3
    with pytest.raises(ConfigError, match=r"an environment has no state_key\(\)"):
        agent.state_keys([None], rows_of(sampled_from(language_model())[1])[:1])


def test_rewards_stand_at_the_end_of_their_turns_or_are_added_up() -> None:
    agent = Scripted(["ab", "c", says_call(), "d"], max_new_tokens=100)
    policy = AgentPolicy(
        agent.policy, lambda state: Echo(state, turns=2) if state == "a" else Tools(state), concurrency=1
    )
    rows = [*policy.generate_actions(["a"], 1)[0], *policy.generate_actions(["b"], 1)[0]]
    ends = [3, 5], [len(says_call()) + 1, len(says_call()) + 3]
    assert EnvironmentReward().compute_rewards([], rows).tolist() == [3.0, 1.0]
    per_step = EnvironmentReward(per_turn=True).compute_rewards([], rows)
    assert per_step.shape == (2, ends[1][1])
    assert {place: value for place, value in enumerate(per_step[0].tolist()) if value} == {2: 1.0, 4: 2.0}
    assert {place: value for place, value in enumerate(per_step[1].tolist()) if value} == {ends[1][1] - 1: 1.0}
    parts = WeightedRewards({"game": EnvironmentReward(), "turns": lambda s, rows: [len(r.turns) for r in rows]})
    assert parts.compute_rewards([1, 2], rows).tolist() == [5.0, 3.0]
    with pytest.raises(ContractError, match="actions must be conversations of an AgentPolicy; got str"):
        EnvironmentReward().compute_rewards(["x"], ["y"])


def test_a_failed_environment_leaves_its_row_to_the_reward_settings() -> None:
    class Failing(Echo):
        def step(self, action: Any) -> Any:
            if self.state == "bad":
                raise KeyError("lost")
            return super().step(action)

    for per_turn in (False, True):
        agent = AgentPolicy(language_model(max_new_tokens=60), Failing)
        config = GRPOConfig(group_size=4, seed=0)
        reward = EnvironmentReward(per_turn=per_turn)
        with pytest.raises(RewardError, match="EnvironmentReward"):
            GRPOTrainer(config=config, policy=agent, reward_model=reward).step(["bad", "good"])
        dropping = replace(config, reward=RewardConfig(non_finite="drop"))
        metrics = GRPOTrainer(config=dropping, policy=agent, reward_model=reward).step(["bad", "good"])
        assert metrics["rows/dropped"] == metrics["agents/ended_by_error"] > 0
