"""One update: the weights of its steps, its forward passes, and the inputs of the loss."""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._collecting.contract import require_same_steps
from grpo._collecting.update_plan import compose_index, num_selected
from grpo._common.conversion import widest_float
from grpo._objective.selection import kept_by_entropy, selected_by
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores, ObjectiveInputs, RowIndex, select_rows, zero_outside

from .first_ratio import warns_of_ratio
from .requirements import require_probabilities
from .training_rows import TrainingRows
from .update_context import UpdateContext
from .update_weights import weights_of


class Given(NamedTuple):
    """Steps that somebody else took, as the loss reads them."""

    log_probs: Float[Tensor, "M S"]
    """Their log-probs under the current policy, with gradient."""
    weights: Float[Tensor, "M S"]
    """Their weights in the cross-entropy, 0 outside their mask."""
    auxiliary_loss: Float[Tensor, "M S"] | None = None
    """The policy's own loss per step, with gradient. None: there is none."""


class Scored(NamedTuple):
    """The rows of a micro-batch with their scores, as the terms of the loss read them."""

    inputs: ObjectiveInputs | None
    """The sampled rows, for the objective. None: there are none."""
    demonstrations: Given | None
    """The demonstrations. None: there are none."""
    observations: Given | None
    """The observations of all rows. None: the loss does not read them."""


def counts_of(rows: TrainingRows, selected: RowIndex, context: UpdateContext) -> list[float]:
    """What the weights of an update need from all ranks: the numbers of this rank's rows that may have a gradient, and of
    what each term of the loss is averaged over."""
    counts = [float(num_selected(live_positions(rows, selected)))]

    def note(count: Tensor) -> Tensor:
        counts.append(float(count))
        return count

    weights_of(rows, selected, context.config.objective, note)
    return counts


def live_positions(rows: TrainingRows, selected: RowIndex) -> RowIndex:
    """The rows of an update that may have a gradient, as positions within `selected`."""
    if rows.live is None:
        return slice(0, num_selected(selected))
    return rows.live[selected].nonzero().squeeze(1)


