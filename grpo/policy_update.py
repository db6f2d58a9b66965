"""From a batch and its advantages to changed weights: epochs of updates, each accumulated over micro-batches."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .config import GRPOConfig
from .errors import ContractError, GRPOWarning, NonFiniteGradientError
from .experience_collector import ExperienceCollector
from .gradient_step import GradientStep
from .grpo_objective import Objective, step_weights
from .metrics import Meter
from .policy_base import SplitsSteps
from .types import ExperienceBatch, ObjectiveInputs, RowIndex, select_rows
from .update_plan import compose, epoch_of_updates, num_updates_per_epoch

TRAIN_MODE_TOLERANCE = 0.05
"""Largest change of a log-prob between eval() and train() that is put down to rounding (bfloat16) and not to dropout."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """What updates read: a batch, and how its rows (or their steps) did."""

    batch: ExperienceBatch
    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    live: Bool[Tensor, " N"] | None
    """Rows with an advantage, where rows without one change no gradient and are not forwarded; None: all count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCounts:
    """What became of one iteration's updates."""

    planned: int
    """Epochs x updates."""
    applied: int
    """After which weights had changed."""
    dead: int
    """Not even forwarded, for lack of a row with an advantage."""
    rows_skipped: int
    """Rows without an advantage, which no update forwarded."""


