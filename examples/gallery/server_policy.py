"""A policy that lives on a server: another process has the weights, and the trainer never sees them.

    python -m examples.gallery.server_policy           # less than a minute on one core

A state is four numbers, and an action one of five classes, of which one is right. The server offers what remote
services do: sample, log-probabilities, add a gradient, step. The policy has only its address, and one number by which
autograd comes by: the backward pass sends the gradient of the log-probabilities to the server, which does the rest.

The baseline is the same model here: equal rewards and, in the end, weights equal to the last bit. The check cannot see
whether updates change samples, and a checkpoint has nothing of the server. The script writes server_policy.png.
"""

import argparse
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_policy

NUM_FEATURES, NUM_CLASSES, LEARNING_RATE = 4, 5, 0.01
TRUTH = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(0))


class Local(nn.Module):
    """The model, as an ordinary policy."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.network = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES))
        self.generator = torch.Generator().manual_seed(seed)

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        return self.network(states).softmax(1).multinomial(num_actions_per_state, True, generator=self.generator)

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return self.network(states).log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class Service:
    """What the server offers. Tensors travel as arrays."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self.model = Local(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    @torch.no_grad()
    def sample(self, states: np.ndarray, number: int) -> np.ndarray:
        return self.model.generate_actions(torch.from_numpy(states), number).numpy()

    def log_probs(self, states: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return self.model.get_log_probabilities(*map(torch.from_numpy, (states, actions))).detach().numpy()

    def add_gradient(self, states: np.ndarray, actions: np.ndarray, gradient: np.ndarray) -> None:
        log_probs = self.model.get_log_probabilities(*map(torch.from_numpy, (states, actions)))
        log_probs.backward(torch.from_numpy(gradient))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[np.ndarray]:  # for the comparison only
        return [weight.detach().numpy() for weight in self.model.parameters()]


class RemoteLogProbs(torch.autograd.Function):
    """Log-probabilities that the server computes; their gradient goes to the server."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, service: Any, states: Tensor, actions: Tensor) -> Tensor:
        ctx.service, ctx.rows = service, (states.numpy(), actions.numpy())
        return torch.from_numpy(service.log_probs(*ctx.rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.service.add_gradient(*ctx.rows, gradient.numpy())
        return gradient.abs().sum(), None, None, None


class Remote(nn.Module):
    """The policy. Its only parameter is a handle by which autograd reaches `RemoteLogProbs.backward`."""

    def __init__(self, service: Any) -> None:
        super().__init__()
        self.service, self.handle = service, nn.Parameter(torch.zeros(()))

    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor:
        return torch.from_numpy(self.service.sample(states.numpy(), num_actions_per_state))

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        return RemoteLogProbs.apply(self.handle, self.service, states, actions)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def reward(states: Tensor, actions: Tensor) -> Tensor:
    return (actions == (states @ TRUTH).argmax(1)).float()


def train(policy: nn.Module, optimizer: torch.optim.Optimizer, iterations: int) -> list[float]:
    config = GRPOConfig(group_size=8, max_grad_norm=None, seed=0)  # the server has the gradients, and would bound them
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    trainer.train(lambda _: torch.randn(32, NUM_FEATURES, generator=generator), num_iterations=iterations)
    return [metrics["rewards/mean"] for metrics in trainer.history]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    BaseManager.register("Service", Service)
    with BaseManager(ctx=get_context("spawn")) as server:  # a process of its own
        print(check_policy(Remote(server.Service(args.seed)), torch.randn(8, NUM_FEATURES), strict=True))
        service, local = server.Service(args.seed), Local(args.seed)
        curves = {"here": train(local, torch.optim.Adam(local.parameters(), lr=LEARNING_RATE), args.iterations)}
        remote = Remote(service)
        never = torch.optim.SGD([remote.handle], lr=0.0)  # moves nothing; its step is the server's
        never.register_step_post_hook(lambda *_: service.step())
        curves["on the server"] = train(remote, never, args.iterations)
        same = all(map(np.array_equal, [weight.detach().numpy() for weight in local.parameters()], service.weights()))
    print("\nshare of right answers, first and last 20 iterations")
    for name, curve in curves.items():
        print(f"{name:16s}{np.mean(curve[:20]):6.3f}{np.mean(curve[-20:]):7.3f}")
    print(f"all weights the same to the last bit: {same}")
    figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axis.plot(curves["here"], "-", curves["on the server"], ":")
    axis.set(title="Here, and on the server (dotted)", xlabel="iteration", ylabel="share of right answers", ylim=(0, 1))
    args.folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.folder / "server_policy.png", dpi=90)
    print(f"written: {args.folder}/server_policy.png")


if __name__ == "__main__":
    main()
