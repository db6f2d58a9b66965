"""The updates of one iteration: the rows, weights and forward passes of each update, and the inputs of the loss."""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._advantages.groups import has_advantage
from grpo._collecting.out_of_memory import Attempt
from grpo._collecting.update_plan import compose_index, epoch_of_updates, num_selected, num_updates_per_epoch
from grpo._common.conversion import pad_steps, widest_float
from grpo._objective.selection import kept_by_entropy, selected_by
from grpo._objective.weights import step_weights
from grpo.config import GRPOConfig
from grpo.distributed import Engine, ShardsWeights
from grpo.errors import ConfigError, ContractError
from grpo.experience_collector import ExperienceCollector
from grpo.metrics import Meter
from grpo.policy_base import SplitsSteps
from grpo.surrogates import SurrogateTraits, traits_of
from grpo.types import ActionScores, ExperienceBatch, ObjectiveInputs, RowIndex, select_rows, zero_outside

from .coefficients import Coefficients
from .first_ratio import warns_of_ratio
from .optimizer_step import OptimizerStep
from .requirements import require_discrete, require_probabilities
from .training_rows import TrainingRows, split_steps

_SAME_STEPS = "Score the same steps every time. If you made the rollouts, pass their mask to ExperienceBatch.from_rows."


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Values that are computed once per update from all its rows, on all ranks."""

    selected: RowIndex
    """The rows of the update."""
    steps: Float[Tensor, "n T"]
    """The weight of each step in the loss."""
    entropy: Float[Tensor, "n T"] | None
    """The weight of each step in the entropy term. None: the same weights as in the field `steps`."""
    keep: Bool[Tensor, "n T"] | None
    """Steps that the surrogate counts. None: all steps."""
    chosen: Bool[Tensor, "n T"] | None
    """Steps that the surrogate's `select` chose. None: the surrogate has no `select`."""


@dataclass(eq=False)
class UpdateSetup:
    """Settings and objects that the updates of all iterations use."""

    config: GRPOConfig
    """The settings: batch size, epochs, aggregation, selections."""
    collector: ExperienceCollector
    """Scores rows and plans forward passes."""
    coefficients: Coefficients
    """The current KL and entropy coefficients."""
    engine: Engine
    """Combines several ranks."""
    has_own_loss: bool
    """Whether the user passed a whole objective, so that no shortcut applies."""
    seed: InitVar[int]
    """Seed of the order of rows."""
    has_compared_modes: bool = False
    """Whether the log-probs of train() and eval() have been compared, in the first update."""

    def __post_init__(self, seed: int) -> None:
        policy = self.collector.policy
        self.policy_name = type(policy).__name__
        self.splitter = policy if isinstance(policy, SplitsSteps) else None
        self.traits = SurrogateTraits() if self.has_own_loss else traits_of(self.config.objective.surrogate)
        """The traits of the loss. A user's own objective may read anything, so it has the safe defaults."""
        self.row_order = torch.Generator().manual_seed(seed)
        self.step_choice = torch.Generator().manual_seed(seed)
        """Generator of the random choices. It is in the same state on all ranks, whatever their numbers of rows."""

    def num_updates(self, batch: ExperienceBatch) -> int:
        """Number of updates in an iteration on this batch: as many as the rank with the most rows needs."""
        num_rows = batch.num_rows if self.splitter is None else int(batch.mask.sum())
        return self.num_per_epoch(num_rows) * self.config.num_epochs_per_update

    def num_per_epoch(self, num_rows: int) -> int:
        """Number of updates in one pass over this rank's rows, or over the rows of the rank with the most rows."""
        of_ranks: list[int] = self.engine.gather_objects(num_updates_per_epoch(num_rows, self.config.batch_size))
        return max(of_ranks)


