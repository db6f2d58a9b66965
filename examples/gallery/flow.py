"""A flow that learns to sample where the reward is: an action is the whole path from noise to a sample.

    python -m examples.gallery.flow           # about a minute on one core
    python -m examples.gallery.flow --seed 1

A flow is fitted to a mixture of eight Gaussians on a ring, without a reward. A state is what is asked for: one of the
eight modes, or any of them. An action is a path of ten steps. Nine of them are steps of an SDE with the flow's own
marginals, so each has a Gaussian density, which is the step's log-probability. The last step has no noise and hence no
density: it is masked, and so is the start, which the policy does not choose.

The reward is the closeness of the end of the path to the mode that was asked for, or to the nearest one. The baseline
is the best of 16 samples of the fitted flow: 16 times the work for each sample. Where any mode will do, a flow soon
keeps a few of them only, which the entropy of its modes shows. With a KL penalty towards the fitted flow it keeps all.
The script writes flow.png.

Source: Liu et al. 2025 (Flow-GRPO), arXiv:2505.05470.
"""

import argparse
import copy
import math
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.distributions import Normal

from grpo import ActionScores, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy

NUM_MODES, NUM_STEPS, NOISE, WIDTH = 8, 10, 0.7, 0.25
ANY = NUM_MODES  # the state in which no mode is asked for
CENTRES = 3 * torch.view_as_real(torch.polar(torch.ones(NUM_MODES), torch.arange(NUM_MODES) * 2 * math.pi / NUM_MODES))
TIMES = torch.arange(NUM_STEPS) / NUM_STEPS  # 0 is noise, 1 is data
SPREADS = NOISE * ((1 - TIMES[:-1]) / NUM_STEPS).sqrt()  # of the noise of each step but the last