class PolicyUpdate:
    """All updates of one iteration.

    Args:
        config: batch size, epochs, aggregation.
        collector: scores rows and plans forwards.
        gradient: the optimizer step.
        objective: the loss.
        zero_advantage_is_inert: a row whose advantage is 0 has no gradient at all (no KL, no entropy, the built-in loss).
        splitter: makes one row of every step, where the policy can.
        kl_coef: weight of the KL term, now.
        seed: of the order of rows.
    """

    def __init__(
        self,
        *,
        config: GRPOConfig,
        collector: ExperienceCollector,
        gradient: GradientStep,
        objective: Objective,
        zero_advantage_is_inert: bool,
        splitter: SplitsSteps | None,
        kl_coef: float,
        seed: int,
    ) -> None:
        self.config = config
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(seed)
        self.skipped_in_a_row = 0
        self._num_dead = 0
        self._collector = collector
        self._gradient = gradient
        self._objective = objective
        self._zero_advantage_is_inert = zero_advantage_is_inert
        self._splitter = splitter
        self._kl_coef = kl_coef
        self._owner = type(collector.policy).__name__
        self._has_compared_modes = False
        self._has_said_dead = False

    def num_updates(self, batch: ExperienceBatch) -> int:
        """How many updates `run` will make of this batch."""
        num_rows = batch.num_rows if self._splitter is None else int(batch.mask.sum())
        return num_updates_per_epoch(num_rows, self.config.batch_size) * self.config.num_epochs_per_update

    def run(self, batch: ExperienceBatch, advantages: Tensor) -> UpdateCounts:
        """Every epoch's updates.

        Raises:
            ContractError: the policy scores other steps than it sampled, or without a gradient.
            NonFiniteGradientError: too many skipped updates in a row.
        """
        rows = self._training_rows(batch, advantages)
        self._gradient.clear()  # what others left behind is no part of this
        self.meter = Meter()
        self._num_dead = 0
        planned = applied = 0
        for selected in self._updates(rows.batch):
            applied += self._update(rows, selected, is_first=planned == 0)
            planned += 1
        if planned == self._num_dead:
            self._say_dead()
        num_skipped = 0 if rows.live is None else int((~_are_live(advantages)).sum())
        return UpdateCounts(planned=planned, applied=applied, dead=self._num_dead, rows_skipped=num_skipped)

    def _training_rows(self, batch: ExperienceBatch, advantages: Tensor) -> TrainingRows:
        if self._splitter is not None:
            batch, advantages = split_steps(batch, advantages, self._splitter)
        if not self._zero_advantage_is_inert:
            return TrainingRows(batch, advantages, None)
        live = _are_live(advantages)
        return TrainingRows(batch, advantages, None if bool(live.all()) else live)

    def _updates(self, batch: ExperienceBatch) -> Iterator[RowIndex]:
        for _ in range(self.config.num_epochs_per_update):
            yield from epoch_of_updates(batch.group_ids, self.config.batch_size, self.generator)

    def _update(self, rows: TrainingRows, selected: RowIndex, *, is_first: bool) -> bool:
        """Accumulate one update's gradient over its micro-batches and apply it. Says whether weights changed."""
        weights, entropy_weights = self._weights(rows.batch, selected)
        positions: RowIndex = slice(0, len(weights))
        if rows.live is not None:
            positions = rows.live[selected].nonzero().squeeze(1)
            if len(positions) == 0:
                self._num_dead += 1
                return False
        checks = []
        states, actions = rows.batch.states, rows.batch.actions
        for part in self._collector.plan_parts(states, actions, compose(selected, positions)):
            micro = compose(positions, part)
            inputs, check = self._inputs(
                rows,
                compose(selected, micro),
                weights[micro],
                None if entropy_weights is None else entropy_weights[micro],
            )
            if is_first and not self._has_compared_modes:
                self._compare_modes(inputs)
            output = self._objective(inputs)
            self._gradient.backward(output.loss)
            self.meter.add(output.metrics)
            checks.append(check)
        return self._apply(checks)

    def _weights(self, batch: ExperienceBatch, selected: RowIndex) -> tuple[Tensor, Tensor | None]:
        """The whole update's step weights, and the entropy term's own where it has any."""
        config = self.config.objective
        mask, group_ids = batch.mask[selected], batch.group_ids[selected]
        weights = step_weights(mask, config.aggregation, fixed_length=config.fixed_length, group_ids=group_ids)
        if config.entropy_aggregation is None:
            return weights, None
        return weights, step_weights(
            mask, config.entropy_aggregation, fixed_length=config.fixed_length, group_ids=group_ids
        )

    def _inputs(
        self, rows: TrainingRows, selected: RowIndex, weights: Tensor, entropy_weights: Tensor | None
    ) -> tuple[ObjectiveInputs, Float[Tensor, ""]]:
        """Score these rows with gradient, and put what is known of them beside it, as wide as the scores are.

        The second value, the sum of all log-probs (finite only if each of them is), stays on the device until the update is
        applied.
        """
        batch = rows.batch
        scores = self._collector.scorer(
            select_rows(batch.states, selected), select_rows(batch.actions, selected), batch.group_ids[selected]
        )
        full_mask = batch.mask[selected]
        width, device = scores.log_probs.shape[1], scores.log_probs.device
        if width > full_mask.shape[1]:
            raise ContractError(f"{self._owner} scored {width} steps of rows of {full_mask.shape[1]}. {_SAME_STEPS}")

        def beside(values: Tensor | None) -> Any:
            if values is None:
                return None
            return (values if values.dim() == 1 or values.shape[1] == width else values[:, :width]).to(device)

        def of_batch(values: Tensor | None) -> Any:
            return None if values is None else beside(values[selected])

        mask = beside(full_mask)
        if not torch.equal(scores.mask, mask) or (width < full_mask.shape[1] and bool(full_mask[:, width:].any())):
            raise ContractError(f"{self._owner} masks other steps in an update than in the batch. {_SAME_STEPS}")
        inputs = ObjectiveInputs(
            log_probs=scores.log_probs,
            old_log_probs=of_batch(batch.old_log_probs),
            advantages=of_batch(rows.advantages),
            mask=mask,
            weights=beside(weights),
            entropy=scores.entropy,
            entropy_weights=beside(entropy_weights),
            ref_log_probs=of_batch(batch.ref_log_probs),
            behaviour_log_probs=of_batch(batch.behaviour_log_probs),
            kl_coef=self._kl_coef,
        )
        return inputs, torch.where(mask, scores.log_probs.detach(), 0.0).sum(dtype=torch.float64)

    def _apply(self, checks: list[Tensor]) -> bool:
        """Step the optimizer if everything is sound: one transfer to the host for all that has to be known."""
        if not self._gradient.parameters:
            self._require_finite(torch.stack(checks).tolist())
            return False
        total_norm = self._gradient.total_norm()
        *log_probs, norm = torch.stack([*checks, total_norm.to(checks[0])]).tolist()
        self._require_finite(log_probs)
        if not math.isfinite(norm):
            return self._skip_non_finite(norm)
        self.meter.add_value("grad_norm", norm)
        self.meter.add_value("learning_rate", self._gradient.learning_rate)
        self._gradient.apply(total_norm, norm)
        self.skipped_in_a_row = 0
        return True

    def _require_finite(self, log_probs: list[float]) -> None:
        if all(math.isfinite(total) for total in log_probs):
            return
        self._gradient.abandon()
        raise ContractError(
            f"{self._owner}: log-probabilities of sampled steps must be finite, and some are not. A sampled action cannot "
            "have probability 0: mask logits with torch.finfo(dtype).min, not -inf."
        )

    def _skip_non_finite(self, norm: float) -> bool:
        self._gradient.skip()
        if self._gradient.is_searching_scale:
            return False  # float16: the loss scale is still on its way down
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.max_skipped_updates:
            raise NonFiniteGradientError(
                f"{self.skipped_in_a_row} updates in a row had a gradient of norm {norm}; all were skipped, and no weight was "
                "changed by them. Lower the learning rate, and look for log(0), 0/0 or sqrt(0) in the policy; "
                "torch.autograd.set_detect_anomaly(True) names the operation."
            )
        return False

    def _say_dead(self) -> None:
        """Say, once, that an iteration had nothing to learn from."""
        if not self._has_said_dead:
            self._has_said_dead = True
            warnings.warn(
                "An iteration had nothing to learn from: every group in it has equal rewards, or one row. Now and then that is "
                "normal; if group_stats/zero_variance_fraction stays near 1, rewards are too sparse, the task too easy or too "
                "hard, or groups too small. (Said once.)",
                GRPOWarning,
                stacklevel=4,
            )

    def _compare_modes(self, inputs: ObjectiveInputs) -> None:
        """Say, once, when train() changes what eval() gave: the first ratio is then not 1."""
        if inputs.old_log_probs is None or not self._gradient.parameters:
            return
        self._has_compared_modes = True
        change = torch.where(inputs.mask, inputs.log_probs.detach() - inputs.old_log_probs, 0.0).abs().max().item()
        if change > TRAIN_MODE_TOLERANCE:
            warnings.warn(
                f"{self._owner}: before any update, log-probabilities in train() differ by up to {change:.2g} from those in "
                "eval(), so the first ratio is not 1. Dropout or batch normalisation is on in train(): set dropout to 0.",
                GRPOWarning,
                stacklevel=2,
            )


