"""A custom domain in one file: a catapult learns to hit targets behind a wall.

A state is a target, and an action is a shot of three decisions. No class inherits from `grpo`: a policy is any class with six
methods, a reward model is any class with four, and `torch.nn.Module` provides `train`, `eval` and `to` for both.

    python -m examples.custom_domain
"""

import itertools
import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy, check_reward_model

STONES = {"light": 5.0, "heavy": 20.0}  # kg: a light stone flies far, and the wind moves it more
ANGLES = (30, 35, 40, 45, 50, 55, 60, 65)  # degrees
TURNS = tuple(range(1, 31))  # turns of the crank; each turn adds 200 joules to the throw
NAMES = tuple(STONES)


@dataclass(frozen=True)
class Target:  # the state
    distance: float  # metres
    wall: float  # height of the wall half-way, metres
    wind: float  # force on the stone, newtons; a positive force comes from behind


@dataclass(frozen=True)
class Shot:  # the action
    stone: str
    angle: int
    turns: int


class Gunner(nn.Module):
    """The policy, one small network. It chooses the stone first; the angle and the turns depend on the stone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(64, len(STONES) * n) for n in (1, len(ANGLES), len(TURNS)))

    def tables(self, states: list[Target]) -> list[Tensor]:
        """Log-probabilities of the stones [B, 2], and of the angles [B, 2, 8] and turns [B, 2, 30] given the stone."""
        hidden = self.body(torch.tensor([(s.distance / 50 - 1, s.wall / 10 - 1, s.wind / 40) for s in states]))
        stone, angle, turns = (head(hidden).unflatten(1, (len(STONES), -1)) for head in self.heads)
        return [stone.squeeze(2).log_softmax(1), angle.log_softmax(2), turns.log_softmax(2)]

    def generate_actions(self, states: list[Target], num_actions_per_state: int, **kwargs: object) -> list[list[Shot]]:
        tables, row = self.tables(states), torch.arange(len(states)).unsqueeze(1)
        stone = tables[0].exp().multinomial(num_actions_per_state, replacement=True)  # [B, G]
        angle, turns = (Categorical(logits=table[row, stone]).sample() for table in tables[1:])
        places = torch.stack([stone, angle, turns], dim=2).tolist()
        return [[Shot(NAMES[s], ANGLES[a], TURNS[t]) for s, a, t in group] for group in places]

    def get_log_probabilities(self, states: list[Target], actions: list[Shot]) -> Tensor:
        """Log-probabilities [N, 3]: each decision is a step with its own ratio and clip. Their sum [N] would also work."""
        places = [(NAMES.index(shot.stone), ANGLES.index(shot.angle), TURNS.index(shot.turns)) for shot in actions]
        (of_stone, of_angle, of_turns), row = self.tables(states), torch.arange(len(states))
        stone, angle, turns = torch.tensor(places).unbind(1)
        return torch.stack([of_stone[row, stone], of_angle[row, stone, angle], of_turns[row, stone, turns]], dim=1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def closeness(target: Target, shot: Shot) -> float:
    """1 if the stone lands on the target, 1/2 if it misses by five metres. The wind force is constant."""
    mass = STONES[shot.stone]
    speed, angle = math.sqrt(2 * 200 * shot.turns / mass), math.radians(shot.angle)
    across, up, push = speed * math.cos(angle), speed * math.sin(angle), target.wind / mass
    flight = 2 * up / 9.81
    miss = abs(across * flight + push / 2 * flight**2 - target.distance)
    under_root = across**2 + push * target.distance  # negative if the wind turns the stone round before the wall
    at_wall = target.distance / (across + math.sqrt(under_root)) if under_root >= 0 else math.inf
    if at_wall < flight and up * at_wall - 9.81 / 2 * at_wall**2 < target.wall:
        miss = target.distance / 2
    return 5 / (5 + miss)


class Closeness(nn.Module):
    """The reward model. A plain function also works."""

    def compute_rewards(self, states: list[Target], actions: list[Shot]) -> Tensor:
        return torch.tensor([closeness(target, shot) for target, shot in zip(states, actions, strict=True)])


def make_targets(number: int, seed: int) -> list[Target]:
    draw = random.Random(seed).uniform
    return [Target(distance=draw(20, 80), wall=draw(0, 15), wind=draw(-40, 40)) for _ in range(number)]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help a network this small
    policy, reward_model, held_out = Gunner(), Closeness(), make_targets(200, seed=2_000)
    print(check_policy(policy, held_out[:8], strict=True))
    shots = [group[0] for group in policy.generate_actions(held_out[:8], num_actions_per_state=1)]
    print(check_reward_model(reward_model, held_out[:8], shots, strict=True))
    # without the bonus, the policy settles on one angle
    objective = ObjectiveConfig(entropy_coef=0.03, entropy_estimator="score_function")
    config = GRPOConfig(group_size=16, batch_size=256, learning_rate=0.01, lr_schedule="linear", objective=objective)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward_model)
    before = trainer.evaluate(held_out)["eval/avg_reward"]
    trainer.train(lambda iteration: make_targets(64, seed=iteration), num_iterations=400)
    after = trainer.evaluate(held_out)["eval/avg_reward"]
    shots = [Shot(*choice) for choice in itertools.product(NAMES, ANGLES, TURNS)]
    best = sum(max(closeness(target, shot) for shot in shots) for target in held_out) / len(held_out)
    print(f"\nCloseness on 200 new targets: {before:.3f} before, {after:.3f} after; the best of all shots {best:.3f}")


if __name__ == "__main__":
    main()
