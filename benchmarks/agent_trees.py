"""Compare the variance of the gradient of groups that branch with that of independent conversations, at equal sampled tokens.

Three tasks with a reward only at the end of a conversation. A tiny model is made here, and a supervised warm-up teaches it to
say random letters, so it is right by chance. The weights then stay as they are. Many groups are sampled, and each gives one
estimate of the gradient, by the settings that training would use: the sum over rows of advantage times grad log pi, divided by
the number of rows.

    python -m benchmarks.agent_trees                  # about five minutes of one core
    python -m benchmarks.agent_trees --seeds 1 --groups 20

Baselines change the length of the mean gradient a little, because a group's mean has the row's own reward in it. So noise is
the trace of the estimates' covariance divided by the squared length of their mean, of which the part that is noise is
subtracted. Averages over more groups have less noise in proportion, so noise times tokens per group is what is compared.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.agents import AgentPolicy, Branching, Conversation, EnvironmentReward, Message
from adapters.llm import Completion, HFOptions, HFPolicy, SamplingConfig
from grpo import AdvantageConfig, AdvantageEstimator, ExperienceBatch

Credit: TypeAlias = Literal["row", "gigpo"]

LETTERS = "abcdefgh"
MARKS = ["<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
WARM_UP_STEPS, WARM_UP_ROWS, WARM_UP_RATE = 150, 6, 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Turns in each of which the policy says some letters. Some turns have a right answer, a single letter."""

    name: str
    num_letters: tuple[int, ...]
    """Number of letters of each turn."""
    num_choices: int
    """Number of letters that the policy chooses from."""
    is_asked: tuple[bool, ...]
    """The turns with a right answer. The reward is 1 if all of them are right."""
    ends_when_wrong: bool
    """Whether a wrong answer ends the conversation."""
    branch: Branching
    num_roots: int
    """Number of roots of a group that branches."""
    num_independent: int
    """Number of conversations of a group that does not, for about as many sampled tokens."""


TASKS = (
    Task(
        name="6 steps in the dark; a wrong one ends the game",
        num_letters=(1,) * 6,
        num_choices=2,
        is_asked=(True,) * 6,
        ends_when_wrong=True,
        branch=Branching(at=(1, 2, 3, 4, 5), width=(2,) * 5),
        num_roots=8,
        num_independent=24,
    ),
    Task(
        name="3 preparations of 8 letters, then one guess among 8",
        num_letters=(8, 8, 8, 1),
        num_choices=8,
        is_asked=(False, False, False, True),
        ends_when_wrong=False,
        branch=Branching(at=(3,), width=(8,)),
        num_roots=4,
        num_independent=6,
    ),
    Task(
        name="a lock of 4 digits, tried as a whole",
        num_letters=(1,) * 4,
        num_choices=2,
        is_asked=(True,) * 4,
        ends_when_wrong=False,
        branch=Branching(at=(1, 2, 3), width=(2, 2, 2)),
        num_roots=4,
        num_independent=15,
    ),
)


class Letters:
    """Asks for letters, turn by turn. The right letter of every turn with one is the first."""

    def __init__(self, task: Task) -> None:
        self.task, self.turn, self.num_wrong = task, 0, 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return "0", {}

    async def step(self, action: Message) -> Any:
        self.num_wrong += self.task.is_asked[self.turn] and action["content"] != LETTERS[0]
        self.turn += 1
        is_over = self.turn == len(self.task.is_asked) or (self.num_wrong > 0 and self.task.ends_when_wrong)
        reward = float(self.turn == len(self.task.is_asked) and self.num_wrong == 0)
        return str(self.turn), reward, is_over, False, {}

    async def snapshot(self) -> Any:
        return self.turn, self.num_wrong

    async def restore(self, state: Any) -> None:
        self.turn, self.num_wrong = state


def make_model(task: Task) -> HFPolicy:
    """A small Qwen3 with random weights, which reads single characters."""
    vocabulary = {token: i for i, token in enumerate([*MARKS, *LETTERS, *"0123456789u"])}
    characters = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=2,
    )
    sampling = SamplingConfig(max_new_tokens=max(task.num_letters) + 3)
    return HFPolicy(
        Qwen3ForCausalLM(config), tokenizer, sampling=sampling, options=HFOptions(max_tokens_per_forward=200_000)
    )


def warm_up(policy: HFPolicy, task: Task) -> None:
    """Teach the model to say random letters, as many as each turn wants, and then to end its turn."""
    tokenizer = policy.tokenizer
    optimizer = torch.optim.Adam(policy.model.parameters(), lr=WARM_UP_RATE)
    for _ in range(WARM_UP_STEPS):
        prompts, completions = [], []
        for _ in range(WARM_UP_ROWS):
            messages: list[dict[str, str]] = []
            for turn, count in enumerate(task.num_letters):
                messages.append({"role": "user", "content": str(turn)})
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                prompts.append(tokenizer.encode(text, add_special_tokens=False))
                said = "".join(LETTERS[i] for i in torch.randint(task.num_choices, (count,)).tolist())
                tokens = (*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id)
                completions.append(Completion(token_ids=tokens, text=said, finish_reason="end"))
                messages.append({"role": "assistant", "content": said})
        scores = policy.score_actions(prompts, completions)
        optimizer.zero_grad()
        (-scores.log_probs.sum() / scores.mask.sum()).backward()
        optimizer.step()


