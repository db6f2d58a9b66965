"""The two vLLM samplers against a real vLLM; `make test-vllm` builds the environment that these tests need."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-vllm")

from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from adapters.agents import AgentPolicy, EnvironmentReward
from adapters.llm.policy import HFPolicy
from adapters.llm.sampling.samplers import SampledTokens
from adapters.llm.sampling.sampling_config import SamplingConfig
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # vLLM emits many warnings

LONG = [2 + (7 * i) % 30 for i in range(150)]  # longer than a block of the prefix cache: 128 tokens on a CPU
SHORT = [5, 6, 7]
SAMPLING = SamplingConfig(max_new_tokens=6, temperature=0.7)
END = [1]


def words(token_ids: list[int]) -> str:
    return " ".join(f"w{token - 2}" for token in token_ids)


STATES = [words(LONG), words(SHORT), words(LONG)]


@torch.no_grad()
def logits_after(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """The model's logits at each step of a completion: [L, V]."""
    tokens = torch.tensor([[*prompt, *completion]])
    return model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]


def worst_difference(
    model: Any, prompts: list[list[int]], sampled: SampledTokens, size: int, of: Callable[[Tensor], Tensor]
) -> float:
    """Largest distance of the reported log-probs from log_softmax(of(logits)) of the model."""
    worst = 0.0
    for row, (tokens, log_probs) in enumerate(zip(sampled.token_ids, sampled.behaviour_log_probs, strict=True)):
        expected = of(logits_after(model, prompts[row // size], list(tokens))).log_softmax(1)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        worst = max(worst, (chosen - torch.tensor(log_probs)).abs().max().item())
    return worst


def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]))


def low_numbers(states: Any, actions: Any) -> list[float]:
    return [-sum(action.token_ids) / len(action) for action in actions]


@pytest.mark.parametrize("kind", ["all weights", "LoRA"])
def test_after_each_iteration_vllm_reports_the_log_probs_of_the_trainer(
    make_sampler: Callable[[], Any], model: Any, folder: Any, kind: str
) -> None:
    trained = adapted(model) if kind == "LoRA" else model
    policy = HFPolicy(trained, AutoTokenizer.from_pretrained(folder), sampling=SAMPLING, sampler=make_sampler())
    config = GRPOConfig(
        seed=0, group_size=4, learning_rate=0.01, objective=ObjectiveConfig(sampler_correction="truncate")
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=low_numbers)
    fixed = policy.generate_actions(STATES[:1], 1)[0]
    says = policy.get_log_probabilities(STATES[:1], fixed).item()
    for _ in range(3):
        metrics = trainer.step(STATES)
        # the importance weights are 1 up to rounding
        assert metrics["train/sampler_ratio_mean"] == pytest.approx(1.0, abs=1e-4)

        policy.sync_sampler()
        sampled = policy.sample_actions(STATES, 2)
        assert sampled.scores is None  # vLLM has no log-probs of the trainer's policy
        rows = [state for state in STATES for _ in range(2)]
        with torch.no_grad():
            scores = policy.score_actions(rows, [action for group in sampled.actions for action in group])
        difference = torch.where(sampled.mask, scores.log_probs - sampled.behaviour_log_probs, 0.0)
        assert difference.abs().max() < 1e-4

        said, says = says, policy.get_log_probabilities(STATES[:1], fixed).item()
        assert abs(says - said) > 0.01  # the weights have changed


