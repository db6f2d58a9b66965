"""The weights of one policy, divided among the ranks by FSDP2 (`torch.distributed.fsdp.fully_shard`).

A unit is a module whose weights are gathered together, right before its forward and its backward pass, and dropped right after
it. Its gradients are summed over the ranks, and each rank keeps the rows that it owns. All ranks run each unit equally often.

Source:
    Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv:1910.02054.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from grpo.types import ActionScores

from .units import undivided, units_of

SCORING = ("get_log_probabilities", "score_actions", "score_groups", "reference_log_probabilities")
"""Methods of a policy that run a forward pass: unit after unit is gathered."""
SAMPLING = ("generate_actions", "sample_actions", "sample_tokens")
"""Methods of a policy that need all weights many times: all units are gathered first."""
READING = ("sync_sampler",)
"""Methods of a policy that read its weights. A policy with `reads_by_unit = True` gathers the innermost units itself, one after
another, so that no rank ever has all weights."""
WRITING = ("save_pretrained",)
"""Methods of a policy that write its weights to files, which only the first rank does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How weights are divided and gathered."""

    mesh: Any
    """The ranks, as a `torch.distributed.device_mesh.DeviceMesh` of one axis."""
    precision: Any
    """A `MixedPrecisionPolicy`."""
    offload: Any
    """An `OffloadPolicy`."""
    gather: Callable[[Tensor, Tensor], Any]
    """Fills the first tensor with the second tensors of all ranks, in rank order."""
    scatter: Callable[[Tensor, Tensor], Any]
    """Fills the first tensor with this rank's part of the sum of the second tensors of all ranks."""
    is_first: bool
    """Whether this is the first rank."""


