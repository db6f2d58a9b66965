"""Kuhn poker against oneself: an action is a whole hand, the decisions of both players in turn.

    python -m examples.gallery.kuhn_poker           # about a minute on one core
    python -m examples.gallery.kuhn_poker --seed 1

A state is a deal of two of three cards. An action is a hand: each of its two or three steps passes or bets, and the
same policy decides for whoever's turn it is, from that player's card and what was said before. The reward of a step is
what the hand pays to the player of that step. The hands of a group have the same deal, so a step is compared with what
others got with these cards.

The table has the exact exploitability: what a player who knows the policy could win per hand, as the mean of both
seats. It is 0 for an equilibrium. Plain self-play chases its own tail, and is the baseline. With a KL penalty towards a
fixed reference, here the uniform policy, the last policy of the run is close to an equilibrium. The script writes
kuhn_poker.png.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from grpo import ActionScores, AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy

DEALS = torch.tensor(list(itertools.permutations(range(3), 2)))  # [6, 2]: the cards of the first and the second player
FIRST, SECOND = (0, 1, 2, 9, 10, 11), (3, 4, 5, 6, 7, 8)  # situations in which each of them decides
NONE = -1  # the hand ended before this step
EVERY = 10  # iterations between measurements
SGD = partial(torch.optim.SGD, lr=2.0)  # Adam makes steps of one size, however small the gradient is, and circles on


def situations(deals: Tensor, hands: Tensor) -> Tensor:
    """[N, 3]: what the player knows at each step. Card + 3 x (nothing said, passed, bet, passed and was bet against)."""
    first, second = deals.unbind(1)
    return torch.stack([first, second + 3 * (1 + hands[:, 0]), first + 9], dim=1)


def payoff(deals: Tensor, hands: Tensor) -> Tensor:
    """What the first player wins, [N]."""
    best = (deals[:, 0] > deals[:, 1]) * 2.0 - 1.0
    opening, answer, last = hands.unbind(1)
    after_pass = torch.where(answer == 0, best, torch.where(last == 0, -1.0, 2 * best))
    return torch.where(opening == 0, after_pass, torch.where(answer == 0, 1.0, 2 * best))


def reward(states: Tensor, actions: Tensor) -> Tensor:
    """[N, 3]: what the hand pays to the player of each step."""
    return payoff(states, actions).unsqueeze(1) * torch.tensor([1.0, -1.0, 1.0])


class Player(nn.Module):
    """The policy: a probability of betting for each of the 12 situations. The trainer reads the steps from `score_actions`."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(12, 2))

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        deals, bet = states.repeat_interleave(num_actions_per_state, dim=0), self.logits.softmax(1)[:, 1]
        hands = torch.zeros(len(deals), 3, dtype=torch.int64)
        for step in range(3):
            hands[:, step] = bet[situations(deals, hands)[:, step]].bernoulli()
        goes_on = (hands[:, 0] == 0) & (hands[:, 1] == 1)
        hands[:, 2] = torch.where(goes_on, hands[:, 2], NONE)
        return hands.unflatten(0, (-1, num_actions_per_state))

    def score_actions(self, states: Tensor, actions: Tensor) -> ActionScores:
        log_probs = self.logits.log_softmax(1)[situations(states, actions)]  # [N, 3, 2]
        mask = actions != NONE
        taken = log_probs.gather(2, actions.clamp(min=0).unsqueeze(2)).squeeze(2)
        kl = (log_probs.exp() * log_probs).sum(2) + torch.tensor(2.0).log()  # to the uniform policy
        return ActionScores(log_probs=taken.where(mask, 0), mask=mask, kl=kl.where(mask, 0))

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def value(bet: Tensor) -> Tensor:
    """What the first player wins on average, [...], for probabilities of betting [..., 12]."""
    total = torch.zeros(bet.shape[:-1])
    for hand in torch.tensor([[0, 0, NONE], [0, 1, 0], [0, 1, 1], [1, 0, NONE], [1, 1, NONE]]):
        hands = hand.expand(len(DEALS), 3)
        chances = bet[..., situations(DEALS, hands)]  # [..., 6, 3]
        chances = torch.where(hands == 1, chances, 1 - chances).where(hands != NONE, 1.0)
        total = total + (chances.prod(-1) * payoff(DEALS, hands)).mean(-1)
    return total


def exploitability(policy: Player) -> float:
    """The mean of what the best answers to the policy win in both seats. A best answer is one of 64 in each seat."""
    bet = policy.logits.detach().softmax(1)[:, 1]
    answers = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)))
    wins = []
    for seat, sign in ((FIRST, 1), (SECOND, -1)):
        against = bet.repeat(len(answers), 1)
        against[:, list(seat)] = answers
        wins.append((sign * value(against)).max().item())
    return sum(wins) / 2


def train(kl_coef: float, iterations: int, seed: int) -> list[float]:
    """Exploitabilities along a run of self-play."""
    torch.manual_seed(seed)
    policy, curve = Player(), []
    objective = ObjectiveConfig(kl_coef=kl_coef, kl_estimator="exact")
    advantage = AdvantageConfig(gamma=0.0)  # a step's reward is the whole pay of its player already
    config = GRPOConfig(group_size=16, seed=seed, advantage=advantage, objective=objective)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward, optimizer=SGD)
    for iteration in range(iterations):
        trainer.step(DEALS.repeat(4, 1))
        if iteration % EVERY == EVERY - 1:
            curve.append(exploitability(policy))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1500, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(check_policy(Player(), DEALS, strict=True))
    curves = {
        "plain self-play": train(0.0, args.iterations, args.seed),
        "KL to the uniform policy": train(0.1, args.iterations, args.seed),
    }
    print(f"\n{'exploitability per hand':28s}     last   worst of the last fifth")
    print(f"{'uniform policy':28s}{exploitability(Player()):9.3f}")
    for name, curve in curves.items():
        print(f"{name:28s}{curve[-1]:9.3f}{max(curve[-len(curve) // 5 :]):9.3f}")
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for name, curve in curves.items():
        axis.plot(range(EVERY, EVERY * len(curve) + 1, EVERY), curve, label=name)
    axis.set(xlabel="iteration", ylabel="exploitability per hand", ylim=(0, None))
    axis.legend(frameon=False)
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "kuhn_poker.png", dpi=90)
    print(f"written: {args.folder}/kuhn_poker.png")


if __name__ == "__main__":
    main()