def test_truncated_sampling_is_corrected_with_importance_weights(engine: Any, model: Any, folder: Any) -> None:
    """With the two most likely tokens only, each weight is the probability of both tokens under the policy."""
    drawn: list[list[int]] = []

    def reward(states: Any, actions: Any) -> list[float]:
        drawn.extend(list(action.token_ids) for action in actions)
        return low_numbers(states, actions)

    before = copy.deepcopy(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = HFPolicy(model, tokenizer, sampling=replace(SAMPLING, top_k=2), sampler=engine)
    config = GRPOConfig(seed=0, group_size=4, objective=ObjectiveConfig(sampler_correction="truncate"))
    metrics = GRPOTrainer(config=config, policy=policy, reward_model=reward).step(STATES)

    prompts = [prompt for prompt in (LONG, SHORT, LONG) for _ in range(4)]
    mass = [
        (logits_after(before, prompt, tokens) / 0.7).softmax(1).topk(2, 1).values.sum(1)
        for prompt, tokens in zip(prompts, drawn, strict=True)
    ]
    expected = torch.cat(mass).mean().item()
    assert expected < 0.95
    assert metrics["train/sampler_ratio_mean"] == pytest.approx(expected, abs=1e-4)


def test_sync_clears_the_prefix_cache(engine: Any, model: Any) -> None:
    """Without clearing, the cache would have keys and values of the old weights."""
    engine.sync(model)
    draw = {"end_token_ids": END, "seeds": [1, 2]}
    tempered = lambda logits: logits / SAMPLING.temperature  # noqa: E731
    assert worst_difference(model, [LONG], engine.sample([LONG], 2, SAMPLING, **draw), 2, tempered) < 1e-4

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights = {"weights_iterator": model.named_parameters(remove_duplicate=False)}
    engine.engine.collective_rpc("reload_weights", kwargs=weights)
    stale = worst_difference(model, [LONG], engine.sample([LONG], 2, SAMPLING, **draw), 2, tempered)
    short = worst_difference(model, [SHORT], engine.sample([SHORT], 2, SAMPLING, **draw), 2, tempered)
    assert stale > 0.01
    assert short < 1e-4  # a prompt that is shorter than a block is not cached

    engine.sync(model)
    assert worst_difference(model, [LONG], engine.sample([LONG], 2, SAMPLING, **draw), 2, tempered) < 1e-4


def only_largest(count: int) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits.masked_fill(logits < logits.topk(count, 1).values[:, -1:], -torch.inf)


def nucleus(mass: float) -> Callable[[Tensor], Tensor]:
    """Keep the most likely tokens until their total probability reaches `mass`."""

    def of(logits: Tensor) -> Tensor:
        probs, order = logits.softmax(1).sort(1, descending=True)
        before = probs.cumsum(1) - probs
        return logits.masked_fill((before >= mass).gather(1, order.argsort(1)), -torch.inf)

    return of


def at_least(share: float) -> Callable[[Tensor], Tensor]:
    def of(logits: Tensor) -> Tensor:
        probs = logits.softmax(1)
        return logits.masked_fill(probs < share * probs.amax(1, keepdim=True), -torch.inf)

    return of


SHAPES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "temperature": ({"temperature": 1.3}, lambda logits: logits / 1.3),
    "top_k": ({"temperature": 1.0, "top_k": 3}, only_largest(3)),
    "top_p": ({"temperature": 1.0, "top_p": 0.6}, nucleus(0.6)),
    "min_p": ({"temperature": 1.0, "min_p": 0.3}, at_least(0.3)),
    "no end before": (
        {"temperature": 1.0, "min_new_tokens": 6},
        lambda logits: logits.index_fill(1, torch.tensor(END), -torch.inf),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_log_probs_are_those_of_the_sampling_distribution(
    make_sampler: Callable[[], Any], model: Any, name: str
) -> None:
    settings, shaped = SHAPES[name]
    sampler = make_sampler()
    sampler.sync(model)
    config = replace(SAMPLING, **settings)
    sampled = sampler.sample([SHORT, LONG], 3, config, end_token_ids=END, seeds=range(6))
    assert worst_difference(model, [SHORT, LONG], sampled, 3, shaped) < 1e-4


def test_the_repetition_penalty_includes_the_prompt(make_sampler: Callable[[], Any], model: Any) -> None:
    sampler = make_sampler()
    sampler.sync(model)
    config = replace(SAMPLING, temperature=1.0, repetition_penalty=1.5)
    sampled = sampler.sample([SHORT], 2, config, end_token_ids=END, seeds=[3, 4])
    for tokens, log_probs in zip(sampled.token_ids, sampled.behaviour_log_probs, strict=True):
        logits = logits_after(model, SHORT, list(tokens))
        for step in range(len(tokens)):
            seen = torch.tensor(sorted({*SHORT, *tokens[:step]}))
            old = logits[step, seen]
            logits[step, seen] = torch.where(old > 0, old / 1.5, old * 1.5)
        expected = logits.log_softmax(1)[torch.arange(len(tokens)), torch.tensor(tokens)]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-4)


def test_completions_end_at_the_given_tokens_and_strings(make_sampler: Callable[[], Any], model: Any) -> None:
    sampler = make_sampler()
    sampler.sync(model)
    config = replace(SAMPLING, max_new_tokens=120, temperature=1.5)
    free = sampler.sample([SHORT], 8, config, end_token_ids=[], seeds=range(8))
    assert all(len(tokens) == 120 for tokens in free.token_ids)  # the model's own end token does not end them
    assert set(free.finish_reasons) == {"length"}
    ended = sampler.sample([SHORT], 8, replace(config, stop=("w8",)), end_token_ids=[17, 18], seeds=range(8))
    assert set(ended.finish_reasons) == {"end", "stop"}
    for tokens, reason, log_probs, other in zip(
        ended.token_ids, ended.finish_reasons, ended.behaviour_log_probs, free.token_ids, strict=True
    ):
        last = {"end": (17, 18), "stop": (10,)}[reason]  # w8 is token 10, and it stays
        assert tokens[-1] in last
        assert not {10, 17, 18} & set(tokens[:-1])
        assert len(log_probs) == len(tokens)
        assert tokens == other[: len(tokens)]  # the seed determines the tokens


def test_rows_have_seeds_of_their_own(make_sampler: Callable[[], Any], model: Any) -> None:
    sampler = make_sampler()
    sampler.sync(model)
    config = replace(SAMPLING, temperature=1.5)
    before = torch.get_rng_state()
    together = sampler.sample([SHORT, LONG], 2, config, end_token_ids=[], seeds=[11, 2**62, 13, 14])
    assert torch.equal(before, torch.get_rng_state())  # the trainer uses this generator
    alone = sampler.sample([LONG], 2, config, end_token_ids=[], seeds=[13, 14])
    assert together.token_ids[2:] == alone.token_ids
    assert len({tuple(tokens) for tokens in together.token_ids}) == 4
    greedy = sampler.sample([SHORT], 2, replace(config, temperature=0.0), end_token_ids=[], seeds=[1, 2])
    likeliest = logits_after(model, SHORT, list(greedy.token_ids[0])).argmax(1)
    assert greedy.token_ids[0] == greedy.token_ids[1] == likeliest.tolist()
    assert greedy.behaviour_log_probs == [[0.0] * 6] * 2


def test_a_server_with_other_weights_is_detected(server_url: str, model: Any, tmp_path: Any) -> None:
    from adapters.llm.sampling.vllm_server import VLLMServerSampler

    first, second = (VLLMServerSampler(server_url, weights_folder=tmp_path / name) for name in ("a", "b"))
    first.sync(model)
    second.sync(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match="no longer has the weights of the last sync"):
        first.sample([SHORT], 1, SAMPLING, end_token_ids=END, seeds=[1])


def lookup() -> str:
    """Looks something up."""
    return "w3 w4"


class Asks:
    """Asks again and again. The policy may look something up, and low numbers are rewarded."""

    def __init__(self, state: str) -> None:
        self.state = state

    def tools(self) -> list[Any]:
        return [lookup]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.state, {}

    def step(self, action: Any) -> Any:
        return "w5", float("w1" in action["content"]), False, False, {}


def test_agents_talk_over_three_turns_with_a_tool(make_sampler: Callable[[], Any], model: Any, folder: Any) -> None:
    """vLLM reports the log-probs that scoring computes, and the number of conversations at a time changes no token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = SamplingConfig(max_new_tokens=24, temperature=1.5)
    policy = HFPolicy(model, tokenizer, sampling=sampling, sampler=make_sampler())
    with torch.no_grad():  # more turns end, and more are calls
        model.get_input_embeddings().weight[[END[0], -1]] *= torch.tensor([[3.0], [-2.0]])
    found = []
    for concurrency in (1, 64):
        agent = AgentPolicy(policy, Asks, max_turns=3, concurrency=concurrency)
        agent.sync_sampler()
        torch.manual_seed(1)
        sampled = agent.sample_actions(["w1 w2", "w6"], 16)
        found.append([row for group in sampled.actions for row in group])
    assert [row.segments for row in found[0]] == [row.segments for row in found[1]]
    assert max(len(row.turns) for row in found[0]) == 3
    assert any(message["role"] == "tool" for row in found[0] for message in row.messages[:-2])
    assert all(len(row.segments) == 1 for row in found[0])
    assert sampled.scores is None
    with torch.no_grad():
        scores = agent.score_actions([None] * 32, found[1])
    assert torch.equal(scores.mask, sampled.mask)
    assert (scores.log_probs - sampled.behaviour_log_probs).abs().max() < 1e-4
    config = GRPOConfig(
        seed=0, group_size=4, learning_rate=0.01, objective=ObjectiveConfig(sampler_correction="truncate")
    )
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward())
    for _ in range(2):  # the second iteration samples with the weights of the first
        metrics = trainer.step(["w1 w2", "w6"])
        assert metrics["train/sampler_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
