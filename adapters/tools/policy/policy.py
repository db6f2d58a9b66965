"""A policy that chooses a tool, then the values of the tool's enumerated parameters. Axes: see `distribution.py`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.tasks import ToolTask
from adapters.tools.text.encoders import CachedEncoder, Encoder, HashingEncoder
from adapters.tools.text.fill import fill_from_request
from grpo.arguments import (
    as_tensor,
    require_each,
    require_instances,
    require_integers,
    require_numbers,
    require_rows,
    require_widths,
)
from grpo.errors import ConfigError, ContractError, warn_user
from grpo.types import ActionScores, SampledActions

from .distribution import CallDistribution, Prediction, ToolNetwork, offset_of_added
from .fitting import Descent, FitReport, fit, fit_to_rewards
from .menu import Fill, Menu
from .saved import SavedPolicy, save_policy
from .threshold import confirmed_threshold


def state_text(state: Any) -> Any:
    """The text of a `ToolTask`, or the state itself (a text or a vector)."""
    return state.text if isinstance(state, ToolTask) else state


class ToolSelectionPolicy(nn.Module):
    """A policy that chooses tools by their descriptions, not by their position in a list.

    Let x be the vector of a state, e(.) that of a text, and e'(.) that of a value with its own feature (`with_own_feature`):

        logit(tool k) = e(text of k) . (W h(x) + b + 20 s x) + 4 t1 named(x, k) + 4 t2 filled(x, k) + c_k
        logit(value v of a parameter) = e'(v) . (W' h(x) + b' + s' x) + 4 [x contains v]

    h is the identity or a network. The terms with s, s', t1 and t2, and the bonus of 4, exist only if states are texts. s and
    s' weigh the similarity of the request to a description. named(x, k) is the number of tool k's enumerated values that x
    contains. filled(x, k) says how well the numbers, dates and texts in x match k's other parameters (`Evidence` has its
    formula). s and t1 start at 1/2, t2 at 0.15, and all other weights at 0: an untrained policy prefers a tool that is similar
    to the request and whose parameters match it. No weight belongs to a single tool, so the policy generalises to added tools.
    c_k is 0, except for added tools after `calibrate`.

    Scope: one call per request. The policy decides the tool, then each enumerated parameter (`ParameterChoices`), in the
    schema's order. `fill` gives the other parameters. Unavailable tools have probability 0 and no gradient.

    Args:
        catalogue: The tools.
        encoder: Frozen text encoder, N texts -> [N, D]. Its vectors are scaled to length 1, and cached. None: `HashingEncoder`.
        num_features: F if states are vectors of length F. None if states are texts.
        hidden: Widths of h's layers, with tanh between them. Empty makes h the identity.
        describe: Maps a state to the text or vector that represents it. The default uses the text of a `ToolTask`.
        fill: Maps (state, tool) to values of the parameters that are not enumerated. The default reads them from the request.
            Names that the tool lacks, or that the policy decides, are ignored. Equal tools of one state share the values.
        available: Maps a state to the names of the tools that may be chosen, or to None for all tools. None allows all tools.

    Raises:
        ConfigError: An argument has another type, or `num_features` or a width in `hidden` is below 1.
    """

    threshold: float = 0.0
    """`predict` calls no tool if the confidence is lower. From 0 to 1; `calibrate_threshold` sets it. Set it last: training and
    other tools change confidences."""

    def __init__(
        self,
        catalogue: ToolCatalogue,
        *,
        encoder: Encoder | None = None,
        num_features: int | None = None,
        hidden: Sequence[int] = (),
        describe: Callable[[Any], Any] = state_text,
        fill: Fill = fill_from_request,
        available: Callable[[Any], Collection[str] | None] | None = None,
    ) -> None:
        super().__init__()
        owner = "ToolSelectionPolicy"
        require_instances(owner, ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
        require_integers(owner, 1, optional=True, num_features=num_features)
        require_widths(owner, hidden)
        functions: Any = (Callable, NoneType)
        require_instances(
            owner, functions, "a function", encoder=encoder, describe=describe, fill=fill, available=available
        )
        self.encoder = CachedEncoder(HashingEncoder() if encoder is None else encoder)
        self.num_features, self.hidden = num_features, tuple(hidden)
        self.describe, self.fill, self.available = describe, fill, available
        self.menu = Menu(catalogue, self.encoder)
        self.network = ToolNetwork(num_features, self.menu.tool_vectors.shape[1], hidden)

    @property
    def catalogue(self) -> ToolCatalogue:
        """The tools that the policy chooses from."""
        return self.menu.catalogue

    @torch.no_grad()
    def sample_actions(
        self, states: Any, num_actions_per_state: int, generator: torch.Generator | None = None
    ) -> SampledActions:
        """Draw G calls per state with their scores. The scores equal the result of `score_actions` on the same calls."""
        distribution = self.distribution(states)
        rows, steps = distribution.draw(num_actions_per_state, generator)
        scores = distribution.score(rows, steps)
        calls = self.menu.calls(self.fill, states, rows, steps)
        return SampledActions(actions=calls, mask=scores.mask, behaviour_log_probs=scores.log_probs, scores=scores)

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> list[list[ToolCall]]:
        """Draw G calls per state. Keywords are passed to `sample_actions`."""
        return self.sample_actions(states, num_actions_per_state, **kwargs).actions

    def score_actions(self, states: Any, actions: Sequence[ToolCall]) -> ActionScores:
        """Log-probs and exact entropy per step, [N, T]. T is 1 + the maximum number of decided parameters."""
        return self.score_groups(states, [[call] for call in actions])

    def score_groups(self, states: Any, actions: Sequence[Sequence[ToolCall]]) -> ActionScores:
        """Score the calls of all groups, row by row, and encode each state only once."""
        lengths = torch.tensor([len(group) for group in actions], dtype=torch.int64)
        rows = torch.arange(len(states)).repeat_interleave(lengths)
        calls = [call for group in actions for call in group]
        scores = self.distribution(states).score(rows, self.menu.steps_of(calls))
        if unavailable := (scores.log_probs[:, 0] < -1e30).nonzero().flatten().tolist():
            wrong = f"{calls[unavailable[0]].tool} must be available in the state of row {unavailable[0]} to be scored"
            raise ContractError(f"ToolSelectionPolicy: {wrong}. Let available(state) name the same tools each time.")
        return scores

    def get_log_probabilities(self, states: Any, actions: Sequence[ToolCall]) -> Float[Tensor, " N"]:
        """log pi(call | state), summed over the call's steps."""
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        """The trainable weights by name. No weight belongs to a single tool."""
        return dict(self.named_parameters())

    @torch.no_grad()
    def predict(self, states: Any) -> list[ToolCall | None]:
        """The most likely call for each state. None: the confidence is below `threshold`, so no tool is to be called."""
        return [one.call if one.confidence >= self.threshold else None for [one] in self.predict_top(states, 1)]

    @torch.no_grad()
    def predict_top(self, states: Any, num_tools: int) -> list[list[Prediction]]:
        """The `num_tools` most likely tools for each state, the most likely one first. Unavailable tools are left out."""
        require_integers("ToolSelectionPolicy.predict_top", 1, num_tools=num_tools)
        (rows, steps), confidences = self.distribution(states).best(min(num_tools, len(self.catalogue)))
        calls = self.menu.calls(self.fill, states, rows, steps)
        found: list[list[Prediction]] = []
        for group, row in zip(calls, confidences.tolist(), strict=True):
            found.append([Prediction(call=call, confidence=p) for call, p in zip(group, row, strict=True) if p > 0])
        return found

    @torch.no_grad()
    def tool_probabilities(self, states: Any) -> Float[Tensor, "B K"]:
        """pi(tool | state), in the catalogue's order."""
        return self.distribution(states).tools.exp()

    def fit(
        self,
        tasks: Sequence[ToolTask],
        *,
        num_epochs: int = 30,
        learning_rate: float = 0.02,
        batch_size: int = 128,
        seed: int = 0,
        num_folds: int = 5,
    ) -> FitReport:
        """Supervised warm start: train on tasks with known right calls. GRPO can continue from there.

        Minimises `loss` with Adam, and keeps a share m of the way: start + m (trained - start). Few requests can be fitted in
        many ways, most of which are wrong for other requests. So cross-validation chooses m: the policy is trained without each
        fold in turn. m is 1 if the trained weights then have clearly more right tools on the folds that were left out (two
        standard errors), and otherwise the m with the lowest loss there. m = 0 is a candidate. A warning says so if the policy
        stays as it is, or if the estimate of its accuracy falls.

        Tasks without a tool are left out, and so are choices that a right call does not name. Training chooses among the tools
        that tasks ask for. It does not learn to avoid the others, but prefers its own, so a warning names the others.

        Args:
            tasks: Tasks whose tools the catalogue has, at least two different texts. A few per tool: with one per tool, no
                held-out task has an example of its own tool.
            num_epochs: Passes over the tasks.
            learning_rate: Step size of Adam. Larger values learn faster, and may overshoot.
            batch_size: Tasks per update. Larger batches give fewer updates.
            seed: Seed of the order of the tasks, and of the folds.
            num_folds: Number of folds. More: better estimates, and one more training each. 1: keep all that is learned, without
                an estimate.

        Returns:
            The losses, m, and the estimated accuracy on held-out requests before and after. `print` shows them.

        Raises:
            ConfigError: `tasks` is no list of tasks, no task has a tool, or a number is out of range.
            ContractError: The catalogue lacks the tool of a right call, or one of its values is not among the enumerated ones.
        """
        owner = "ToolSelectionPolicy.fit"
        require_integers(owner, 1, num_epochs=num_epochs, batch_size=batch_size, num_folds=num_folds)
        require_numbers(owner, learning_rate=learning_rate)
        if learning_rate <= 0:
            raise ConfigError(f"{owner}: learning_rate must be above 0; got {learning_rate:g}.")
        tasks = require_each(f"{owner}: tasks", ToolTask, tasks)
        with_tool = [task for task in tasks if task.tool is not None]
        if not with_tool:
            raise ConfigError("ToolSelectionPolicy.fit needs tasks with a right tool; got none.")
        self._warn_of_threshold("fit")
        self._warn_of_equal_tools("fit")
        descent = Descent(num_epochs=num_epochs, learning_rate=learning_rate, batch_size=batch_size, seed=seed)
        return fit(self, with_tool, descent, num_folds)

    def fit_to_rewards(
        self,
        requests: Sequence[Any],
        train: Callable[[Sequence[Any]], Any],
        reward_model: Any,
        *,
        held_out: Sequence[Any] | None = None,
        num_folds: int = 5,
        num_calls: int = 32,
        seed: int = 0,
    ) -> FitReport:
        """Train from rewards, and keep a share of the way to the trained weights, as `fit` does.

        GRPO by itself can earn every reward of a few training requests, and be worse on other requests than before. Here the
        policy is trained without each fold in turn. The share m has the lowest mean of -log(mean reward) on the folds that were
        left out, where the mean reward is that of calls drawn from the policy. Then the policy is trained on all requests, and
        its weights become start + m (trained - start). m = 0 is a candidate. A warning says so if the policy stays as it is, or
        if the estimate of its mean reward falls.

        With `held_out`, there is one training, and these requests choose m. It costs a sixth, and does not learn from them.

        Args:
            requests: Texts, tasks or other states, with at least two different texts. A few per tool.
            train: Trains this policy on some of the requests: `requests -> anything`. It makes a new trainer each time.
            reward_model: The trainer's: a `RewardModel`, or a plain `(requests, calls) -> rewards`, with rewards from 0 to 1.
            held_out: Requests to measure with, none of which is in `requests`. None: the folds.
            num_folds: Number of folds without `held_out`, from 2 on. More: better estimates, and one more training each.
            num_calls: Calls of each held-out request that are rewarded, for each of 12 shares. More: better estimates.
            seed: Seed of the folds, and of the calls that are rewarded.

        Returns:
            m, and the estimated mean reward on held-out requests before and after. `print` shows them.

        Raises:
            ConfigError: There are fewer than two different requests, a request is in `held_out` and in `requests`, a number is
                out of range, `train` is no function, or a reward is not from 0 to 1.
        """
        owner = "ToolSelectionPolicy.fit_to_rewards"
        require_rows(f"{owner}: requests", requests)
        if held_out is not None:
            require_rows(f"{owner}: held_out", held_out)
        functions: Any = Callable
        require_instances(owner, functions, "a function that trains the policy on requests", train=train)
        require_integers(owner, 1, num_calls=num_calls)
        self._warn_of_threshold("fit_to_rewards")
        self._warn_of_equal_tools("fit_to_rewards")
        how: dict[str, Any] = {"held_out": held_out, "num_folds": num_folds, "num_calls": num_calls, "seed": seed}
        return fit_to_rewards(self, requests, train, reward_model, **how)

    def loss(self, tasks: Sequence[ToolTask], *, among: Collection[str] | None = None) -> Float[Tensor, ""]:
        """Mean over tasks with a tool of -log(sum over the right calls of pi(call | request)), in nats.

        Args:
            tasks: Tasks with a tool.
            among: The tools that pi chooses from. None: all.
        """
        return -self.right_log_probs(tasks, among=among).mean()

    def right_log_probs(
        self, tasks: Sequence[ToolTask], *, among: Collection[str] | None = None
    ) -> Float[Tensor, " N"]:
        """log(sum over the right calls of pi(call | request)) of each task. The arguments are those of `loss`."""
        answers = [(row, call) for row, task in enumerate(tasks) for call in task.right_calls if call is not None]
        rows = torch.tensor([row for row, _ in answers], device=self.menu.values.device)
        steps = self.menu.steps_of([call for _, call in answers], partial=True)
        log_probs = self.distribution(tasks, among).score(rows, steps).log_probs.sum(1)
        # logsumexp over the right calls of each task
        lowest = log_probs.new_full((len(tasks),), -torch.inf)
        largest = lowest.scatter_reduce(0, rows, log_probs.detach(), "amax")
        sums = torch.zeros_like(largest).index_add(0, rows, (log_probs - largest[rows]).exp())
        return largest + sums.log()

    def add_tools(self, *tools: Tool) -> None:
        """Add tools to the catalogue. The weights do not change. Call `calibrate` if the policy prefers the trained tools.

        Raises:
            ConfigError: The catalogue already has a tool of that name.
        """
        self._warn_of_threshold("add_tools")
        self.menu.use(self.catalogue.with_tools(*tools))
        self.menu.set_offsets(self.menu.offset_of | {tool.name: 0.0 for tool in tools})

    def remove_tools(self, *names: str) -> None:
        """Remove tools from the catalogue. The weights do not change.

        Raises:
            ConfigError: The catalogue lacks a tool, or no tool is left.
        """
        require_each("ToolSelectionPolicy.remove_tools: names", str, names)
        if unknown := [name for name in names if name not in self.catalogue]:
            raise ConfigError(f"ToolSelectionPolicy.remove_tools: the catalogue lacks {', '.join(unknown)}.")
        self._warn_of_threshold("remove_tools")
        self.menu.use(self.catalogue.without(*names))

    @torch.no_grad()
    def calibrate(self, states: Any, *, share: float = 0.05) -> None:
        """Change the logits of all added tools by one number, so that they compete with the tools of the training.

        Args:
            states: Requests whose right tools are not added tools. A hundred suffice. If the policy was trained on them, it is
                surer of them than of others, and a larger share of the others goes to added tools.
            share: Share of these requests that may go to an added tool. A larger share also finds more of the added tools.

        Raises:
            ConfigError: There is no state, no added tool or no other tool, or `share` is not from 0 to 1.
        """
        self._warn_of_threshold("calibrate")
        is_added = torch.tensor([name in self.menu.offset_of for name in self.catalogue])
        offset = offset_of_added(self._logits(states)[0].cpu(), is_added, share)
        self.menu.set_offsets(dict.fromkeys(self.menu.offset_of, offset))

    @torch.no_grad()
    def calibrate_threshold(self, states: Any, no_tool_states: Any) -> float:
        """Set `threshold` to the confidence that separates requests best from requests without a right tool, and return it.

        Thresholds chosen without a fifth of the requests are tried on that fifth. If their balanced accuracy is not clearly
        better than that of the present threshold (two standard errors), the present one stays, and a warning says about how
        many requests of each kind would tell.

        Args:
            states: Requests for which a tool is right, not those of the training.
            no_tool_states: Requests for which no tool is right.

        Raises:
            ConfigError: One of the two has no state.
        """
        wanted, unwanted = (self.distribution(each).confidences.amax(1).cpu() for each in (states, no_tool_states))
        self.threshold = confirmed_threshold(wanted, unwanted, self.threshold)
        return self.threshold

    def _warn_of_threshold(self, what: str) -> None:
        """Warn that a call changes the confidences with which the threshold is compared."""
        if self.threshold > 0:
            warn_user(
                f"ToolSelectionPolicy.{what} changes the confidences, and threshold={self.threshold:g} was chosen before. Call "
                "calibrate_threshold again afterwards, or set threshold = 0 first."
            )

    def _warn_of_equal_tools(self, what: str) -> None:
        """Warn of tools with equal vectors, because more requests would not help to choose the right one."""
        same: dict[tuple[float, ...], list[str]] = {}
        for name, vector in zip(self.catalogue, self.menu.tool_vectors.tolist(), strict=True):
            same.setdefault(tuple(vector), []).append(name)
        if equal := [names for names in same.values() if len(names) > 1]:
            warn_user(
                f"ToolSelectionPolicy.{what}: {' and '.join(equal[0])} have equal vectors, so only the values in a request "
                "can tell them apart. Describe how they differ, in words that the encoder does not take for the same."
            )

    def save(self, folder: str | Path) -> None:
        """Save the policy to one file in the folder: weights, sizes, calibration, and names of the tools.

        What a `FittedEncoder` has fitted is saved too. Functions and other encoders are not saved. A saved policy in the folder
        is replaced. If the replacement is interrupted, the previous policy remains.
        """
        sizes = {"num_features": self.num_features, "hidden": self.hidden}
        save_policy(Path(folder), self.state_dict(), sizes, self.catalogue, self.encoder)

    @classmethod
    def load(cls, folder: str | Path, catalogue: ToolCatalogue, **options: Any) -> "ToolSelectionPolicy":
        """Load a policy that `save` wrote, for any catalogue.

        Args:
            folder: Folder that was passed to `save`.
            catalogue: Tools to choose from. Tools that the saved policy lacks count as added (`calibrate`).
            options: Options of the constructor, with the encoder of the training. A `FittedEncoder` need not be fitted again.

        Raises:
            ConfigError: The folder holds no complete policy, or the encoder differs.
        """
        saved = SavedPolicy.read(Path(folder))
        policy = cls(catalogue, **saved.sizes, **saved.with_fitted(options))
        saved.require_same_encoder(policy.encoder, Path(folder))
        policy.load_state_dict(saved.state)
        policy.menu.set_offsets(dict.fromkeys(set(catalogue) - set(saved.tools), 0.0) | policy.menu.offset_of)
        return policy

    def get_extra_state(self) -> dict[str, Any]:
        """The calibration, which is part of `state_dict`."""
        return {"threshold": self.threshold, "offsets": self.menu.offset_of}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned. Offsets of tools that the catalogue lacks are ignored."""
        self.threshold = state["threshold"]
        self.menu.set_offsets(state["offsets"])

    def distribution(self, states: Any, among: Collection[str] | None = None) -> CallDistribution:
        """pi(call | state) for each state, with a choice among these tools, or among all."""
        tools, values = self._logits(states)
        tools = tools + self.menu.offsets
        if among is not None:
            is_left_out = torch.tensor([name not in among for name in self.catalogue], device=tools.device)
            tools = tools.masked_fill(is_left_out, torch.finfo(tools.dtype).min)
        if self.available is not None and len(states):
            named = [self.available(state) for state in states]
            if any(isinstance(of, str) for of in named):
                raise ContractError(
                    "ToolSelectionPolicy: available(state) must return a list of names, or None; got a text."
                )
            allowed = torch.tensor([[of is None or name in of for name in self.catalogue] for of in named])
            if nowhere := (~allowed.any(1)).nonzero().flatten().tolist():
                raise ContractError(
                    "ToolSelectionPolicy: available(state) must name at least one tool of the catalogue; for state "
                    f"{nowhere[0]} it named {list(named[nowhere[0]] or ())[:9]}."
                )
            tools = tools.masked_fill(~allowed.to(tools.device), torch.finfo(tools.dtype).min)
        return CallDistribution(tools=tools.log_softmax(1), values=values, places=self.menu.values)

    def _logits(self, states: Any) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """Logits of all tools, available or not and without the offsets c_k, and of all values."""
        require_rows("ToolSelectionPolicy: states", states)
        described = [self.describe(state) for state in states]
        like, num_features = self.menu.tool_vectors, self.num_features
        for what in described:
            if not (isinstance(what, str) if num_features is None else np.shape(what) == (num_features,)):
                raise ContractError(
                    f"ToolSelectionPolicy: states must be texts, or vectors of num_features numbers; got {what!r:.100} with "
                    f"num_features={num_features}. Pass num_features=..., or describe=... to convert states to texts."
                )
        if num_features is None:
            vectors, evidence = self.encoder(described), self.menu.evidence(described)
        else:
            required = "ToolSelectionPolicy: states must be vectors of numbers"
            vectors, evidence = as_tensor(required, described).to(like.dtype).view(-1, num_features), None
            if not bool(vectors.isfinite().all()):
                raise ContractError("ToolSelectionPolicy: states must be finite vectors; got NaN or infinity.")
        return self.network.forward(vectors.to(like), like, self.menu.value_vectors, evidence)
