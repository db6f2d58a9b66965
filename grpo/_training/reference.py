"""The reference policy: whether there is one, how strongly it pulls, and how it follows the policy."""

import warnings
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.errors import ConfigError, GRPOWarning
from grpo.policy_base import POLICY_METHODS, ScoresReference, require_methods


def require_reference(config: GRPOConfig, policy: Any, reference_policy: Any) -> None:
    """A reference policy has the methods of a policy and parameters of its own; settings that need one have one.

    Raises:
        ProtocolError: methods are missing.
        ConfigError: it shares parameters with the policy, or it is to follow a policy whose parameters have other names.
    """
    if reference_policy is None:
        if config.reference_sync_every is not None:
            raise ConfigError(
                "config.reference_sync_every needs a reference to move. Pass reference_policy=copy.deepcopy(policy)."
            )
        return
    require_methods(reference_policy, POLICY_METHODS, "reference_policy", "PolicyModel")
    parameters, reference = policy.get_parameters(), reference_policy.get_parameters()
    trained = {value.data_ptr() for value in parameters.values() if value.requires_grad}
    shared = [name for name, value in reference.items() if value.numel() and value.data_ptr() in trained]
    if reference_policy is policy or shared:
        raise ConfigError(
            f"reference_policy shares parameters with policy ({', '.join(shared[:3]) or 'it is the same object'}), so it "
            "would move with it and the KL would stay 0. Pass copy.deepcopy(policy)."
        )
    if config.reference_sync_every is not None and set(parameters) != set(reference):
        raise ConfigError(
            f"config.reference_sync_every={config.reference_sync_every} needs a reference with the policy's parameters; "
            f"only one of them has {sorted(set(parameters) ^ set(reference))[:4]}. Pass copy.deepcopy(policy)."
        )


class MovingReference:
    """Moves the reference towards the policy every `config.reference_sync_every` iterations.

    reference <- (1 - mix) reference + mix policy

    Args:
        config: how often, and the mix.
        policy: what the reference moves towards.
        reference_policy: moved in place. None: there is none.

    Source:
        Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656.
    """

    def __init__(self, config: GRPOConfig, policy: Any, reference_policy: Any) -> None:
        self._every, self._mix = config.reference_sync_every, config.reference_mix
        self._policy, self._reference = policy, reference_policy

    def moves_at(self, iteration: int) -> bool:
        """Move the reference if this iteration is due. Says whether it moved."""
        if self._every is None or iteration % self._every:
            return False
        policy = self._policy.get_parameters()
        with torch.no_grad():
            for name, value in self._reference.get_parameters().items():
                value.lerp_(policy[name].detach().to(value), self._mix)
        return True


def first_kl_coef(config: GRPOConfig, policy: Any, reference_policy: Any, *, has_own_loss: bool) -> float:
    """The KL coefficient that training starts with.

    Raises:
        ConfigError: a KL term without a reference, or a control without a KL term.
    """
    estimator = config.objective.kl_estimator
    kl_coef = config.objective.kl_coef_with(has_reference=reference_policy is not None)
    if estimator == "exact" and reference_policy is not None:
        raise ConfigError(
            "objective.kl_estimator='exact' reads the policy's own ActionScores.kl, and would never look at reference_policy: "
            "leave it out, or estimate the KL to it with kl_estimator='k3'."
        )
    has_reference = reference_policy is not None or isinstance(policy, ScoresReference)
    if kl_coef > 0 and estimator != "exact" and not has_reference:
        raise ConfigError(
            f"objective.kl_coef={kl_coef} needs a reference. Pass reference_policy=..., or set kl_coef=0"
            f"{'' if config.kl_control is None else ' and kl_control=None'}."
        )
    if kl_coef == 0 and config.kl_control is not None:
        raise ConfigError(
            "config.kl_control needs a KL term to control. Pass reference_policy=copy.deepcopy(policy) with objective.kl_coef "
            "above 0, or set kl_control=None."
        )
    if kl_coef > 0 and estimator == "k1" and not has_own_loss:
        warnings.warn(
            "objective.kl_estimator='k1' as a loss has a gradient of zero in expectation: it adds noise and no pull. "
            "Use 'k2' or 'k3_weighted' for KL(pi || ref), or 'k3' for KL(ref || pi).",
            GRPOWarning,
            stacklevel=4,
        )
    return kl_coef