class UpdateRows:
    """The rows of one iteration as its updates read them."""

    def __init__(self, rows: TrainingRows, setup: UpdateSetup, all_ranks: TrainingRows) -> None:
        self.all_ranks = all_ranks
        """The rows of all ranks, for the report."""
        self.given = rows
        """The rows of this rank, before they are split into steps."""
        has_other_terms = rows.returns is not None or setup.coefficients.may_be_positive
        skips = setup.traits.zero_advantage_is_inert and not has_other_terms
        self.num_skipped = int((~has_advantage(rows.advantages)).sum()) if skips else 0
        """Number of rows without an advantage, which no update forwards."""
        if setup.splitter is not None:
            rows = split_steps(rows, setup.splitter)
        if setup.traits.for_probabilities:
            require_discrete(setup.config.objective.surrogate, rows.batch.actions)
        if skips:
            live = has_advantage(rows.advantages)
            rows = rows if bool(live.all()) else replace(rows, live=live)
        self.data = rows
        self.num_planned = 0
        """Number of updates so far, over all epochs, including the current one."""
        self.num_dead = 0
        """Number of updates that were skipped before the forward pass, because none of their rows has an advantage."""
        self._setup = setup
        self._first_row_order = setup.row_order.get_state()
        self._sums: list[Tensor] = []
        self._has_compared_modes = setup.has_compared_modes

    def updates(self) -> Iterator[RowIndex]:
        """Yield the rows of each update, epoch by epoch. The rows of a group stay adjacent. An update is left out if none of
        its rows can have a gradient. After `from_state_dict`, the updates that were done before are not repeated."""
        setup, batch = self._setup, self.data.batch
        num_done, position = self.num_planned, 0
        setup.row_order.set_state(self._first_row_order)
        for _ in range(setup.config.num_epochs_per_update):
            num_updates = setup.num_per_epoch(batch.num_rows)
            own = list(epoch_of_updates(batch.group_ids, setup.config.batch_size, setup.row_order))
            waiting = [slice(0, 0)] * (num_updates - len(own))  # for ranks that have more rows
            for selected in (*own, *waiting):
                position += 1
                if position <= num_done:
                    continue
                self.num_planned = position
                if self._is_live(selected):
                    yield selected
                else:
                    self.num_dead += 1

    def state_dict(self) -> dict[str, Any]:
        """The rows, and the number of updates so far. No tensor is copied."""
        return {
            "rows": self.given.state_dict(),
            "all_ranks": self.all_ranks.without_content().state_dict(),
            "num_planned": self.num_planned,
            "num_dead": self.num_dead,
            "first_row_order": self._first_row_order,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], setup: UpdateSetup) -> "UpdateRows":
        """Return the rows that `state_dict` described. Their next update follows the last update before `state_dict`."""
        rows, all_ranks = (TrainingRows.from_state_dict(state[name]) for name in ("rows", "all_ranks"))
        resumed = cls(rows, setup, all_ranks)
        resumed.num_planned, resumed.num_dead = state["num_planned"], state["num_dead"]
        resumed._first_row_order = state["first_row_order"]
        return resumed

    def _is_live(self, selected: RowIndex) -> bool:
        """Whether any rank has a row in this update that may have a gradient."""
        if self.data.live is None and self._setup.engine.num_ranks == 1:
            return True
        num_live = torch.tensor(float(num_selected(self._live_positions(selected))))
        return int(self._setup.engine.sum(num_live)) > 0

    def weights(self, selected: RowIndex) -> UpdateWeights:
        """Compute step weights and select steps, from all rows of the update on all ranks."""
        setup, batch = self._setup, self.data.batch
        config, mask = setup.config.objective, batch.mask[selected]
        group_ids, engine = batch.group_ids[selected], setup.engine
        weigh = partial(step_weights, mask, fixed_length=config.fixed_length, group_ids=group_ids, reduce=engine.sum)
        keep = chosen = None
        if not setup.has_own_loss:
            at_collection = None if batch.entropy is None else batch.entropy[selected]
            keep = kept_by_entropy(mask, at_collection, config.top_entropy_fraction, engine.gather)
        if setup.traits.select is not None:
            assert batch.old_log_probs is not None
            old, advantages = batch.old_log_probs[selected], self.data.advantages[selected]
            chosen = selected_by(setup.traits.select, mask, old, advantages, setup.step_choice, engine.gather)
        return UpdateWeights(
            selected=selected,
            steps=weigh(config.aggregation),
            entropy=None if config.entropy_aggregation is None else weigh(config.entropy_aggregation),
            keep=keep,
            chosen=chosen,
        )

    def micro_batches(self, selected: RowIndex) -> Iterator[RowIndex]:
        """Yield the rows of each forward pass, as positions within `selected`. The policy's `plan_micro_batches` chooses the
        rows. Without it, each forward pass has the next `micro_batch_size` rows. `attempts` halves both if memory runs out."""
        positions = self._live_positions(selected)
        batch, collector = self.data.batch, self._setup.collector
        sizes = collector.updating
        chosen = compose_index(selected, positions)
        parts = collector.plan_parts(batch.states, batch.actions, chosen, sizes.num_halvings)
        num_missing = sizes.num_missing(len(parts))
        for part in sizes.passes(parts):
            yield compose_index(positions, part)
        for _ in range(num_missing):
            self._accompany()

    def _accompany(self) -> None:
        """Make a forward and a backward pass of the first row with weight 0, because other ranks have more passes."""

        def loss() -> Tensor:
            first, batch, collector = slice(0, 1), self.data.batch, self._setup.collector
            states, actions = select_rows(batch.states, first), select_rows(batch.actions, first)
            scores = collector.scorer(states, actions, batch.group_ids[first])
            return torch.stack([zero_outside(values, scores.mask).sum() for values in self._read(scores)]).sum()

        engine = self._setup.engine
        assert isinstance(engine, ShardsWeights)
        engine.accompany(self._setup.collector.policy, loss)

    def attempts(self, optimizer_step: OptimizerStep, meter: Meter) -> Iterator[Attempt]:
        """Yield attempts at the forward and backward passes of an update, until memory suffices for one on every rank.

        A failed attempt leaves nothing behind: gradients, metrics, log-probs and random numbers are put back.
        """
        forget_metrics = meter.restore_point()

        def put_back() -> None:
            optimizer_step.clear()
            self._sums.clear()
            forget_metrics()

        return self._setup.collector.updating.attempts(self._setup.engine, put_back)

    def _live_positions(self, selected: RowIndex) -> RowIndex:
        if self.data.live is None:
            return slice(0, num_selected(selected))
        return self.data.live[selected].nonzero().squeeze(1)

    def inputs(self, micro: RowIndex, weights: UpdateWeights) -> ObjectiveInputs:
        """Score the rows of a micro-batch with gradient, and combine the scores with everything known about the rows."""
        rows, batch = self.data, self.data.batch
        selected = compose_index(weights.selected, micro)
        scores = self._setup.collector.scorer(
            select_rows(batch.states, selected), select_rows(batch.actions, selected), batch.group_ids[selected]
        )
        self._check(scores, batch.mask[selected])
        width, device = scores.log_probs.shape[1], scores.log_probs.device

        def beside(values: Tensor | None, index: RowIndex = selected) -> Any:
            """Return the values of this micro-batch's rows, cut to the width of its scores and moved to their device."""
            if values is None:
                return None
            values = values[index] if values.dim() == 1 else values[index, :width]
            return values.to(device, widest_float(device) if values.dtype == torch.float64 else values.dtype)

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
        self._sums.append(self._sum_of_scores(scores))
        if self.num_planned == 1 and rows.num_replayed == 0:
            self._compare_modes(inputs)
        return inputs

    def _sum_of_scores(self, scores: ActionScores) -> Float[Tensor, ""]:
        """The sum of all scores that the loss or the metrics read. It is finite only if all of them are."""
        dtype = widest_float(scores.mask.device)
        sums = [zero_outside(values.detach(), scores.mask).sum(dtype=dtype) for values in self._read(scores)]
        return torch.stack(sums).sum()

    def _read(self, scores: ActionScores) -> list[Tensor]:
        """The scores that the loss or the metrics read."""
        read = [
            scores.log_probs,
            scores.entropy,
            scores.kl if self._setup.config.objective.kl_estimator == "exact" else None,
            scores.values if self.data.returns is not None else None,
        ]
        return [values for values in read if values is not None]

    def sum_of_scores(self) -> Float[Tensor, ""]:
        """Return the sum of all scores (log-probs, exact entropy and KL, values) since the last call."""
        sums, self._sums = self._sums, []
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)

    def _check(self, scores: ActionScores, mask: Bool[Tensor, "n T"]) -> None:
        name, config = self._setup.policy_name, self._setup.config
        needs_entropy = config.entropy_control is not None and config.objective.entropy_estimator == "exact"
        if needs_entropy and scores.entropy is None and not self._setup.has_own_loss:
            raise ConfigError(
                f"config.entropy_control needs an exact entropy, and {name} gives none. Return it in ActionScores.entropy "
                "(some policies do on request: exact_entropy=True), or set objective.entropy_estimator='score_function'."
            )
        if self.data.returns is not None and scores.values is None:
            raise ContractError(
                f"{name} returned values when its rows were collected, but none in an update, so the critic would not "
                "be trained. Return ActionScores.values whenever rows are scored."
            )
        width, found = mask.shape[1], scores.mask
        if found.shape[1] > width:
            raise ContractError(f"{name} scored {found.shape[1]} steps in rows of {width} steps. {_SAME_STEPS}")
        if not torch.equal(pad_steps(found, width, False), mask.to(found.device)):
            raise ContractError(
                f"{name} must return the mask of the batch in an update; the masks differ. {_SAME_STEPS}"
            )
        if self._setup.traits.for_probabilities:
            require_probabilities(config.objective.surrogate, scores.log_probs, scores.mask)

    def _compare_modes(self, inputs: ObjectiveInputs) -> None:
        """Warn once if log-probs differ between train() and eval(), because the first ratio is then not 1."""
        if self._has_compared_modes or inputs.old_log_probs is None or not inputs.log_probs.requires_grad:
            return
        self._setup.has_compared_modes = (
            True  # the other micro-batches of this update are compared, but no later update
        )
        self._has_compared_modes = warns_of_ratio(self._setup.collector.policy, self._setup.config, inputs)