class Update:
    """One optimizer step on some of the rows of an iteration."""

    def __init__(
        self,
        rows: TrainingRows,
        selected: RowIndex,
        context: UpdateContext,
        counts: list[float] | None,
        *,
        is_first: bool,
    ) -> None:
        self._rows, self._context = rows, context
        self.selected = selected
        """The rows of the update."""
        self._compares_modes = is_first and rows.num_replayed == 0 and not context.has_compared_modes
        self._sums: list[Tensor] = []
        config, batch = context.config.objective, rows.batch
        totals = None if counts is None else iter(counts[1:])
        of_all_ranks = None if totals is None else lambda own: own.new_tensor(next(totals))
        self.weights = weights_of(rows, selected, config, of_all_ranks)
        """The weights of the steps in each term of the loss."""
        self.keep = self.chosen = None
        self._is_sampled: Bool[Tensor, " n"] | None = None
        mask = batch.mask[selected]
        if batch.is_demonstration is not None:
            if bool(batch.is_demonstration.all()):  # nothing to choose from, on all ranks
                self._is_sampled = torch.zeros(len(mask), dtype=torch.bool)
                return
            self._is_sampled = ~batch.is_demonstration[selected]
            mask = mask & self._is_sampled.unsqueeze(1).to(mask.device)
        if not context.has_own_loss:  # the steps that the surrogate counts
            at_collection = None if batch.entropy is None else batch.entropy[selected]
            self.keep = kept_by_entropy(mask, at_collection, config.top_entropy_fraction, context.engine.gather)
        if context.traits.select is not None:  # the steps that the surrogate's own `select` chooses
            assert batch.old_log_probs is not None
            old, advantages = batch.old_log_probs[selected], rows.advantages[selected]
            self.chosen = selected_by(
                context.traits.select, mask, old, advantages, context.step_choice, context.engine.gather
            )

    def micro_batches(self) -> Iterator[RowIndex]:
        """Yield the rows of each forward pass, as positions within the update. The policy's `plan_micro_batches` chooses the
        rows. Without it, each forward pass has the next `micro_batch_size` rows. Both are halved if memory runs out."""
        positions = live_positions(self._rows, self.selected)
        batch, collector = self._rows.batch, self._context.collector
        sizes = collector.updating
        chosen = compose_index(self.selected, positions)
        parts = collector.plan_parts(batch.states, batch.actions, chosen, sizes.num_halvings)
        num_missing = sizes.num_missing(len(parts))
        for part in sizes.passes(parts):
            yield compose_index(positions, part)
        for _ in range(num_missing):
            self._accompany()

    def _accompany(self) -> None:
        """Make a forward and a backward pass of the first row with weight 0, because other ranks have more passes."""

        def loss() -> Tensor:
            first, batch, collector = slice(0, 1), self._rows.batch, self._context.collector
            states, actions = select_rows(batch.states, first), select_rows(batch.actions, first)
            scores = collector.scorer(states, actions, batch.group_ids[first])
            read = [zero_outside(values, scores.mask).sum() for values in self._read(scores)]
            if self.weights.observations is not None:
                assert scores.observed_log_probs is not None
                assert scores.observed_mask is not None
                read.append(zero_outside(scores.observed_log_probs, scores.observed_mask).sum())
            return torch.stack(read).sum()

        self._context.engine.accompany(self._context.collector.policy, loss)

    def scored(self, micro: RowIndex) -> Scored:
        """Score the rows of a micro-batch with gradient, in one forward pass."""
        batch = self._rows.batch
        selected = compose_index(self.selected, micro)
        scores = self._context.collector.scorer(
            select_rows(batch.states, selected), select_rows(batch.actions, selected), batch.group_ids[selected]
        )
        self._check(scores, selected)
        observed = self._observations(scores, micro)
        is_sampled = None if self._is_sampled is None else self._is_sampled[micro]
        if is_sampled is None or bool(is_sampled.all()):
            return Scored(self._inputs(scores, micro), None, observed)
        given = self._demonstrations(*_part(scores, micro, ~is_sampled))
        sampled = self._inputs(*_part(scores, micro, is_sampled)) if bool(is_sampled.any()) else None
        return Scored(sampled, given, observed)

    def _observations(self, scores: ActionScores, micro: RowIndex) -> Given | None:
        """Combine the scores of observations with their weights."""
        if self.weights.observations is None:
            return None
        assert scores.observed_log_probs is not None
        assert scores.observed_mask is not None
        self._sums.append(_sum_of([scores.observed_log_probs], scores.observed_mask))
        weights = _beside(scores.observed_log_probs, self.weights.observations, micro)
        self._require_gradient("observed_log_probs", scores.observed_log_probs, scores, weights)
        return Given(scores.observed_log_probs, weights)

    def _demonstrations(self, scores: ActionScores, micro: RowIndex) -> Given:
        """Combine the scores of demonstrations with their weights."""
        assert self.weights.demonstrations is not None
        read = [values for values in (scores.log_probs, scores.auxiliary_loss) if values is not None]
        self._sums.append(_sum_of(read, scores.mask))
        weights = _beside(scores.log_probs, self.weights.demonstrations, micro)
        return Given(scores.log_probs, weights, scores.auxiliary_loss)

    def _inputs(self, scores: ActionScores, micro: RowIndex) -> ObjectiveInputs:
        """Combine the scores of sampled rows with everything known about the rows."""
        rows, batch = self._rows, self._rows.batch
        selected = compose_index(self.selected, micro)

        def beside(values: Tensor | None, index: RowIndex = selected) -> Any:
            return None if values is None else _beside(scores.log_probs, values, index)

        inputs = ObjectiveInputs(
            log_probs=scores.log_probs,
            old_log_probs=None if rows.old_is_current else beside(batch.old_log_probs),
            advantages=beside(rows.advantages),
            mask=scores.mask,
            weights=beside(self.weights.steps, micro),
            entropy=scores.entropy,
            entropy_weights=beside(self.weights.entropy, micro),
            ref_log_probs=beside(batch.ref_log_probs),
            behaviour_log_probs=beside(batch.behaviour_log_probs),
            kl=scores.kl,
            auxiliary_loss=scores.auxiliary_loss,
            keep=beside(self.keep, micro),
            selected=beside(self.chosen, micro),
            kl_coef=self._context.coefficients.kl_coef,
            entropy_coef=self._context.coefficients.entropy_coef,
            values=scores.values,
            old_values=beside(batch.values),
            returns=beside(rows.returns),
        )
        self._sums.append(_sum_of(self._read(scores), scores.mask))
        is_exact = self._context.config.objective.kl_estimator == "exact" and not self._context.has_own_loss
        if is_exact and scores.kl is not None and self._context.coefficients.kl_coef > 0:
            self._require_gradient("kl", scores.kl, scores, scores.mask)
        if self._context.traits.for_probabilities:
            require_probabilities(self._context.config.objective.surrogate, scores.log_probs, scores.mask)
        if self._compares_modes:
            self._compare_modes(inputs)
        return inputs

    def _read(self, scores: ActionScores) -> list[Tensor]:
        """The scores that the loss or the metrics read."""
        read = [
            scores.log_probs,
            scores.entropy,
            scores.kl if self._context.config.objective.kl_estimator == "exact" else None,
            scores.values if self._rows.returns is not None else None,
            scores.auxiliary_loss,
        ]
        return [values for values in read if values is not None]

    def _require_gradient(self, name: str, values: Tensor, scores: ActionScores, counted: Tensor) -> None:
        """Refuse values without a gradient where log-probs have one, because their term of the loss would teach nothing."""
        if scores.log_probs.requires_grad and not values.requires_grad and bool(counted.any()):
            raise ContractError(
                f"{self._context.policy_name}: {name} must carry a gradient, as log_probs do, or it teaches nothing. Compute "
                "it without no_grad(), detach() or item()."
            )

    def sum_of_scores(self) -> Float[Tensor, ""]:
        """The sum of all scores that the loss or the metrics read. It is finite only if all of them are."""
        return reduce(torch.add, self._sums) if self._sums else torch.zeros((), dtype=torch.float64)

    def _check(self, scores: ActionScores, selected: RowIndex) -> None:
        name, config, batch = self._context.policy_name, self._context.config, self._rows.batch
        needs_entropy = config.entropy_control is not None and config.objective.entropy_estimator == "exact"
        if needs_entropy and scores.entropy is None and not self._context.has_own_loss:
            raise ConfigError(
                f"config.entropy_control needs an exact entropy, and {name} gives none. Return it in ActionScores.entropy "
                "(some policies do on request: exact_entropy=True), or set objective.entropy_estimator='score_function'."
            )
        if self._rows.returns is not None and scores.values is None:
            raise ContractError(
                f"{name} returned values when its rows were collected, but none in an update, so the critic would not "
                "be trained. Return ActionScores.values whenever rows are scored."
            )
        require_same_steps(name, scores.mask, batch.mask[selected])
        if self.weights.observations is not None:
            assert batch.observed_mask is not None
            require_same_steps(name, scores.observed_mask, batch.observed_mask[selected], "observations")

    def _compare_modes(self, inputs: ObjectiveInputs) -> None:
        """Warn once if log-probs differ between train() and eval(), because the first ratio is then not 1."""
        if inputs.old_log_probs is None or not inputs.log_probs.requires_grad:
            return
        self._context.has_compared_modes = True  # all micro-batches of this update are compared, but no later update
        self._compares_modes = not warns_of_ratio(self._context.collector.policy, inputs)

    def forget_scores(self) -> None:
        """Forget the scores of a failed attempt."""
        self._sums.clear()


