"""Symbolic regression: an action is an expression, written token by token under a grammar.

    python -m examples.gallery.symbolic_regression           # about two minutes on one core

A state is one of four functions, known by its values at 20 points. An action is an expression in prefix notation, such
as "+ x sin x": up to 14 tokens, each a step. A mask leaves only tokens with which the expression can still end in time.

What does a search find with equal numbers of expressions? The baselines are random search, with the untrained network,
and REINFORCE by hand, with the same network and learning rate. The script writes symbolic_regression.png.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from grpo import ActionScores, AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy

TOKENS = ("+", "-", "*", "sin", "cos", "exp", "x", "1")
ARITY = torch.tensor([2, 2, 2, 1, 1, 1, 0, 0])
LENGTH, GROUP, COPIES, NONE = 14, 64, 2, -1  # NONE: after the end
X = torch.linspace(-1, 1, 20)
POWERS = X**3 + X**2 + X
Y = torch.stack([POWERS, X**4 + POWERS, (X**2).sin() * X.cos() - 1, X.sin() + (X + X**2).sin()])  # the four functions
STATES, SHAPE = torch.arange(len(Y)).repeat(COPIES), (COPIES, len(Y), GROUP)


def values(expressions: Tensor) -> Tensor:
    """The values of N expressions at all points, [N, 20], with a stack, from the last token to the first."""
    stack, top = torch.zeros(len(expressions), LENGTH + 2, len(X)), torch.ones(len(expressions), dtype=torch.int64)
    rows = torch.arange(len(expressions))
    for tokens in expressions.T.flip(0):
        a, b = stack[rows, top], stack[rows, top - 1]
        results = torch.stack([a + b, a - b, a * b, a.sin(), a.cos(), a.exp(), X.expand_as(a), torch.ones_like(a)])
        there = tokens != NONE
        top = torch.where(there, (top - ARITY[tokens] + 1).clamp(min=1), top)
        stack[rows[there], top[there]] = results[tokens[there], rows[there]]
    return stack[rows, top]


def reward(states: Tensor, actions: Tensor) -> Tensor:
    """1 / (1 + the root of the mean squared error over the spread of the function)."""
    error = (values(actions) - Y[states]).square().mean(1).sqrt() / Y[states].std(1)
    return (1 / (1 + error)).nan_to_num(0.0)


class Writer(nn.Module):
    """The policy: logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        width, out = len(Y) + 4 * (len(TOKENS) + 1) + 2, nn.Linear(64, len(TOKENS))
        self.network = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), out)

    def log_probs(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the token after each prefix, [N, T + 1, 8], and whether there is one, [N, T + 1]."""
        change = torch.where(tokens == NONE, 0, ARITY[tokens] - 1).cumsum(1)
        places = 1 + nn.functional.pad(change, (1, 0))  # the open places
        position = torch.arange(places.shape[1]).expand_as(places)
        padded = nn.functional.pad(tokens, (4, 0), value=NONE) + 1
        before = nn.functional.one_hot(padded, len(TOKENS) + 1).unfold(1, 4, 1)
        target = nn.functional.one_hot(states, len(Y)).unsqueeze(1).expand(-1, places.shape[1], -1)
        numbers = torch.stack([places, position], dim=2) / LENGTH
        logits = self.network(torch.cat([target, before.flatten(2), numbers], dim=2).float())
        return logits.masked_fill((position + places).unsqueeze(2) + ARITY > LENGTH, -1e9).log_softmax(2), places > 0

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        rows = states.repeat_interleave(num_actions_per_state)
        tokens = torch.empty(len(rows), 0, dtype=torch.int64)
        for _ in range(LENGTH):
            log_probs, goes_on = self.log_probs(rows, tokens)
            new = torch.where(goes_on[:, -1:], log_probs[:, -1].exp().multinomial(1), NONE)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens.unflatten(0, (len(states), num_actions_per_state))

    def score_actions(self, states: Tensor, actions: Tensor) -> ActionScores:
        (log_probs, _), mask = self.log_probs(states, actions[:, :-1]), actions != NONE
        taken = log_probs.gather(2, actions.clamp(min=0).unsqueeze(2)).squeeze(2)
        entropy = -(log_probs.exp() * log_probs).sum(2)
        return ActionScores(log_probs=taken.where(mask, 0), mask=mask, entropy=entropy.where(mask, 0))

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def by_hand(policy: Writer, iterations: int, *, learns: bool) -> list[Tensor]:
    """REINFORCE with the mean of each function's rewards as the baseline, or random search. Returns all rewards."""
    optimizer, rows, seen = torch.optim.Adam(policy.parameters(), lr=3e-3), STATES.repeat_interleave(GROUP), []
    for _ in range(iterations):
        with torch.no_grad():
            actions = policy.generate_actions(STATES, GROUP).flatten(0, 1)
        seen.append(reward(rows, actions))
        if learns:
            advantages = seen[-1] - seen[-1].unflatten(0, SHAPE).mean((0, 2))[rows]
            optimizer.zero_grad()
            (-advantages * policy.get_log_probabilities(rows, actions)).mean().backward()
            optimizer.step()
    return seen


def by_grpo(policy: Writer, iterations: int, **settings: Any) -> list[Tensor]:
    def recorded(states: Tensor, actions: Tensor) -> Tensor:
        seen.append(reward(states, actions))
        return seen[-1]

    config, seen = GRPOConfig(group_size=GROUP, learning_rate=3e-3, **settings), []
    GRPOTrainer(config=config, policy=policy, reward_model=recorded).train(lambda _: STATES, num_iterations=iterations)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=120, help="of 512 expressions each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(check_policy(Writer(), torch.arange(len(Y)), strict=True))
    advantage = AdvantageConfig(baseline="max_at_k", k=32, scale="batch")  # what the best of 32 earns, not the mean
    objective = ObjectiveConfig(aggregation="row_sum", entropy_coef=0.03)
    searches = {
        "random search": partial(by_hand, learns=False),
        "REINFORCE by hand": partial(by_hand, learns=True),
        "GRPO, defaults": by_grpo,
        "GRPO, best of k": partial(by_grpo, advantage=advantage, objective=objective),
    }
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    print(f"\nbest of {args.iterations * len(STATES) * GROUP:,} expressions: the mean of four rewards, and each")
    for name, search in searches.items():
        torch.manual_seed(args.seed)
        best = torch.stack(search(Writer(), args.iterations)).unflatten(1, SHAPE).amax((1, 3)).cummax(0).values
        print(f"{name:20s}{best[-1].mean():8.3f}   " + "".join(f"{reward:7.3f}" for reward in best[-1]))
        axis.plot(best.mean(1), label=name)
    axis.set(xlabel="iteration", ylabel="best reward so far, mean of four")
    axis.legend(frameon=False)
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "symbolic_regression.png", dpi=90)
    print(f"written: {args.folder}/symbolic_regression.png")


if __name__ == "__main__":
    main()
