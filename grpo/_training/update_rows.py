"""The updates of one iteration: which rows each reads, with which weights, in which forwards, and what the loss is given."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._advantages.groups import has_advantage
from grpo._collecting.update_plan import compose_index, epoch_of_updates, num_selected, num_updates_per_epoch
from grpo._objective.selection import kept_by_entropy, selected_by
from grpo._objective.weights import step_weights
from grpo.config import GRPOConfig
from grpo.distributed import Engine
from grpo.errors import ConfigError, ContractError, GRPOWarning
from grpo.experience_collector import ExperienceCollector
from grpo.policy_base import SplitsSteps
from grpo.surrogates import traits_of
from grpo.types import ActionScores, ExperienceBatch, ObjectiveInputs, RowIndex, select_rows, zero_outside

from .coefficients import Coefficients
from .requirements import require_discrete
from .training_rows import AllAdvantages, TrainingRows, split_steps

TRAIN_MODE_TOLERANCE = 0.05
"""Largest change of a log-prob between eval() and train() that counts as rounding (bfloat16) and not as dropout."""

_SAME_STEPS = "Score the same steps every time; give rollouts made elsewhere the mask of the policy's own decisions."


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """What is computed once per update from all its rows, on all ranks."""

    selected: RowIndex
    """The rows of the update."""
    steps: Float[Tensor, "n T"]
    """The weight of each step in the loss."""
    entropy: Float[Tensor, "n T"] | None
    """The entropy term's own weights. None: the same."""
    keep: Bool[Tensor, "n T"] | None
    """Steps that the surrogate counts. None: all."""
    chosen: Bool[Tensor, "n T"] | None
    """Steps that the surrogate's `select` chose. None: it has no `select`."""


class UpdateSetup:
    """What the updates of all iterations share.

    Args:
        config: batch size, epochs, aggregation, selections.
        collector: scores rows and plans forwards.
        coefficients: the current KL and entropy coefficients.
        engine: brings several ranks together.
        has_own_loss: the user passed a whole objective, so no shortcut applies.
        seed: of the order of rows.
    """

    def __init__(
        self,
        config: GRPOConfig,
        collector: ExperienceCollector,
        coefficients: Coefficients,
        engine: Engine,
        has_own_loss: bool,
        seed: int,
    ) -> None:
        policy = collector.policy
        self.config, self.collector, self.coefficients, self.engine = config, collector, coefficients, engine
        self.policy_name = type(policy).__name__
        self.splitter = policy if isinstance(policy, SplitsSteps) else None
        self.traits = traits_of(config.objective.surrogate)
        self.has_own_loss = has_own_loss
        self.row_order = torch.Generator().manual_seed(seed)
        self.step_choice = torch.Generator().manual_seed(seed)
        """Drawn from in step on all ranks, whatever their numbers of rows."""
        self.has_compared_modes = False
        self.reports_entropy = (
            config.entropy_control is not None and config.objective.entropy_estimator == "exact" and not has_own_loss
        )

    def num_updates(self, batch: ExperienceBatch) -> int:
        """Updates that one iteration makes of this batch: as many as the rank with most rows needs."""
        num_rows = batch.num_rows if self.splitter is None else int(batch.mask.sum())
        return self.num_per_epoch(num_rows) * self.config.num_epochs_per_update

    def num_per_epoch(self, num_rows: int) -> int:
        """Updates of one pass over this rank's rows, or over those of the rank with most rows."""
        own = num_updates_per_epoch(num_rows, self.config.batch_size)
        return own if self.engine.num_ranks == 1 else max(self.engine.gather_objects(own))

    def skips_zero_advantages(self, rows: TrainingRows) -> bool:
        """Whether a row without an advantage has no gradient from any term of the loss."""
        inert = self.traits.zero_advantage_is_inert and not self.has_own_loss
        return inert and not self.coefficients.may_be_positive and rows.returns is None