def _part(scores: ActionScores, micro: RowIndex, chosen: Bool[Tensor, " n"]) -> tuple[ActionScores, RowIndex]:
    """The scores of some rows of a micro-batch, and these rows as positions within the update."""
    rows = chosen.nonzero().squeeze(1)
    here = rows.to(scores.mask.device)
    present = {
        name: values
        for name, values in ((f.name, getattr(scores, f.name)) for f in fields(scores))
        if values is not None
    }
    return replace(scores, **{name: values[here] for name, values in present.items()}), compose_index(micro, rows)


def _beside(scores: Float[Tensor, "n W"], values: Tensor, index: RowIndex) -> Tensor:
    """The values of the rows at `index`, cut to the width of the scores and moved to their device."""
    device = scores.device
    values = values[index] if values.dim() == 1 else values[index, : scores.shape[1]]
    return values.to(device, widest_float(device) if values.dtype == torch.float64 else values.dtype)


def _sum_of(read: Iterable[Tensor], mask: Bool[Tensor, "n T"]) -> Float[Tensor, ""]:
    """The sum of scores that the loss or the metrics read. It is finite only if all of them are."""
    dtype = widest_float(mask.device)
    return reduce(torch.add, (zero_outside(values.detach(), mask).sum(dtype=dtype) for values in read))
