"""From a batch and its advantages to changed weights: epochs of updates, each accumulated over micro-batches."""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .adaptive_coefficients import Coefficients
from .aggregation import step_weights
from .coercion import describe
from .config import GRPOConfig
from .distributed import Engine
from .errors import ConfigError, ContractError, GRPOWarning, NonFiniteGradientError
from .experience_collector import ExperienceCollector
from .gradient_step import GradientStep
from .grpo_objective import Objective
from .metrics import Meter
from .off_policy import sampler_divergence
from .policy_base import SplitsSteps
from .selection import select_steps
from .training_rows import TrainingRows, require_discrete, split_steps
from .types import ExperienceBatch, ObjectiveInputs, ObjectiveOutput, RowIndex, select_rows
from .update_plan import compose, epoch_of_updates, num_selected, num_updates_per_epoch

TRAIN_MODE_TOLERANCE = 0.05
"""Largest change of a log-prob between eval() and train() that is put down to rounding (bfloat16) and not to dropout."""


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
        has_own_loss: `objective` is the caller's, of which nothing is known.
        splitter: makes one row of every step, where the policy can.
        coefficients: weights of the KL and the entropy term, as they are now.
        seed: of the order of rows.
        engine: brings several ranks together.
    """

    def __init__(
        self,
        *,
        config: GRPOConfig,
        collector: ExperienceCollector,
        gradient: GradientStep,
        objective: Objective,
        has_own_loss: bool,
        splitter: SplitsSteps | None,
        coefficients: Coefficients,
        seed: int,
        engine: Engine,
    ) -> None:
        self.config = config
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(seed)
        self.choice_generator = torch.Generator().manual_seed(seed)
        """Drawn from in step on all ranks, whatever their numbers of rows."""
        self._engine = engine
        self.skipped_in_a_row = 0
        self._num_dead = 0
        self._collector = collector
        self._gradient = gradient
        self._objective = objective
        self._has_own_loss = has_own_loss
        self._zero_advantage_is_inert = config.objective.needs_an_advantage and not has_own_loss
        self._needs_entropy = (
            config.entropy_control is not None and config.objective.entropy_estimator == "exact" and not has_own_loss
        )
        self._splitter = splitter
        self._coefficients = coefficients
        self._owner = type(collector.policy).__name__
        self._has_compared_modes = False

    def num_updates(self, batch: ExperienceBatch) -> int:
        """How many updates `run` will make of this batch: as many as the rank with most rows needs."""
        num_rows = batch.num_rows if self._splitter is None else int(batch.mask.sum())
        return self._num_per_epoch(num_rows) * self.config.num_epochs_per_update

    def _num_per_epoch(self, num_rows: int) -> int:
        own = num_updates_per_epoch(num_rows, self.config.batch_size)
        return own if self._engine.num_ranks == 1 else max(self._engine.gather_objects(own))

    def run(self, rows: TrainingRows) -> UpdateCounts:
        """Every epoch's updates.

        Raises:
            ContractError: the policy scores other steps than it sampled, or without a gradient.
            NonFiniteGradientError: too many skipped updates in a row.
        """
        advantages = rows.advantages
        rows = self._prepared(rows)
        self._gradient.clear()  # what others left behind is no part of this
        self.meter = Meter()
        self._num_dead = 0
        planned = applied = 0
        for selected in self._updates(rows.batch):
            applied += self._update(rows, selected, is_first=planned == 0)
            planned += 1
        num_skipped = 0 if rows.live is None else int((~_are_live(advantages)).sum())
        return UpdateCounts(planned=planned, applied=applied, dead=self._num_dead, rows_skipped=num_skipped)

    def _prepared(self, rows: TrainingRows) -> TrainingRows:
        """Steps as rows where the policy splits them, and which rows need a forward."""
        if self._splitter is not None:
            rows = split_steps(rows, self._splitter)
        if self.config.objective.surrogate == "dppo_tv" and not self._has_own_loss:
            require_discrete(rows.batch.actions)
        if not self._zero_advantage_is_inert or self._coefficients.may_be_positive or rows.returns is not None:
            return rows
        live = _are_live(rows.advantages)
        return rows if bool(live.all()) else replace(rows, live=live)

    def _updates(self, batch: ExperienceBatch) -> Iterator[RowIndex]:
        for _ in range(self.config.num_epochs_per_update):
            missing = self._num_per_epoch(batch.num_rows)
            for selected in epoch_of_updates(batch.group_ids, self.config.batch_size, self.generator):
                missing -= 1
                yield selected
            yield from [slice(0, 0)] * missing

    def _update(self, rows: TrainingRows, selected: RowIndex, *, is_first: bool) -> bool:
        """Accumulate one update's gradient over its micro-batches and apply it. Says whether weights changed."""
        weights, entropy_weights = self._weights(rows.batch, selected)
        positions: RowIndex = slice(0, len(weights))
        if rows.live is not None:
            positions = rows.live[selected].nonzero().squeeze(1)
        if rows.live is not None or self._engine.num_ranks > 1:
            num_live = torch.tensor(float(num_selected(positions)))
            if int(self._engine.sum(num_live)) == 0:
                self._num_dead += 1
                return False
        selection = self._selection(rows, selected)
        checks = []
        states, actions = rows.batch.states, rows.batch.actions
        for part in self._collector.plan_parts(states, actions, compose(selected, positions)):
            micro = compose(positions, part)
            inputs, check = self._inputs(
                rows,
                compose(selected, micro),
                weights=weights[micro],
                entropy_weights=None if entropy_weights is None else entropy_weights[micro],
                **{name: None if steps is None else steps[micro] for name, steps in selection.items()},
            )
            if is_first and not self._has_compared_modes and rows.num_replayed == 0:
                self._compare_modes(inputs)
            output = self._objective(inputs)
            if not isinstance(output, ObjectiveOutput):
                raise ContractError(
                    f"objective must return ObjectiveOutput(loss=..., metrics=...); got {describe(output)}. "
                    "metrics may be empty."
                )
            self._gradient.backward(output.loss)
            self.meter.add(output.metrics)
            if inputs.behaviour_log_probs is not None and not self._has_own_loss:
                old = inputs.log_probs if inputs.old_log_probs is None else inputs.old_log_probs
                found = sampler_divergence(old, inputs.behaviour_log_probs, inputs.mask)
                self.meter.add({"sampler_divergence": found})
            if (
                "total_loss" not in output.metrics
            ):  # a loss of the caller's may report what it likes; what it is, is known
                loss = output.loss.detach().double()
                self.meter.add({"total_loss": torch.stack([torch.zeros_like(loss), loss, torch.zeros_like(loss)])})
            checks.append(check)
        return self._apply(checks)

    def _weights(self, batch: ExperienceBatch, selected: RowIndex) -> tuple[Tensor, Tensor | None]:
        """The whole update's step weights, and the entropy term's own where it has any."""
        config = self.config.objective
        mask, group_ids = batch.mask[selected], batch.group_ids[selected]
        options: dict[str, Any] = {
            "fixed_length": config.fixed_length,
            "group_ids": group_ids,
            "reduce": None if self._engine.num_ranks == 1 else self._engine.sum,
        }
        weights = step_weights(mask, config.aggregation, **options)
        if config.entropy_aggregation is None:
            return weights, None
        return weights, step_weights(mask, config.entropy_aggregation, **options)

    def _selection(self, rows: TrainingRows, selected: RowIndex) -> dict[str, Tensor | None]:
        """The whole update's choice of steps, from what was stored at collection."""
        config, batch = self.config.objective, rows.batch
        if self._has_own_loss or not config.selects_across_rows:
            return {}
        assert batch.old_log_probs is not None
        keep, penalised = select_steps(
            config,
            mask=batch.mask[selected],
            log_probs=batch.old_log_probs[selected],
            advantages=rows.advantages[selected].to(batch.mask.device),
            entropy=None if batch.entropy is None else batch.entropy[selected],
            generator=self.choice_generator,
            gather=self._engine.gather,
        )
        return {"keep": keep, "penalised": penalised}

    def _inputs(
        self, rows: TrainingRows, selected: RowIndex, **of_update: Tensor | None
    ) -> tuple[ObjectiveInputs, Float[Tensor, ""]]:
        """Score these rows with gradient, and put what is known of them beside it, as wide as the scores are.

        The second value, the sum of all log-probs (finite only if each of them is), stays on the device until the update is
        applied.
        """
        batch = rows.batch
        scores = self._collector.scorer(
            select_rows(batch.states, selected), select_rows(batch.actions, selected), batch.group_ids[selected]
        )
        if self._needs_entropy and scores.entropy is None:
            raise ConfigError(
                f"config.entropy_control needs an exact entropy, and {self._owner} gives none. Return it in "
                "ActionScores.entropy (some policies do on request: exact_entropy=True), or set "
                "objective.entropy_estimator='score_function'."
            )
        if rows.returns is not None and scores.values is None:
            raise ContractError(
                f"{self._owner} gave values when its rows were collected, and gives none in an update: the critic would not be "
                "trained. Return ActionScores.values whenever rows are scored."
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
            old_log_probs=None if rows.old_is_current else of_batch(batch.old_log_probs),
            advantages=of_batch(rows.advantages),
            mask=mask,
            entropy=scores.entropy,
            ref_log_probs=of_batch(batch.ref_log_probs),
            behaviour_log_probs=of_batch(batch.behaviour_log_probs),
            kl=scores.kl,
            kl_coef=self._coefficients.kl_coef,
            entropy_coef=self._coefficients.entropy_coef,
            values=scores.values,
            old_values=of_batch(batch.values),
            returns=of_batch(rows.returns),
            **{name: beside(values) for name, values in of_update.items()},
        )
        return inputs, torch.where(mask, scores.log_probs.detach(), 0.0).sum(dtype=torch.float64)

    def _apply(self, checks: list[Tensor]) -> bool:
        """Step the optimizer if everything is sound: one transfer to the host for all that has to be known."""
        own = torch.stack(checks).sum() if len(checks) > 1 else next(iter(checks), torch.zeros((), dtype=torch.float64))
        log_probs = self._engine.sum(own)
        if not self._gradient.parameters:
            self._require_finite(log_probs.item())
            return False
        total_norm = self._gradient.total_norm()
        sum_of_log_probs, norm = torch.stack([log_probs, total_norm.to(log_probs)]).tolist()
        self._require_finite(sum_of_log_probs)
        if not math.isfinite(norm):
            return self._skip_non_finite(norm)
        self.meter.add_value("grad_norm", norm)
        self.meter.add_value("learning_rate", self._gradient.learning_rate)
        self._gradient.apply(total_norm, norm)
        self.skipped_in_a_row = 0
        return True

    def _require_finite(self, sum_of_log_probs: float) -> None:
        if math.isfinite(sum_of_log_probs):
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