class UpdateRows:
    """The rows of one iteration as its updates read them.

    Args:
        rows: with their advantages.
        setup: what all iterations share.
        all_ranks: the rewards and advantages of all ranks, for the report.
    """

    def __init__(self, rows: TrainingRows, setup: UpdateSetup, all_ranks: AllAdvantages) -> None:
        self.all_ranks = all_ranks
        skips = setup.skips_zero_advantages(rows)
        self.num_skipped = int((~has_advantage(rows.advantages)).sum()) if skips else 0
        """Rows without an advantage, which no update forwards."""
        if setup.splitter is not None:
            rows = split_steps(rows, setup.splitter)
        if setup.traits.for_probabilities and not setup.has_own_loss:
            require_discrete(setup.config.objective.surrogate, rows.batch.actions)
        if skips:
            live = has_advantage(rows.advantages)
            rows = rows if bool(live.all()) else replace(rows, live=live)
        self.data = rows
        self.num_planned = 0
        """Epochs x updates so far."""
        self.num_dead = 0
        """Updates skipped before the forward pass, since none of their rows has an advantage."""
        self._setup = setup
        self._sum_of_log_probs: list[Tensor] = []

    def updates(self) -> Iterator[RowIndex]:
        """The rows of each update, epoch by epoch; a group's rows stay adjacent. Updates without a live row are left out."""
        setup, batch = self._setup, self.data.batch
        for _ in range(setup.config.num_epochs_per_update):
            missing = setup.num_per_epoch(batch.num_rows)
            for selected in epoch_of_updates(batch.group_ids, setup.config.batch_size, setup.row_order):
                missing -= 1
                yield from self._if_live(selected)
            for _ in range(missing):  # other ranks have more rows, and wait for this one
                yield from self._if_live(slice(0, 0))

    def _if_live(self, selected: RowIndex) -> Iterator[RowIndex]:
        engine = self._setup.engine
        if self.data.live is not None or engine.num_ranks > 1:
            num_live = torch.tensor(float(num_selected(self._live_positions(selected))))
            if int(engine.sum(num_live)) == 0:
                self.num_planned += 1
                self.num_dead += 1
                return
        yield selected
        self.num_planned += 1

    def weights(self, selected: RowIndex) -> UpdateWeights:
        """Step weights and selections of steps, from the whole update on all ranks."""
        setup, batch = self._setup, self.data.batch
        config, mask = setup.config.objective, batch.mask[selected]
        options: dict[str, Any] = {
            "fixed_length": config.fixed_length,
            "group_ids": batch.group_ids[selected],
            "reduce": None if setup.engine.num_ranks == 1 else setup.engine.sum,
        }
        steps = step_weights(mask, config.aggregation, **options)
        entropy = None
        if config.entropy_aggregation is not None:
            entropy = step_weights(mask, config.entropy_aggregation, **options)
        keep = chosen = None
        if not setup.has_own_loss:
            at_collection = None if batch.entropy is None else batch.entropy[selected]
            keep = kept_by_entropy(mask, at_collection, config.top_entropy_fraction, setup.engine.gather)
            if setup.traits.select is not None:
                assert batch.old_log_probs is not None
                advantages = self.data.advantages[selected].to(mask.device)
                old = batch.old_log_probs[selected]
                chosen = selected_by(setup.traits.select, mask, old, advantages, setup.step_choice, setup.engine.gather)
        return UpdateWeights(selected=selected, steps=steps, entropy=entropy, keep=keep, chosen=chosen)

    def micro_batches(self, selected: RowIndex) -> Iterator[RowIndex]:
        """Positions within `selected` of the rows of each forward: the policy's own plan, else `micro_batch_size` in order."""
        positions = self._live_positions(selected)
        batch = self.data.batch
        chosen = compose_index(selected, positions)
        for part in self._setup.collector.plan_parts(batch.states, batch.actions, chosen):
            yield compose_index(positions, part)

    def _live_positions(self, selected: RowIndex) -> RowIndex:
        if self.data.live is None:
            return slice(0, num_selected(selected))
        return self.data.live[selected].nonzero().squeeze(1)

    def inputs(self, micro: RowIndex, weights: UpdateWeights) -> ObjectiveInputs:
        """Score the rows of a micro-batch with gradient, and put everything known about them beside it.

        Raises:
            ContractError: the policy scores other steps than it sampled.
        """
        rows, batch = self.data, self.data.batch
        selected = compose_index(weights.selected, micro)
        scores = self._setup.collector.scorer(
            select_rows(batch.states, selected), select_rows(batch.actions, selected), batch.group_ids[selected]
        )
        self._check(scores, batch.mask[selected])
        width, device = scores.log_probs.shape[1], scores.log_probs.device

        def beside(values: Tensor | None, index: RowIndex = selected) -> Any:
            """The rows' values, as wide as the scores."""
            if values is None:
                return None
            values = values[index]
            return (values if values.dim() == 1 or values.shape[1] == width else values[:, :width]).to(device)

        inputs = ObjectiveInputs(
            log_probs=scores.log_probs,
            old_log_probs=None if rows.old_is_current else beside(batch.old_log_probs),
            advantages=beside(rows.advantages),
            mask=scores.mask,
            weights=beside(weights.steps, micro),
            entropy=scores.entropy,
            entropy_weights=beside(weights.entropy, micro),
            ref_log_probs=beside(batch.ref_log_probs),
            behaviour_log_probs=beside(batch.behaviour_log_probs),
            kl=scores.kl,
            keep=beside(weights.keep, micro),
            selected=beside(weights.chosen, micro),
            kl_coef=self._setup.coefficients.kl_coef,
            entropy_coef=self._setup.coefficients.entropy_coef,
            values=scores.values,
            old_values=beside(batch.values),
            returns=beside(rows.returns),
        )
        self._sum_of_log_probs.append(zero_outside(scores.log_probs.detach(), scores.mask).sum(dtype=torch.float64))
        if self.num_planned == 0 and rows.num_replayed == 0:
            self._compare_modes(inputs)
        return inputs

    def sum_of_log_probs(self) -> Float[Tensor, ""]:
        """The sum over the update's forwards so far, which is finite only if every log-prob is; then begins anew."""
        sums, self._sum_of_log_probs = self._sum_of_log_probs, []
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def _check(self, scores: ActionScores, mask: Bool[Tensor, "n T"]) -> None:
        name = self._setup.policy_name
        if self._setup.reports_entropy and scores.entropy is None:
            raise ConfigError(
                f"config.entropy_control needs an exact entropy, and {name} gives none. Return it in ActionScores.entropy "
                "(some policies do on request: exact_entropy=True), or set objective.entropy_estimator='score_function'."
            )
        if self.data.returns is not None and scores.values is None:
            raise ContractError(
                f"{name} gave values when its rows were collected, and gives none in an update: the critic would not be "
                "trained. Return ActionScores.values whenever rows are scored."
            )
        width = scores.log_probs.shape[1]
        if width > mask.shape[1]:
            raise ContractError(f"{name} scored {width} steps of rows of {mask.shape[1]}. {_SAME_STEPS}")
        expected = mask[:, :width].to(scores.mask.device)
        if not torch.equal(scores.mask, expected) or (width < mask.shape[1] and bool(mask[:, width:].any())):
            raise ContractError(f"{name} masks other steps in an update than in the batch. {_SAME_STEPS}")
        if self._setup.traits.for_probabilities and not self._setup.has_own_loss:
            surrogate = self._setup.config.objective.surrogate
            require_probabilities(surrogate, scores.log_probs, scores.mask)

    def _compare_modes(self, inputs: ObjectiveInputs) -> None:
        """Say, once, when train() changes the log-probs that eval() gave: the first ratio is then not 1."""
        if self._setup.has_compared_modes or inputs.old_log_probs is None or not inputs.log_probs.requires_grad:
            return
        self._setup.has_compared_modes = True
        change = zero_outside(inputs.log_probs.detach() - inputs.old_log_probs, inputs.mask).abs().max().item()
        if change > TRAIN_MODE_TOLERANCE:
            warnings.warn(
                f"{self._setup.policy_name}: before any update, log-probabilities in train() differ by up to {change:.2g} from "
                "those in eval(), so the first ratio is not 1. Dropout or batch normalisation is on in train(): set dropout "
                "to 0.",
                GRPOWarning,
                stacklevel=2,
            )


def require_probabilities(surrogate: Any, log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> None:
    """Log-probs of probabilities are not above 0.

    Raises:
        ContractError: one is, so it is the log of a density.
    """
    largest = float(zero_outside(log_probs.detach(), mask).max()) if log_probs.numel() else 0.0
    if largest > 1e-5:
        raise ContractError(
            f"objective.surrogate={surrogate!r} compares probabilities, and a log-prob of {largest:.3g} is that of a density. "
            "Use a surrogate that compares ratios, such as 'clip', with continuous actions."
        )
