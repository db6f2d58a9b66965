"""Ranking from logged clicks: an action is an ordered slate of items, and the policy trains on what another one has shown.

    python -m examples.gallery.ranking           # less than a minute on one core
    python -m examples.gallery.ranking --seed 1

A state is a user, four numbers. An action is a slate of 5 of 8 items in order, drawn one after the other from those
that are left (Plackett-Luce): five steps, each with its own log-probability and its own reward, a click. The log has 8
slates per user, which are a group. They were drawn by popularity, and their probabilities were logged. The policy is
not asked for slates while it trains, and the reward is not called: `trainer.update` reads the log. The table has
expected clicks of users who are not in the log.

The baseline is a click model, fitted to the same log: a place is looked at with one probability, and an item that is
looked at is clicked with another. It shows the items in the order of the second. The users here do click in this way,
so the click model has the better of it: GRPO knows nothing of places. The script writes ranking.png.
"""

import argparse
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from grpo import AdvantageConfig, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig, Truncate
from grpo.checks import check_policy

NUM_ITEMS, NUM_FEATURES, SLATE, NUM_USERS, VISITS = 8, 4, 5, 1000, 8
LOOKS = 1 / torch.arange(1.0, SLATE + 1)  # the probability that a user looks at each place
TASTES = torch.randn(NUM_FEATURES, NUM_ITEMS, generator=torch.Generator().manual_seed(0))
POPULARITY = torch.linspace(1.5, 0.0, NUM_ITEMS)  # what the logging policy ranks by


def make_users(number: int, seed: int) -> Tensor:
    return torch.randn(number, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))


def click_chances(users: Tensor, slates: Tensor) -> Tensor:
    """The probability of a click at each place, [N, 5]."""
    return LOOKS * (users @ TASTES).sigmoid().gather(1, slates)


def draw_slates(logits: Tensor, number: int) -> Tensor:
    """Plackett-Luce samples [B, number, 5]: the largest logits after Gumbel noise."""
    noisy = logits.unsqueeze(1).expand(-1, number, -1)
    return (noisy - torch.empty_like(noisy).exponential_().log()).topk(SLATE, dim=2).indices


def slate_log_probs(logits: Tensor, slates: Tensor) -> Tensor:
    """The log-probability of each item among those that are left, [N, 5]."""
    log_probs = []
    for item in slates.T:
        log_probs.append(logits.log_softmax(1).gather(1, item.unsqueeze(1)))
        logits = logits.scatter(1, item.unsqueeze(1), -torch.inf)
    return torch.cat(log_probs, dim=1)


class Ranker(nn.Module):
    """The policy: a network gives each item a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_ITEMS))

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        return draw_slates(self.logits(states), num_actions_per_state)

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return slate_log_probs(self.logits(states), actions)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class ClickModel(nn.Module):
    """The baseline: the probability of a look, by place, times the probability that the user likes the item."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_ITEMS))
        self.looks = nn.Parameter(torch.zeros(SLATE))

    def fit(self, users: Tensor, slates: Tensor, clicks: Tensor, steps: int) -> None:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        for _ in range(steps):
            chance = self.looks.sigmoid() * self.logits(users).sigmoid().gather(1, slates)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy(chance, clicks).backward()
            optimizer.step()


def expected_clicks(users: Tensor, logits: Tensor) -> float:
    """The expected clicks of the slates with the items in the order of their logits."""
    return click_chances(users, logits.topk(SLATE, dim=1).indices).sum(1).mean().item()


def not_called(*_: Tensor) -> Tensor:
    raise RuntimeError("the log has its rewards")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=150, help="passes over the log (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    policy, held_out = Ranker(), make_users(2000, seed=-1)
    print(check_policy(policy, held_out[:4], strict=True))
    users = make_users(NUM_USERS, seed=args.seed).repeat_interleave(VISITS, dim=0)
    popularity = POPULARITY.expand(len(users), -1)
    slates = draw_slates(popularity, 1).squeeze(1)
    clicks = click_chances(users, slates).bernoulli()
    group_ids, logged = torch.arange(NUM_USERS).repeat_interleave(VISITS), slate_log_probs(popularity, slates)
    log = ExperienceBatch.from_rows(users, slates, rewards=clicks, group_ids=group_ids, behaviour_log_probs=logged)
    config = GRPOConfig(
        learning_rate=0.01,
        seed=args.seed,
        advantage=AdvantageConfig(gamma=0.0),  # a step is paid its own click; with 1, the clicks at later places, too
        objective=ObjectiveConfig(sampler_correction=Truncate(high=5.0)),
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=not_called)
    curve = []
    for _ in range(args.passes):
        trainer.update(log)
        curve.append(expected_clicks(held_out, policy.logits(held_out)))

    model = ClickModel()
    model.fit(users, slates, clicks, steps=2 * args.passes)
    table = {
        "the logged slates": click_chances(users, slates).sum(1).mean().item(),
        "click model": expected_clicks(held_out, model.logits(held_out)),
        "GRPO": curve[-1],
        "the best possible": expected_clicks(held_out, held_out @ TASTES),
    }
    print("\nexpected clicks per slate, 2,000 users who are not in the log")
    print("\n".join(f"{name:20s}{value:6.3f}" for name, value in table.items()))
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axis.plot(range(1, len(curve) + 1), curve, label="GRPO")
    for number, name in enumerate(name for name in table if name != "GRPO"):
        axis.axhline(table[name], label=name, color=f"C{number + 1}", linestyle="--")
    axis.set(xlabel="pass over the log", ylabel="expected clicks per slate")
    axis.legend(frameon=False)
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "ranking.png", dpi=90)
    print(f"written: {args.folder}/ranking.png")


if __name__ == "__main__":
    main()
