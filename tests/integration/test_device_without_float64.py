"""A whole iteration on a device without float64, which is imitated: no tensor on the device is float64, or meets the CPU's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm.sampling.token_draw import draw
from grpo import ActionScores, AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, SampledActions
from tests.support.without_float64 import imitated_device


class OnDevicePolicy:
    """Nothing to train, so that no gradient is needed, and every score there is on the device."""

    def __init__(self, device: torch.device) -> None:
        self.log_probs = torch.tensor([[0.5, 0.25], [0.25, 0.5]]).log().to(device)
        self.mask = torch.tensor([[True, True], [True, False]]).to(device)

    def get_parameters(self) -> dict[str, Tensor]:
        return {}

    def train(self) -> None:
        """There is no mode."""

    eval = train

    def to(self, device: Any) -> None:
        """Stay on the device."""

    def sample_actions(self, states: list[int], num_actions_per_state: int) -> SampledActions:
        assert num_actions_per_state == 2
        rows = torch.arange(2).repeat(len(states)).to(self.mask.device)
        return SampledActions(
            actions=[[0, 1] for _ in states], mask=self.mask[rows], behaviour_log_probs=self.log_probs[rows] - 0.1
        )

    def generate_actions(self, states: list[int], num_actions_per_state: int) -> list[list[int]]:
        return [[0, 1] for _ in states]

    def get_log_probabilities(self, states: list[int], actions: list[int]) -> Tensor:
        return self.score_actions(states, actions).log_probs

    def score_actions(self, states: list[int], actions: list[int]) -> ActionScores:
        rows = torch.tensor(actions).to(self.mask.device)
        values = self.log_probs[rows]
        return ActionScores(
            log_probs=values,
            mask=self.mask[rows],
            entropy=-values,
            values=values,
            final_values=values[:, 0],
            kl=-values,
        )


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["row_mean", "step_mean", "group_mean"])
@pytest.mark.parametrize("credit", [None, "gae", "return_to_go"])
def test_an_iteration_needs_no_float64(aggregation: Any, credit: Any) -> None:
    rewards = [[0.0, 1.0], [2.0, 0.0]] * 2 if credit == "return_to_go" else [0.0, 1.0, 2.0, 0.0]
    with imitated_device() as device:
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2).to(device).double()
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2).to(device) + torch.ones(2)
        trainer = GRPOTrainer(
            config=GRPOConfig(
                group_size=2,
                num_epochs_per_update=2,
                advantage=AdvantageConfig(credit=credit),
                objective=ObjectiveConfig(
                    aggregation=aggregation,
                    kl_coef=0.1,
                    kl_estimator="exact",
                    entropy_coef=0.1,
                    sampler_correction="truncate",
                ),
            ),
            policy=OnDevicePolicy(device),
            reward_model=lambda states, actions: rewards,
        )
        metrics = trainer.step([0, 1])
    assert metrics["train/ratio_mean"] == pytest.approx(1.0)
    assert metrics["train/sampler_divergence"] == pytest.approx(-0.1, abs=1e-6)


def test_tokens_are_drawn_without_float64() -> None:
    """The same tokens as with float64, with log-probs and entropies of the same distribution."""
    torch.manual_seed(0)
    logits, uniforms = torch.randn(64, 700), torch.rand(64)
    tokens, log_probs, entropies = draw(logits, uniforms, True)
    with imitated_device() as device:
        found = [values.cpu() for values in draw(logits.to(device), uniforms.to(device), True)]
    assert found[0].tolist() == tokens.tolist()
    torch.testing.assert_close(found[1], log_probs)
    torch.testing.assert_close(found[2], entropies)