class Flow(nn.Module):
    """The policy: a velocity v for each place, time and state. Steps are x' = x + (v + s^2/2 score) dt + s sqrt(dt) noise."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(3 + ANY + 1, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )

    def velocities(self, places: Tensor, times: Tensor, states: Tensor) -> Tensor:
        asked = nn.functional.one_hot(states, NUM_MODES + 1).float()
        return self.network(torch.cat([places, times.unsqueeze(-1), asked], dim=-1))

    def means(self, places: Tensor, times: Tensor, states: Tensor) -> Tensor:
        """Where the next step is on average, [..., 2]. With s^2 = NOISE^2 (1 - t), s^2/2 score is NOISE^2/2 (t v - x)."""
        v, times = self.velocities(places, times, states), times.unsqueeze(-1)
        return places + (v + NOISE**2 / 2 * (times * v - places) * (times < TIMES[-1]).float()) / NUM_STEPS

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        rows = states.repeat_interleave(num_actions_per_state)
        path = [torch.randn(len(rows), 2)]
        for time, spread in zip(TIMES, [*SPREADS, 0.0], strict=True):
            path.append(self.means(path[-1], time.expand(len(rows)), rows) + spread * torch.randn(len(rows), 2))
        return torch.stack(path, dim=1).unflatten(0, (len(states), num_actions_per_state))  # [B, G, 11, 2]

    def score_actions(self, states: Tensor, actions: Tensor) -> ActionScores:
        times, asked = TIMES[:-1].expand(len(actions), -1), states.unsqueeze(1).expand(-1, NUM_STEPS - 1)
        means = self.means(actions[:, :-2], times, asked)
        log_probs = Normal(means, SPREADS.unsqueeze(1)).log_prob(actions[:, 1:-1]).sum(2)
        mask = torch.arange(NUM_STEPS).expand(len(actions), -1) < NUM_STEPS - 1  # the last step follows from the others
        return ActionScores(log_probs=nn.functional.pad(log_probs, (0, 1)), mask=mask)

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def fit(flow: Flow, steps: int) -> None:
    """Flow matching: the velocity from noise to data, on straight lines between the two."""
    optimizer = torch.optim.Adam(flow.parameters(), lr=3e-3)
    for _ in range(steps):
        noise, time, states = torch.randn(512, 2), torch.rand(512), torch.randint(NUM_MODES + 1, (512,))
        way = CENTRES[torch.randint(NUM_MODES, (512,))] + WIDTH * torch.randn(512, 2) - noise
        optimizer.zero_grad()
        (flow.velocities(noise + time.unsqueeze(1) * way, time, states) - way).square().mean().backward()
        optimizer.step()


def reward(states: Tensor, actions: Tensor) -> Tensor:
    """1 at the mode that is asked for, 1/2 at a distance of 1 from it."""
    distances = torch.cdist(actions[:, -1], CENTRES)
    by_state = torch.cat([distances, distances.min(1, keepdim=True).values], dim=1)  # [N, 9]
    return 1 / (1 + by_state.gather(1, states.unsqueeze(1)).squeeze(1))


def train(fitted: Flow, states: Tensor, kl_coef: float, iterations: int, seed: int) -> Flow:
    flow = copy.deepcopy(fitted)
    config = GRPOConfig(group_size=16, learning_rate=1e-3, seed=seed, objective=ObjectiveConfig(kl_coef=kl_coef))
    trainer = GRPOTrainer(config=config, policy=flow, reward_model=reward, reference_policy=fitted if kl_coef else None)
    trainer.train(lambda _: states, num_iterations=iterations)
    return flow


@torch.no_grad()
def ends(flow: Flow, state: int, number: int = 2000, best_of: int = 1) -> Tensor:
    """Where paths end, [number, 2]: of each `best_of` paths the one with the largest reward."""
    paths = flow.generate_actions(torch.full((number,), state), best_of)  # [number, best_of, 11, 2]
    rewards = reward(torch.full((number * best_of,), state), paths.flatten(0, 1)).unflatten(0, (number, best_of))
    return paths[torch.arange(number), rewards.argmax(1), -1]


def modes(places: Tensor) -> tuple[Tensor, float, float]:
    """The share of each mode, the entropy of the shares over its maximum, and the mean distance to the nearest mode."""
    distances, nearest = torch.cdist(places, CENTRES).min(1)
    shares = torch.bincount(nearest, minlength=NUM_MODES) / len(places)
    return shares, -torch.special.xlogy(shares, shares).sum().item() / math.log(NUM_MODES), distances.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=350, help="iterations of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    fitted = Flow()
    fit(fitted, steps=1500)
    print(check_policy(fitted, torch.arange(NUM_MODES + 1), strict=True))
    asked = train(fitted, torch.arange(NUM_MODES).repeat(4), 0.0, args.iterations, args.seed)
    free, kept = (train(fitted, torch.full((32,), ANY), coef, args.iterations, args.seed) for coef in (0.0, 0.05))
    print("\nsamples in the mode that was asked for: mean of eight, and the least")
    for name, flow, best_of in (("fitted flow", fitted, 1), ("best of 16", fitted, 16), ("GRPO", asked, 1)):
        hits = torch.stack([modes(ends(flow, mode, best_of=best_of))[0][mode] for mode in range(NUM_MODES)])
        print(f"{name:14s}{hits.mean():8.1%}{hits.min():8.1%}")
    print("\nwhere any mode will do: distance to the nearest, and the entropy of the modes")
    samples = {"fitted flow": ends(fitted, ANY), "any, no KL": ends(free, ANY), "any, KL 0.05": ends(kept, ANY)}
    for name, (_, entropy, distance) in {name: modes(places) for name, places in samples.items()}.items():
        print(f"{name:14s}{distance:8.2f}{entropy:8.1%}")
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharex=True, sharey=True, layout="constrained")
    for axis, (name, places) in zip(axes, {**samples, "mode 0": ends(asked, 0)}.items(), strict=True):
        axis.scatter(*places.T, s=2, alpha=0.3)
        axis.set(title=name, aspect="equal", xlim=(-5, 5), ylim=(-5, 5))
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "flow.png", dpi=80)
    print(f"written: {args.folder}/flow.png")


if __name__ == "__main__":
    main()
