"""Networks in NumPy: they equal torch's, use the current weights, and exist only for supported modules."""

import copy

import numpy as np
import torch
from torch import nn

from adapters.control import EpisodeOptions, EpisodePolicy, EpisodeStart
from adapters.control.policy.fast_forward import SINGLE_THREADED, fast_forward
from adapters.control.policy.networks import SharedStd, mlp_torso
from adapters.control.policy.observations import RunningNormalizer


def network(activation: str = "tanh") -> nn.Sequential:
    head = SharedStd(16, 3, gain=1.0, initial_log_std=-0.5)
    return nn.Sequential(mlp_torso(5, (8, 16), activation), head)


def filled_normalizer() -> RunningNormalizer:
    normalizer = RunningNormalizer((5,))
    normalizer.see(3.0 + 2.0 * torch.randn(100, 5))
    normalizer.begin()
    return normalizer


def test_fast_outputs_equal_torchs():
    for activation in ("tanh", "relu"):
        policy, normalizer = network(activation), filled_normalizer()
        observations = 3.0 + 20.0 * torch.randn(32, 5)  # some beyond the normaliser's bounds
        fast = fast_forward(normalizer, policy)
        with torch.no_grad():
            expected = policy(normalizer(observations))
        np.testing.assert_allclose(fast(observations.numpy()), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_the_fast_output_of_a_layer_without_a_bias_equals_torchs():
    layer = nn.Linear(4, 2, bias=False)
    values = torch.randn(3, 4)
    np.testing.assert_allclose(
        fast_forward(layer)(values.numpy()), layer(values).detach().numpy(), rtol=1e-5, atol=1e-7
    )


def test_an_optimizers_changes_are_used():
    policy = network()
    fast, observations = fast_forward(policy), torch.randn(4, 5)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=True)
    policy(observations).sum().backward()
    optimizer.step()
    np.testing.assert_allclose(fast(observations.numpy()), policy(observations).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_observations_are_not_modified():
    observations = torch.randn(4, 5)
    before = observations.clone()
    fast_forward(nn.Tanh(), network())(observations.numpy())
    fast_forward(filled_normalizer(), network())(observations.numpy())
    assert torch.equal(observations, before)


class Doubled(nn.Linear):
    def forward(self, values):
        return 2.0 * super().forward(values)


def hooked() -> nn.Module:
    layer = nn.Linear(5, 5)
    layer.register_forward_hook(lambda module, inputs, output: 2.0 * output)
    return layer


def test_unsupported_modules_run_in_torch(subtests):
    for module in (
        nn.Sequential(nn.Linear(5, 5), nn.GELU()),
        nn.Linear(5, 5).double(),
        Doubled(5, 5),
        hooked(),
        nn.Dropout(0.5),
    ):
        with subtests.test(module=type(module).__name__):
            assert fast_forward(module) is None
            assert fast_forward(nn.Tanh(), module) is None
    assert fast_forward(None, nn.Tanh()) is not None


def test_large_batches_run_in_torch():
    """The largest tensor has 64 x 64 weights, which are multiplied once per row."""
    assert fast_forward(nn.Linear(64, 64)).max_rows == SINGLE_THREADED // (64 * 64)


def test_a_policy_acts_in_numpy_as_in_torch(monkeypatch):
    policy = EpisodePolicy(
        "Pendulum-v1", num_members=3, options=EpisodeOptions(normalize_observations=True, max_episode_steps=30)
    )
    starts = [EpisodeStart(seed=0), EpisodeStart(seed=1)]
    twin = copy.deepcopy(policy)
    fast = policy.roll_out(starts, seed=5, max_steps=30)
    monkeypatch.setattr("adapters.control.policy.episode_policy.fast_forward", lambda *modules: None)
    slow = twin.roll_out(starts, seed=5, max_steps=30)
    torch.testing.assert_close(fast.parameters, slow.parameters, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast.observations, slow.observations, rtol=1e-3, atol=1e-3)
