"""A policy that chooses a tool, then the values of the tool's enumerated parameters.

Axes as in `grpo`: B states, G calls per state, N rows, T steps. In addition: K tools, C value texts, F features of a state, D
features of an encoded text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.inputs import require_type, require_whole
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores, SampledActions

from .calibration import best_threshold, offset_of_added
from .choice_tables import ChoiceTables
from .encoders import CachedEncoder, Encoder, HashingEncoder, with_own_feature
from .fill import fill_from_request
from .fill_check import FillCheck
from .saved import load_policy, save_policy
from .states import Available, availability, require_texts, stack_vectors, state_text
from .supervised import fit_to_tasks

SIMILARITY_GAIN = 20.0
"""Factor of the weight s in the tool logits of `ToolSelectionPolicy`, where s multiplies the similarity of request and
description. Similarities are small, and without the factor Adam would change s too slowly."""

OWN_FEATURE = 3.0
"""Weight of the text-specific feature of a parameter value. It separates "feet" in `from_unit` from "feet" in `to_unit`."""

UNAVAILABLE = -1e30
"""Log-probs below this threshold belong to unavailable tools."""

CONFIDENCE_TEMPERATURE = 3.0
"""Temperature of confidences. Training makes probabilities extreme; at this temperature, confidences separate requests without
a right tool better (on BFCL, AUROC 0.94 instead of 0.91). The order of the tools is that of pi."""

ROWS_AT_ONCE = 4
"""Rows are padded to a multiple of this number. On a CPU, a matrix product of 1 to 3 rows sums in another order
than a larger product, and would give slightly different log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A call that a policy proposes."""

    call: ToolCall
    """The tool, with its most likely parameter values."""
    confidence: float
    """Confidence in the tool, from 0 to 1: softmax(logits / 3), where pi(tool | state) is softmax(logits)."""


class ToolSelectionPolicy(nn.Module):
    """A policy that chooses tools by their descriptions, not by their position in a list.

    Let x be the vector of a state, e(.) the vector of a text, and e'(.) the vector of a value text with its own feature
    (`with_own_feature`):

        logit(tool k) = e(text of k) . (W h(x) + b + 20 s x) + c_k
        logit(value v of a parameter) = e'(v) . (W' h(x) + b' + s' x)

    h is the identity or a network. The terms with s compare a request with a description directly, and exist only if states are
    texts. s starts at 1/2, and all other weights at 0: an untrained policy prefers the tool whose text is most similar to the
    request. No weight belongs to a single tool, so the policy generalises to tools that are added later (`add_tools`). c_k is
    not trained. It is 0, except for added tools after `calibrate`.

    Scope: one call per request. The policy decides the tool, then each enumerated parameter (`ParameterChoices`), in the
    schema's order. `fill` gives the other parameters, which are not decisions. Unavailable tools have probability 0 and no
    gradient.

    Args:
        catalogue: The tools.
        encoder: Frozen text encoder, N texts -> [N, D]. Its vectors are cached. None uses a `HashingEncoder`.
        num_features: F if states are vectors of length F. None if states are texts.
        hidden: Widths of h's layers, with tanh between them. Empty makes h the identity.
        describe: Maps a state to the text or vector that represents it. The default uses the text of a `ToolTask`.
        fill: Maps (state, tool) to values of the parameters that are not enumerated. The default reads them from the request.
            Names that the tool lacks, or that the policy decides, are ignored. Equal tools of one state share the values.
        available: Maps a state to the names of the tools that may be chosen, or to None for all tools. None allows all tools
            in every state.

    Raises:
        ConfigError: `num_features` or a width in `hidden` is below 1.

    Example:
        >>> def add(a: float, b: float) -> float: "Add two numbers."
        >>> def shout(text: str) -> str: "Write a text in capitals."
        >>> policy = ToolSelectionPolicy(ToolCatalogue([Tool.from_function(add), Tool.from_function(shout)]))
        >>> policy.tool_probabilities(["write this text loudly", "add two and two"]).argmax(1)
        tensor([1, 0])
    """

    threshold: float = 0.0
    """`predict` calls no tool if the confidence is lower. From 0 to 1; `calibrate_threshold` sets it."""
    tool_vectors: Tensor
    """Encoded text of each tool, [K, D]."""
    value_vectors: Tensor
    """Encoded text of each distinct parameter value, [C, D]."""
    _offsets: Tensor
    _values: Tensor
    _exists: Tensor
    _decides: Tensor

    def __init__(
        self,
        catalogue: ToolCatalogue,
        *,
        encoder: Encoder | None = None,
        num_features: int | None = None,
        hidden: Sequence[int] = (),
        describe: Callable[[Any], Any] = state_text,
        fill: Callable[[Any, Tool], Mapping[str, Any]] = fill_from_request,
        available: Available | None = None,
    ) -> None:
        super().__init__()
        owner = "ToolSelectionPolicy"
        require_type(owner, ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
        require_type(owner, (list, tuple), "a list of widths", hidden=hidden)
        require_whole(owner, **{f"hidden[{i}]": width for i, width in enumerate(hidden)})
        if num_features is not None:
            require_whole(owner, num_features=num_features)
        functions = {"encoder": encoder, "describe": describe, "fill": fill, "available": available}
        given = {name: function for name, function in functions.items() if function is not None}
        require_type(owner, Callable, "a function", **given)  # type: ignore[arg-type]
        self.encoder = CachedEncoder(HashingEncoder() if encoder is None else encoder)
        self.num_features = num_features
        self.hidden = tuple(hidden)
        self.describe, self.fill, self.available = describe, fill, available
        self.added: frozenset[str] = frozenset()
        """Names of the tools that were added since the policy was created or calibrated."""
        self._offset_of: dict[str, float] = {}
        self._fill_check = FillCheck()
        self._use(catalogue)
        num_text_features = self.tool_vectors.shape[1]
        widths = [num_text_features if num_features is None else num_features, *hidden]
        layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.tool_query = _zero_linear(widths[-1], num_text_features)
        self.value_query = _zero_linear(widths[-1], num_text_features)
        self.similarity = nn.Parameter(torch.tensor([0.5, 0.0])) if num_features is None else None

    # Methods of `PolicyModel` and of its optional capabilities.

    @torch.no_grad()
    def sample_actions(
        self, states: Any, num_actions_per_state: int, generator: torch.Generator | None = None
    ) -> SampledActions:
        """Draw G calls per state with their scores. The scores equal the result of `score_actions` on the same calls."""
        tools, values = self._log_probs(states)
        drawn = torch.multinomial(tools.exp(), num_actions_per_state, replacement=True, generator=generator)
        rows = torch.arange(len(drawn), device=drawn.device).repeat_interleave(num_actions_per_state)
        per_value = self._value_log_probs(values, rows, drawn.flatten())
        flat = per_value.exp().flatten(0, 1)
        steps = drawn.view(-1, 1)
        if flat.numel():
            chosen = torch.multinomial(flat, 1, generator=generator).view(len(rows), -1)
            decided = self._decides[steps[:, 0], 1 : 1 + chosen.shape[1]]
            steps = torch.cat([steps, chosen.where(decided, 0)], dim=1)
        scores = self._scores(tools, per_value, rows, steps)
        calls = self._calls(states, rows.tolist(), steps.tolist())
        self._tables.remember(calls, steps)
        groups = [calls[i : i + num_actions_per_state] for i in range(0, len(calls), num_actions_per_state)]
        return SampledActions(actions=groups, mask=scores.mask, behaviour_log_probs=scores.log_probs, scores=scores)

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> list[list[ToolCall]]:
        """Draw G calls per state. Keywords are passed to `sample_actions`."""
        return self.sample_actions(states, num_actions_per_state, **kwargs).actions

    def score_actions(self, states: Any, actions: Sequence[ToolCall]) -> ActionScores:
        """Log-probs and exact entropy per step, [N, T]. T is 1 + the maximum number of decided parameters."""
        return self._score(states, actions, torch.arange(len(actions)))

    def score_groups(self, states: Any, actions: Sequence[Sequence[ToolCall]]) -> ActionScores:
        """Score the calls of all groups, row by row, and encode each state only once."""
        lengths = torch.tensor([len(group) for group in actions], dtype=torch.int64)
        rows = torch.arange(len(states)).repeat_interleave(lengths)
        return self._score(states, [call for group in actions for call in group], rows)

    def get_log_probabilities(self, states: Any, actions: Sequence[ToolCall]) -> Float[Tensor, " N"]:
        """log pi(call | state), summed over the call's steps."""
        return self.score_actions(states, actions).log_probs.sum(1)

    def log_probs_of_parts(
        self, states: Any, rows: Int64[Tensor, " N"], calls: Sequence[ToolCall]
    ) -> Float[Tensor, " N"]:
        """Sum of the log-probs of the decisions that each call determines, where row i belongs to `states[rows[i]]`.

        A required enumerated parameter that a call does not name, or to which it gives another value, is not determined.
        """
        tools, values = self._log_probs(states)
        steps, known = (each.to(tools.device) for each in self._tables.parts_of("ToolSelectionPolicy", calls))
        rows = rows.to(tools.device)
        scores = self._scores(tools, self._value_log_probs(values, rows, steps[:, 0]), rows, steps)
        return scores.log_probs.where(known[:, : scores.log_probs.shape[1]], 0.0).sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        """The trainable weights by name. No weight belongs to a single tool."""
        return dict(self.named_parameters())

    # Methods for users.

    @torch.no_grad()
    def predict(self, states: Any) -> list[ToolCall | None]:
        """The most likely tool for each state, with the most likely values of its parameters.

        None where the confidence is below `threshold`: no tool is to be called.
        """
        best = [found[0] for found in self.predict_top(states, 1)]
        return [one.call if one.confidence >= self.threshold else None for one in best]

    @torch.no_grad()
    def predict_top(self, states: Any, num_tools: int) -> list[list[Prediction]]:
        """The most likely tools for each state, the most likely one first, each with its most likely parameter values.

        Args:
            states: B states.
            num_tools: Number of tools per state. Unavailable tools are left out.
        """
        require_whole("ToolSelectionPolicy.predict_top", num_tools=num_tools)
        tools, values = self._log_probs(states)
        found = _confidences(tools).topk(min(num_tools, tools.shape[1]), dim=1)
        rows = torch.arange(len(tools), device=tools.device).repeat_interleave(found.indices.shape[1])
        per_value = self._value_log_probs(values, rows, found.indices.flatten())
        chosen = per_value.argmax(2) if per_value.numel() else rows.new_zeros(len(rows), 0)
        steps = torch.cat([found.indices.view(-1, 1), chosen], dim=1)
        calls = iter(self._calls(states, rows.tolist(), steps.tolist()))
        ranked = [[(next(calls), p) for p in row] for row in found.values.tolist()]
        return [[Prediction(call=call, confidence=p) for call, p in row if p > 0] for row in ranked]

    @torch.no_grad()
    def tool_probabilities(self, states: Any) -> Float[Tensor, "B K"]:
        """pi(tool | state), in the catalogue's order."""
        return self._log_probs(states)[0].exp()

    def fit(
        self,
        tasks: Sequence[ToolTask],
        *,
        num_epochs: int = 30,
        learning_rate: float = 0.02,
        batch_size: int = 128,
        seed: int = 0,
    ) -> list[float]:
        """Supervised warm start: train on tasks with known right calls. GRPO can continue from there.

        Minimises the mean of -log(sum over the right calls a of pi(a | request)) with Adam. Decisions that a right call does
        not determine, such as an enumerated parameter that the task does not name, are left out. So are tasks without a tool.

        Args:
            tasks: Tasks whose tools the catalogue has.
            num_epochs: Passes over the tasks. More passes fit the tasks better, and overfit a small number of tasks.
            learning_rate: Step size of Adam. Larger values learn faster, and may overshoot.
            batch_size: Tasks per update. Larger batches give fewer updates per epoch.
            seed: Seed of the order of the tasks.

        Returns:
            The mean loss of each epoch, in nats.

        Raises:
            ConfigError: No task has a tool, or a number is out of range.
            ContractError: The catalogue lacks the tool of a right call.
        """
        return fit_to_tasks(
            self, tasks, num_epochs=num_epochs, learning_rate=learning_rate, batch_size=batch_size, seed=seed
        )

    def add_tools(self, *tools: Tool) -> None:
        """Add tools to the catalogue. The weights do not change, so an optimizer can continue.

        A trained policy prefers the tools that it was trained with. Call `calibrate` afterwards.

        Raises:
            ConfigError: The catalogue already has a tool of that name.
        """
        self._use(self.catalogue.with_tools(*tools))
        self.added |= {tool.name for tool in tools}

    def remove_tools(self, *names: str) -> None:
        """Remove tools from the catalogue. The weights do not change.

        Raises:
            ConfigError: The catalogue lacks a tool, or no tool is left.
        """
        unknown = [name for name in names if name not in self.catalogue]
        if unknown:
            raise ConfigError(
                f"ToolSelectionPolicy.remove_tools: the catalogue must have the tools; it lacks {', '.join(unknown)}."
            )
        self._use(self.catalogue.without(*names))
        self.added -= set(names)
        self._set_offsets({name: offset for name, offset in self._offset_of.items() if name not in names})

    @torch.no_grad()
    def calibrate(self, states: Any, *, share: float = 0.05) -> None:
        """Let the added tools compete with the tools that the policy was trained with (`offset_of_added`).

        Raises or lowers the logits of all tools in `added` by one number, such that the given share of known requests goes to
        an added tool.

        Args:
            states: Requests whose right tools are not added tools, such as the training requests. A hundred suffice.
            share: Share of these requests that may go to an added tool, from 0 to 1. A larger share finds the added tools more
                often, and mistakes them for known tools more often.

        Raises:
            ConfigError: There is no state, no added tool or no other tool, or `share` is not from 0 to 1.
        """
        is_added = torch.tensor([name in self.added for name in self.catalogue])
        if len(states) == 0 or not 0 <= share <= 1 or bool(is_added.all()) or not bool(is_added.any()):
            raise ConfigError(
                "ToolSelectionPolicy.calibrate needs states, a share from 0 to 1, and both added and other tools; got "
                f"{len(states)} states, share={share}, {int(is_added.sum())} added and {int((~is_added).sum())} other tools. "
                "Call it after add_tools, with requests of the other tools."
            )
        logits = (self._logits(states)[0] - self._offsets).cpu()
        self._set_offsets(self._offset_of | dict.fromkeys(self.added, offset_of_added(logits, is_added, share)))

    @torch.no_grad()
    def calibrate_threshold(self, states: Any, no_tool_states: Any) -> float:
        """Set `threshold` to the confidence that separates requests best from requests for which no tool is right.

        Args:
            states: Requests for which a tool is right, not those of the training.
            no_tool_states: Requests for which no tool is right.

        Returns:
            The threshold (`best_threshold`).

        Raises:
            ConfigError: One of the two has no state.
        """
        if len(states) == 0 or len(no_tool_states) == 0:
            raise ConfigError(
                "ToolSelectionPolicy.calibrate_threshold needs requests of both kinds; got "
                f"{len(states)} with a right tool and {len(no_tool_states)} without one."
            )
        wanted, unwanted = (_confidences(self._log_probs(each)[0]).amax(1).cpu() for each in (states, no_tool_states))
        self.threshold = best_threshold(wanted, unwanted)
        return self.threshold

    def save(self, folder: str | Path) -> None:
        """Save the policy to one file in the folder: weights, sizes, calibration, names and schemas of the tools.

        What a `FittedEncoder` has fitted is saved too. Functions and other encoders are not saved. A saved policy in the folder
        is replaced. If the replacement is interrupted, the previous policy remains.
        """
        save_policy(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, catalogue: ToolCatalogue, **options: Any) -> "ToolSelectionPolicy":
        """Load a policy that `save` wrote, for any catalogue.

        Args:
            folder: Folder that was passed to `save`.
            catalogue: Tools to choose from. Tools that the saved policy lacks count as added (`calibrate`).
            options: Options of the constructor. The encoder must be the encoder that the policy was trained with. A
                `FittedEncoder` need not be fitted again.

        Raises:
            ConfigError: The folder holds no complete policy, or the encoder differs.
        """
        return load_policy(cls, Path(folder), catalogue, options)

    def get_extra_state(self) -> dict[str, Any]:
        """What is part of `state_dict` beside the weights: the calibration."""
        return {"threshold": self.threshold, "added": sorted(self.added), "offsets": dict(self._offset_of)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned. Offsets of tools that the catalogue lacks are ignored."""
        self.threshold = state["threshold"]
        self.added = frozenset(state["added"]) & set(self.catalogue)
        self._set_offsets({name: offset for name, offset in state["offsets"].items() if name in self.catalogue})

    # Internals.

    def _use(self, catalogue: ToolCatalogue) -> None:
        """Encode a catalogue on the policy's device, in the policy's precision."""
        self.catalogue = catalogue
        self._tables = tables = ChoiceTables(catalogue)
        known = next(self.buffers(), torch.zeros(()))  # the current tools' vectors
        tool_vectors = self.encoder(tables.tool_texts)
        value_vectors = tool_vectors[:0]
        if tables.value_texts:
            value_vectors = with_own_feature(tables.value_texts, self.encoder(tables.value_texts), OWN_FEATURE)
        for name, value in {
            "tool_vectors": tool_vectors,
            "value_vectors": value_vectors,
            "_offsets": torch.tensor([self._offset_of.get(name, 0.0) for name in catalogue]),
            "_values": tables.values,
            "_exists": tables.exists,
            "_decides": tables.decides,
        }.items():
            dtype = known.dtype if value.is_floating_point() else value.dtype
            self.register_buffer(name, value.to(known.device, dtype), persistent=False)

    def _set_offsets(self, offsets: dict[str, float]) -> None:
        """Set c_k of the named tools, and 0 for all others."""
        self._offset_of = offsets
        self._offsets.copy_(torch.tensor([offsets.get(name, 0.0) for name in self.catalogue]))

    def _vectors(self, states: Any) -> Float[Tensor, "B F"]:
        """The vector x of each state."""
        described = [self.describe(state) for state in states]
        if self.num_features is not None:
            return stack_vectors(described, self.num_features, self.tool_vectors)
        return self.encoder(require_texts(described)).to(self.tool_vectors)

    def _logits(self, states: Any) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """Logits of all tools, whether they are available or not, and of all values, both at least in float32."""
        vectors = self._vectors(states)
        num_states = len(vectors)
        vectors = nn.functional.pad(vectors, (0, 0, 0, -num_states % ROWS_AT_ONCE))
        hidden = self.body(vectors)
        tool_query, value_query = self.tool_query(hidden), self.value_query(hidden)
        if self.similarity is not None:
            tool_query = tool_query + SIMILARITY_GAIN * self.similarity[0] * vectors
            value_query = value_query + self.similarity[1] * vectors
        tools = _wide(tool_query @ self.tool_vectors.T) + self._offsets
        return tools[:num_states], _wide(value_query @ self.value_vectors.T)[:num_states]

    def _log_probs(self, states: Any) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """log pi(tool | state), and the logits of all values."""
        tools, values = self._logits(states)
        if self.available is not None:
            allowed = availability(self.available, states, self.catalogue).to(tools.device)
            tools = tools.masked_fill(~allowed, torch.finfo(tools.dtype).min)
        return tools.log_softmax(1), values

    def _value_log_probs(
        self, logits: Float[Tensor, "B C"], rows: Int64[Tensor, " N"], tools: Int64[Tensor, " N"]
    ) -> Float[Tensor, "N J V"]:
        """log pi(value | state, tool) for each parameter of each row's tool, and almost -inf at padding."""
        exists = self._exists[tools]
        width = int(self._decides[tools].sum(1).max()) - 1 if len(tools) else 0
        places, exists = self._values[tools][:, :width], exists[:, :width]
        found = logits[rows.view(-1, 1, 1), places]
        return found.masked_fill(~exists, torch.finfo(found.dtype).min).log_softmax(2)

    def _scores(
        self,
        tools: Float[Tensor, "B K"],
        per_value: Float[Tensor, "N J V"],
        rows: Int64[Tensor, " N"],
        steps: Int64[Tensor, "N T"],
    ) -> ActionScores:
        mask = self._decides[steps[:, 0]][:, : 1 + per_value.shape[1]]
        steps = steps[:, : mask.shape[1]]
        first = tools[rows, steps[:, 0]].unsqueeze(1)
        entropy = _entropy(tools)[rows].unsqueeze(1)
        if per_value.shape[1]:
            later = per_value.gather(2, steps[:, 1:].unsqueeze(2)).squeeze(2).where(mask[:, 1:], 0.0)
            first = torch.cat([first, later], dim=1)
            entropy = torch.cat([entropy, _entropy(per_value).where(mask[:, 1:], 0.0)], dim=1)
        return ActionScores(log_probs=first, mask=mask, entropy=entropy)

    def _score(self, states: Any, calls: Sequence[ToolCall], rows: Int64[Tensor, " N"]) -> ActionScores:
        tools, values = self._log_probs(states)
        device = tools.device
        steps = self._tables.steps_of("ToolSelectionPolicy", calls).to(device)
        rows = rows.to(device)
        scores = self._scores(tools, self._value_log_probs(values, rows, steps[:, 0]), rows, steps)
        if self.available is not None:
            unavailable = (scores.log_probs[:, 0] < UNAVAILABLE).nonzero().flatten().tolist()
            if unavailable:
                row = unavailable[0]
                raise ContractError(
                    f"ToolSelectionPolicy: {calls[row].tool} must be available in the state of row {row} to be scored, but "
                    f"available(state) does not name it. Let available(state) name the same tools on every call."
                )
        return scores

    def _calls(self, states: Any, rows: Sequence[int], steps: Sequence[Sequence[int]]) -> list[ToolCall]:
        calls = []
        filled: dict[tuple[int, int], Mapping[str, Any]] = {}  # the calls of a group often agree
        for row, taken in zip(rows, steps, strict=True):
            tool, key = self._tables.tools[taken[0]], (row, taken[0])
            if key not in filled:
                filled[key] = self.fill(states[row], tool)
            given = filled[key]
            calls.append(self._tables.call(taken, given))
            for name in self._tables.to_fill[taken[0]]:
                self._fill_check(tool.name, name, name in given)
        return calls


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _confidences(log_probs: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    return (log_probs / CONFIDENCE_TEMPERATURE).softmax(1)


def _wide(logits: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Convert to float32, or keep float64: bfloat16 has only 3 digits, and float16 cannot represent values below -65504."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _entropy(log_probs: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows"]:
    """H = - sum p log p, in nats, exact and differentiable. A choice with probability 0 adds 0."""
    # Without the clamp, at p = 0 a log-prob of almost -inf times a gradient above 1 is -inf, and -inf times p is NaN.
    return -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1000.0))