@dataclass(slots=True)
class Estimates:
    """Estimates of the gradient, one per group."""

    gradients: list[Tensor]
    tokens_per_group: float
    success: float
    """Share of rows with the reward 1."""

    @property
    def mean(self) -> Tensor:
        return torch.stack(self.gradients).mean(0)

    @property
    def noise(self) -> float:
        """tr Cov(g) / |E g|^2 of one group's estimate g, times its number of sampled tokens. NaN: too few groups."""
        estimates = torch.stack(self.gradients).double()
        variance = estimates.var(0).sum().item()
        signal = estimates.mean(0).square().sum().item() - variance / len(estimates)
        return variance / signal * self.tokens_per_group if signal > 0 else float("nan")


def estimates(
    policy: HFPolicy, task: Task, branch: Branching | None, credits: Sequence[Credit], num_groups: int
) -> dict[Credit, Estimates]:
    """One estimate per group and credit. The credits are compared on the same conversations."""
    agent = AgentPolicy(policy, Letters, max_turns=len(task.is_asked), branch=branch, concurrency=4096)
    size = task.num_independent if branch is None else task.num_roots * branch.num_leaves
    parameters = list(policy.get_parameters().values())
    found: dict[Credit, list[Tensor]] = {credit: [] for credit in credits}
    num_tokens = successes = 0.0
    at_once = max(1, 1024 // size)
    while (count := min(at_once, num_groups - len(found[credits[0]]))) > 0:
        sampled = agent.sample_actions([task] * count, size)
        num_tokens += sampled.metrics["agents/tokens"]
        for group in sampled.actions:
            rewards = EnvironmentReward().compute_rewards([task] * size, group)
            successes += rewards.sum().item()
            for credit, gradient in _gradients(agent, group, rewards, credits, parameters).items():
                found[credit].append(gradient)
    return {
        credit: Estimates(gradients, num_tokens / num_groups, successes / (num_groups * size))
        for credit, gradients in found.items()
    }


def _gradients(
    agent: AgentPolicy,
    group: Sequence[Conversation],
    rewards: Tensor,
    credits: Sequence[Credit],
    parameters: list[Tensor],
) -> dict[Credit, Tensor]:
    if rewards.max() == rewards.min():  # all advantages are 0
        return {credit: torch.zeros(sum(p.numel() for p in parameters)) for credit in credits}
    states = [None] * len(group)
    scores = agent.score_actions(states, group)
    keys = agent.state_keys(states, group) if "gigpo" in credits else None
    ids = torch.zeros(len(group), dtype=torch.int64)
    batch = ExperienceBatch.from_rows(states, group, rewards, ids, mask=scores.mask, state_keys=keys)
    found = {}
    for credit in credits:
        advantages = AdvantageEstimator(AdvantageConfig(credit=credit))(batch).view(len(group), -1)
        loss = (scores.log_probs * advantages).sum() / len(group)
        slopes = torch.autograd.grad(loss, parameters, retain_graph=True)
        found[credit] = torch.cat([slope.flatten() for slope in slopes])
    return found


def measure(task: Task, seed: int, num_groups: int) -> dict[str, float]:
    """The noise of both ways, and what else the table shows."""
    torch.manual_seed(seed)
    policy = make_model(task)
    warm_up(policy, task)
    policy.eval()
    alone = estimates(policy, task, None, ["row"], 2 * num_groups)["row"]
    trees = estimates(policy, task, task.branch, ["row", "gigpo"], num_groups)
    cosine = torch.nn.functional.cosine_similarity(alone.mean, trees["row"].mean, dim=0).item()
    return {
        "success, %": 100 * alone.success,
        "tokens, independent": alone.tokens_per_group,
        "tokens, branching": trees["row"].tokens_per_group,
        "row": trees["row"].noise / alone.noise,
        "gigpo": trees["gigpo"].noise / alone.noise,
        "cosine": cosine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=50, help="groups that branch; independent ones are twice as many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seeds 0 to {arguments.seeds - 1}, {arguments.groups} groups that branch and {2 * arguments.groups} others")
    print("variance / squared mean at equal sampled tokens, branching / independent: median (least to most)")
    print("| task | right, % | tokens per group | credit row | credit gigpo | cosine of the mean gradients |")
    print("|---|---|---|---|---|---|")
    for task in TASKS:
        rows = [measure(task, seed, arguments.groups) for seed in range(arguments.seeds)]

        def over_seeds(name: str, digits: int, rows: Sequence[dict[str, float]] = rows) -> str:
            values = [row[name] for row in rows]
            low, high = min(values), max(values)
            return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

        tokens = f"{statistics.median(row['tokens, branching'] for row in rows):.0f}"
        others = f"{statistics.median(row['tokens, independent'] for row in rows):.0f}"
        print(
            f"| {task.name} | {over_seeds('success, %', 1)} | {tokens} / {others} | {over_seeds('row', 2)} | "
            f"{over_seeds('gigpo', 2)} | {over_seeds('cosine', 2)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