class ShardedModel:
    """Divides the weights of a policy, and makes its methods gather what they need.

    Args:
        policy: The policy. Its parameters become `DTensor`s, and its methods that score, sample, or read weights are replaced
            by methods that gather weights first.
        plan: How to divide and to gather.
    """

    def __init__(self, policy: Any, plan: Plan) -> None:
        from torch.distributed.fsdp import fully_shard

        inner, outer = units_of(policy)
        self._root: Any = _Root(outer)
        ignored = undivided(outer)
        for unit in (*inner, self._root):
            fully_shard(
                unit,
                mesh=plan.mesh,
                reshard_after_forward=True,  # the root, too: outside of a pass, all parameters are parts
                mp_policy=plan.precision,
                offload_policy=plan.offload,
                ignored_params=ignored,
            )
        self._units: list[Any] = [*inner, self._root]
        for unit in self._units:  # these setters are not recursive
            unit.set_custom_all_gather(_AllGather(plan.gather))
            unit.set_custom_reduce_scatter(_SumScatter(plan.scatter))
            # on every unit: the setters of FSDP2 are not recursive, and a unit without them takes means in silence
            unit.set_gradient_divide_factor(1.0)  # losses are normalised by the counts of all ranks
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True, recurse=False)  # ranks may reach other parameters
        self._has_weights = self._is_accompanying = False
        self._reached: set[int] = set()
        with torch.no_grad():
            self._root(lambda: ())  # fixes the root
        self._note_reached()
        self._replace_methods(policy, plan.is_first)

    def scored(self, compute: Callable[[], Any]) -> Any:
        """Return scores from a forward pass that gathers unit after unit."""
        if self._has_weights:
            return compute()
        self._has_weights = True
        try:
            return _joined(self._root(compute))
        except BaseException:
            self._root.reset_iter_state()
            raise
        finally:
            self._has_weights = False

    def accompany(self, loss: Callable[[], Tensor]) -> None:
        """Make a forward and a backward pass only because other ranks make one. The gradient is 0, and does not count."""
        self._is_accompanying = True
        try:
            # the gradient must be 0 and exist, because the reduction of gradients needs every rank
            (0.0 * loss()).backward()
        finally:
            self._is_accompanying = False

    def take_reached(self) -> set[int]:
        """The ids of the parameters that a gradient of this rank has reached since the last call."""
        reached, self._reached = self._reached, set()
        return reached

    def _note_reached(self) -> None:
        """Note which parameters get a gradient: FSDP adds zeros where a rank has none, and other ranks may have one."""
        parts = {name: id(value) for name, value in self._root.named_parameters()}

        def noting(part: int) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                if not self._is_accompanying:
                    self._reached.add(part)

            return note

        # this makes the whole parameters while each of them has its own `requires_grad`, which PEFT switches off at times
        with self.whole():
            for name, value in self._root.named_parameters():
                if value.requires_grad:
                    value.register_post_accumulate_grad_hook(noting(parts[name]))

    def whole(self) -> AbstractContextManager[None]:
        """Inside the block, this rank has all weights. All ranks enter and leave the block together."""
        return self._gathered(self._units)

    def outer(self) -> AbstractContextManager[None]:
        """Inside the block, this rank has the weights around the innermost units. A reader gathers each of these itself."""
        units = {id(unit) for unit in self._units}
        around = [u for u in self._units if any(id(part) in units for part in u.modules() if part is not u)]
        return self._gathered(around)

    @contextmanager
    def _gathered(self, units: Sequence[Any]) -> Iterator[None]:
        if self._has_weights:
            yield
            return
        self._has_weights = True
        saved = [(module, module._state_dict_pre_hooks) for module in self._root.modules()]
        try:
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            for module, _ in saved:  # these hooks would drop the weights when somebody reads a state_dict
                module._state_dict_pre_hooks = OrderedDict()
            yield
        finally:
            self._has_weights = False
            for module, hooks in saved:
                module._state_dict_pre_hooks = hooks
            for unit in units:
                unit.set_reshard_after_forward(True, recurse=False)
                unit.reshard()

    def _replace_methods(self, policy: Any, is_first: bool) -> None:
        samples_itself = getattr(policy, "samples_itself", True)
        around = self.whole if samples_itself else nullcontext
        while_reading = self.outer if getattr(policy, "reads_by_unit", False) else self.whole
        if getattr(policy, "samples_itself", False):
            while_reading = nullcontext  # nothing is copied
        for names, replaced in (
            (SCORING, self._scoring),
            (SAMPLING, lambda method: _inside(around, method)),
            (READING, lambda method: _inside(while_reading, method)),
            (WRITING, lambda method: _inside(self.whole, method if is_first else _nothing)),
        ):
            for name in names:
                method = getattr(policy, name, None)
                if callable(method):
                    setattr(policy, name, replaced(method))

    def _scoring(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def score(*args: Any, **kwargs: Any) -> Any:
            return self.scored(lambda: method(*args, **kwargs))

        return score


class _Root(nn.Module):
    """Contains the modules of a policy, and runs whatever computes with them, so that a policy need not be a module."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.policy = nn.ModuleList(modules)

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns. Scores become a dict, in which FSDP finds the tensors that have a gradient."""
        result = compute()
        if isinstance(result, ActionScores):
            return {field.name: _without_base(getattr(result, field.name)) for field in fields(result)}
        return _without_base(result)


def _without_base(value: Any) -> Any:
    """A copy of a view. FSDP's hook on a view would be lost if somebody changed the view in place."""
    return value.clone() if isinstance(value, Tensor) and value._is_view() else value


def _joined(result: Any) -> Any:
    return ActionScores(**result) if isinstance(result, dict) else result


def _inside(context: Callable[[], Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return call


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What the other ranks do where only the first rank writes."""


class _Buffers:
    """What FSDP asks for memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory for a collective operation."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Buffers):
    """FSDP's all-gather through the engine, whose operations begin with a status and end with an error that names a rank."""

    def __init__(self, gather: Callable[[Tensor, Tensor], Any]) -> None:
        self._gather = gather

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self._gather(output_tensor, input_tensor)


class _SumScatter(_Buffers):
    """FSDP's reduce-scatter through the engine. It adds up, whatever FSDP asks for."""

    def __init__(self, scatter: Callable[[Tensor, Tensor], Any]) -> None:
        self._scatter = scatter

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self._scatter(output_tensor, input_tensor)