def _are_live(advantages: Tensor) -> Bool[Tensor, " N"]:
    """Rows with an advantage, on any step."""
    return advantages != 0 if advantages.dim() == 1 else (advantages != 0).any(1)


_SAME_STEPS = "Score the same steps every time; give rollouts made elsewhere the mask of the policy's own decisions."


def split_steps(batch: ExperienceBatch, advantages: Tensor, policy: SplitsSteps) -> tuple[ExperienceBatch, Tensor]:
    """Every valid step as a row of its own (T = 1), row by row; what has shape [N, T] is read at the mask.

    Raises:
        ContractError: the policy makes another number of rows than there are valid steps.
    """
    mask = batch.mask
    num_steps = int(mask.sum())
    states, actions = policy.split_steps(batch.states, batch.actions)
    if len(states) != num_steps or len(actions) != num_steps:
        raise ContractError(
            f"{type(policy).__name__}.split_steps must return one row per valid step = {num_steps}; "
            f"got {len(states)} states and {len(actions)} actions."
        )

    def at_mask(values: Tensor | None) -> Any:
        return None if values is None else values[mask.to(values.device)].unsqueeze(1)

    per_step = advantages if advantages.dim() == 2 else advantages.unsqueeze(1).expand(mask.shape)
    split = replace(
        batch,
        states=states,
        actions=actions,
        group_ids=torch.arange(num_steps),
        rewards=torch.zeros(num_steps, dtype=batch.rewards.dtype),
        reward_components={},
        mask=torch.ones(num_steps, 1, dtype=torch.bool, device=mask.device),
        old_log_probs=at_mask(batch.old_log_probs),
        behaviour_log_probs=at_mask(batch.behaviour_log_probs),
        ref_log_probs=at_mask(batch.ref_log_probs),
    )
    return split, per_step[mask.to(per_step.device)]
