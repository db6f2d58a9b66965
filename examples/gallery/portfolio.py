"""A portfolio: an action is a split of the money, drawn from a Dirichlet distribution.

    python -m examples.gallery.portfolio           # less than a minute on one core
    python -m examples.gallery.portfolio --seed 1

A state is the mood of the market, which can be seen. An action is a point of a simplex: the shares of four assets. The
money is split anew in each of 8 quarters, and the reward is its mean growth per quarter, the logarithm of Kelly's
criterion. All splits of a group live through the same quarters, so luck is the same for all of them, and only the
splits differ.

The baseline is the best fixed split: found with gradients of the market itself, which GRPO does not have, but blind to
the mood. The bound is the best split for each mood, found in the same way. The figures are measured in markets that
none of the three has seen. The script writes portfolio.png.
"""

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.distributions import Dirichlet

from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_policy

ASSETS, MOODS, NUM_QUARTERS = ("cash", "bonds", "stocks", "gold"), ("calm", "nervous", "falling"), 8
MEANS = torch.tensor(
    [[0.0, 0.010, 0.040, 0.005], [0.0, 0.012, 0.005, 0.010], [0.0, 0.005, -0.080, 0.030]]
)  # of the logarithms
SPREADS = torch.tensor([[0.0, 0.05, 0.15, 0.15], [0.0, 0.06, 0.25, 0.15], [0.0, 0.08, 0.30, 0.20]])


def make_states(number: int, seed: int) -> Tensor:
    """[B, 2]: the mood, and the number of the market's random generator, which the policy does not look at."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(high, (number,), generator=generator) for high in (len(MOODS), 10**9)], dim=1)


def market(states: Tensor) -> Tensor:
    """What a unit of money becomes in each asset and quarter, [N, 8, 4]. Equal states have equal quarters."""
    distinct, places = states.unique(dim=0, return_inverse=True)
    noise = [
        torch.randn(NUM_QUARTERS, len(ASSETS), generator=torch.Generator().manual_seed(int(n))) for _, n in distinct
    ]
    moods = distinct[:, 0]
    return (MEANS[moods].unsqueeze(1) + SPREADS[moods].unsqueeze(1) * torch.stack(noise)).exp()[places]


def growth(states: Tensor, splits: Tensor) -> Tensor:
    """The reward: the mean growth per quarter in percent, [N]."""
    return 100 * (market(states) * splits.unsqueeze(1)).sum(2).log().mean(1)


class Investor(nn.Module):
    """The policy: a Dirichlet distribution of splits for each mood. The mean and the concentration of each are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(len(MOODS), len(ASSETS)))
        self.log_concentration = nn.Parameter(torch.full((len(MOODS), 1), 8.0).log())

    def splits(self, states: Tensor) -> Dirichlet:
        """The distribution of splits, [B, 4]. No share's parameter is below 0.1, since a share of exactly 0 has no density."""
        parameters = self.logits.softmax(1) * self.log_concentration.exp() + 0.1
        return Dirichlet(parameters[states[:, 0]], validate_args=False)

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        return self.splits(states).sample((num_actions_per_state,)).transpose(0, 1)  # [B, G, 4]

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.splits(states).log_prob(actions)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def best_splits(states: Tensor, *, by_mood: bool, steps: int) -> Tensor:
    """The splits with the largest growth in these markets, [3, 4], by gradient ascent on the market itself."""
    logits = torch.zeros(len(MOODS) if by_mood else 1, len(ASSETS), requires_grad=True)
    optimizer, units = torch.optim.Adam([logits], lr=0.05), market(states)
    for _ in range(steps):
        splits = logits.softmax(1).expand(len(MOODS), -1)[states[:, 0]]
        optimizer.zero_grad()
        (-(units * splits.unsqueeze(1)).sum(2).log().mean()).backward()
        optimizer.step()
    return logits.detach().softmax(1).expand(len(MOODS), -1)


def plot(tables: dict[str, Tensor], path: Path) -> None:
    figure, axes = plt.subplots(1, len(tables), figsize=(3.4 * len(tables), 3), sharey=True, layout="constrained")
    for axis, (name, splits) in zip(axes, tables.items(), strict=True):
        lower = torch.zeros(len(MOODS))
        for asset, shares in zip(ASSETS, splits.T, strict=True):
            axis.bar(MOODS, shares, bottom=lower, label=asset)
            lower = lower + shares
        axis.set_title(name)
    axes[0].set_ylabel("share of the money")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--markets", type=int, default=20_000, help="markets that are measured (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    policy = Investor()
    print(check_policy(policy, make_states(8, seed=args.seed), strict=True))
    config = GRPOConfig(group_size=16, learning_rate=0.03, lr_schedule="linear", seed=args.seed)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=growth)
    trainer.train(
        lambda iteration: make_states(64, seed=10**6 * (args.seed + 1) + iteration), num_iterations=args.iterations
    )

    known, held_out = make_states(args.markets, seed=1), make_states(args.markets, seed=2)
    learned = policy.splits(torch.arange(len(MOODS)).unsqueeze(1)).mean.detach()
    tables = {
        "equal shares": torch.full((len(MOODS), len(ASSETS)), 1 / len(ASSETS)),
        "best fixed split": best_splits(known, by_mood=False, steps=300),
        "GRPO": learned,
        "best split of each mood": best_splits(known, by_mood=True, steps=300),
    }
    print(f"\n{'growth per quarter in new markets':36s}" + "".join(f"{mood:>10s}" for mood in (*MOODS, "all")))
    for name, splits in tables.items():
        grown = growth(held_out, splits[held_out[:, 0]])
        means = [grown[held_out[:, 0] == mood].mean() for mood in range(len(MOODS))]
        print(f"{name:36s}" + "".join(f"{mean:9.2f}%" for mean in (*means, grown.mean())))
    plot(tables, args.folder / "portfolio.png")
    print(f"written: {args.folder}/portfolio.png")


if __name__ == "__main__":
    main()
