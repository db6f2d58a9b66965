"""Overhead of the framework: one `trainer.step` compared with a hand-written torch loop of the same mathematics.

The task is a contextual bandit: 64 features, an MLP of 2 x 64, 64 arms, 8 actions per state (the default), one update per
iteration. Both sides start from the same weights and seed, and the benchmark first checks that they reach the same weights.

    python -m benchmarks.overhead
"""

import argparse
import platform

import torch
from torch import Tensor, nn

from benchmarks._timing import keep_freed_memory, time_pairs
from grpo import ActionScores, GRPOConfig, GRPOTrainer, SampledActions

NUM_FEATURES, NUM_HIDDEN, NUM_ARMS, GROUP_SIZE = 64, 64, 64, 8

LEARNING_RATE = 1e-5
"""A small learning rate keeps the policy random. After convergence, groups have equal rewards and the trainer skips them."""


class RowPolicy(nn.Module):
    """A policy with only the required methods: the network evaluates every row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_HIDDEN),
            nn.Tanh(),
            nn.Linear(NUM_HIDDEN, NUM_HIDDEN),
            nn.Tanh(),
            nn.Linear(NUM_HIDDEN, NUM_ARMS),
        )

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        """Sample arms [B, G]."""
        return torch.multinomial(self.net(states).softmax(-1), num_actions_per_state, replacement=True)

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        """Log-probs [N]."""
        return self.net(states).log_softmax(-1).gather(1, actions.unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        """The network's parameters."""
        return dict(self.named_parameters())


class GroupPolicy(RowPolicy):
    """A policy with `ScoresGroups`, which evaluates each state once, and with a sampler that returns the mask."""

    def sample_actions(self, states: Tensor, num_actions_per_state: int) -> SampledActions:
        """Sample arms [B, G]. Each arm is one step."""
        actions = self.generate_actions(states, num_actions_per_state)
        return SampledActions(actions=actions, mask=torch.ones(actions.numel(), 1, dtype=torch.bool))

    def score_groups(self, states: Tensor, actions: Tensor) -> ActionScores:
        """Log-probs [B * G, 1]."""
        log_probs = self.net(states).log_softmax(-1).gather(1, actions).reshape(-1, 1)
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


def reward(states: Tensor, actions: Tensor) -> Tensor:
    """Reward of an arm, given the row's features."""
    return states.gather(1, actions.unsqueeze(1)).squeeze(1)


class HandWritten:
    """The trainer's mathematics in a hand-written loop, without checks, metrics or options."""

    def __init__(self, policy: RowPolicy, by_group: bool) -> None:
        self.policy = policy
        self.by_group = by_group
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def step(self, states: Tensor) -> None:
        """Sample actions, compute rewards, advantages and the loss, clip the gradient, and update the weights."""
        net = self.policy.net
        with torch.no_grad():
            actions = torch.multinomial(net(states).softmax(-1), GROUP_SIZE, replacement=True)
            row_states, row_actions = states.repeat_interleave(GROUP_SIZE, 0), actions.flatten()
            rewards = reward(row_states, row_actions).view(-1, GROUP_SIZE)
            advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        if self.by_group:
            log_probs = net(states).log_softmax(-1).gather(1, actions).flatten()
        else:
            log_probs = net(row_states).log_softmax(-1).gather(1, row_actions.unsqueeze(1)).squeeze(1)
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def build(by_group: bool, dtype: torch.dtype = torch.float32) -> tuple[GRPOTrainer, HandWritten]:
    """A trainer and a loop with equal weights."""
    kind = GroupPolicy if by_group else RowPolicy
    ours, theirs = kind().to(dtype), kind().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=GROUP_SIZE, learning_rate=LEARNING_RATE), policy=ours, reward_model=reward
    )
    return trainer, HandWritten(theirs, by_group)


def check_same(by_group: bool, num_steps: int = 5) -> float:
    """Largest difference between the two sides' weights after a few steps in float64 from the same seed."""
    trainer, loop = build(by_group, torch.float64)
    states = torch.randn(64, NUM_FEATURES, dtype=torch.float64)
    for step in (trainer.step, loop.step):
        torch.manual_seed(0)
        for _ in range(num_steps):
            step(states)
    pairs = zip(trainer.policy.parameters(), loop.policy.parameters(), strict=True)
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


def main() -> None:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 65536])
    parser.add_argument("--repeats", type=int, default=None, help="pairs per size; default: 300 small, 40 large")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    print(f"torch {torch.__version__}, 1 thread, {platform.processor() or platform.machine()}")
    print(f"{'':28s}{'trainer.step':>12s} {'hand-written':>12s}")
    for by_group, target in ((False, "row by row"), (True, "state once per group")):
        difference = check_same(by_group)
        assert difference < 1e-9, f"the two sides do not compute the same: weights differ by {difference}"
        for rows in args.rows:
            trainer, loop = build(by_group)
            states = torch.randn(rows // GROUP_SIZE, NUM_FEATURES)
            repeats = args.repeats or (300 if rows < 10_000 else 40)
            pair = time_pairs(
                lambda t=trainer, s=states: t.step(s), lambda t=loop, s=states: t.step(s), repeats=repeats
            )
            print(f"{target:21s}{rows:7,d}{pair}")


if __name__ == "__main__":
    main()
