"""PPO in plain torch in one loop, as a reference for the cost of a good single-file script.

The settings and the order of operations follow CleanRL's `ppo.py` (Huang et al. 2022, "CleanRL: High-quality Single-file
Implementations of Deep Reinforcement Learning Algorithms"); the code is independent. Schulman et al. 2017, arXiv:1707.06347.
"""

import math
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.distributions import Categorical

NUM_ENVS, NUM_STEPS, NUM_MINIBATCHES, NUM_EPOCHS = 4, 128, 4, 4
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP = 2.5e-4, 0.99, 0.95, 0.2
ENTROPY_COEF, VALUE_COEF, MAX_GRAD_NORM = 0.01, 0.5, 0.5


def _mlp(num_inputs: int, num_outputs: int, gain: float) -> nn.Sequential:
    sizes = ((num_inputs, 64, math.sqrt(2.0)), (64, 64, math.sqrt(2.0)), (64, num_outputs, gain))
    layers: list[nn.Module] = []
    for inputs, outputs, layer_gain in sizes:
        layer = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(layer.weight, layer_gain)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class PPO:
    """Actor and critic, 64 x 64 each, with their environments.

    Args:
        env_id: Environment with flat observations and discrete actions.
        num_steps: Steps of the run. The learning rate decays to 0 during the run.
        seed: Seed of weights, actions and environments.
    """

    def __init__(self, env_id: str, num_steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.num_updates = -(-num_steps // (NUM_ENVS * NUM_STEPS))
        make = [lambda: RecordEpisodeStatistics(gymnasium.make(env_id))] * NUM_ENVS
        self.envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
        assert isinstance(self.envs.single_action_space, gymnasium.spaces.Discrete)
        num_features = int(np.prod(self.envs.single_observation_space.shape or ()))
        self.actor = _mlp(num_features, int(self.envs.single_action_space.n), 0.01)
        self.critic = _mlp(num_features, 1, 1.0)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, eps=1e-5)
        self.observation = _tensor(self.envs.reset(seed=seed)[0])
        self.ended = torch.zeros(NUM_ENVS)

    def run(self) -> int:
        """Run all updates. Returns the number of environment steps."""
        for update in range(self.num_updates):
            self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - update / self.num_updates)
            observations, actions, log_probs, rewards, ended, values = self._collect()
            advantages = self._advantages(rewards, ended, values)
            batch = (observations, actions, log_probs, advantages, advantages + values, values)
            self._learn(tuple(part.flatten(0, 1) for part in batch))
        self.envs.close()
        return self.num_updates * NUM_STEPS * NUM_ENVS

    @torch.no_grad()
    def _collect(self) -> tuple[Tensor, ...]:
        """Observations, actions, log-probs, rewards, episode ends and values of one rollout, each [T, n, ...]."""
        steps = []
        for _ in range(NUM_STEPS):
            policy = Categorical(logits=self.actor(self.observation))
            action = policy.sample()
            value = self.critic(self.observation).flatten()
            following, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            steps.append((self.observation, action, policy.log_prob(action), _tensor(reward), self.ended, value))
            self.observation, self.ended = _tensor(following), _tensor(terminated | truncated)
        return tuple(torch.stack(part) for part in zip(*steps, strict=True))

    @torch.no_grad()
    def _advantages(self, rewards: Tensor, ended: Tensor, values: Tensor) -> Tensor:
        """A[t] = delta[t] + gamma lambda A[t + 1] within an episode (Schulman et al. 2015, arXiv:1506.02438, eq. 16)."""
        advantages = torch.zeros_like(rewards)
        following_value, following_ended = self.critic(self.observation).flatten(), self.ended
        advantage = torch.zeros(NUM_ENVS)
        for t in reversed(range(NUM_STEPS)):
            lasts = 1.0 - following_ended
            delta = rewards[t] + GAMMA * following_value * lasts - values[t]
            advantage = advantages[t] = delta + GAMMA * GAE_LAMBDA * lasts * advantage
            following_value, following_ended = values[t], ended[t]
        return advantages

    def _learn(self, batch: tuple[Tensor, ...]) -> None:
        size = NUM_ENVS * NUM_STEPS // NUM_MINIBATCHES
        for _ in range(NUM_EPOCHS):
            for rows in torch.randperm(len(batch[0])).split(size):
                loss = self._loss(*(part[rows] for part in batch))
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
                self.optimizer.step()

    def _loss(
        self, observations: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, returns: Tensor, before: Tensor
    ) -> Tensor:
        policy = Categorical(logits=self.actor(observations))
        values = self.critic(observations).flatten()
        ratio = (policy.log_prob(actions) - old).exp()
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        of_policy = torch.max(-scaled * ratio, -scaled * ratio.clamp(1.0 - CLIP, 1.0 + CLIP)).mean()
        near = before + (values - before).clamp(-CLIP, CLIP)
        of_values = 0.5 * torch.max((values - returns).square(), (near - returns).square()).mean()
        return of_policy - ENTROPY_COEF * policy.entropy().mean() + VALUE_COEF * of_values


_tensor = partial(torch.as_tensor, dtype=torch.float32)
