"""A policy that chooses a tool, then the values of the tool's enumerated parameters.

Axes as in `grpo`: B states, G calls per state, N rows, T steps. In addition: K tools, C value texts, F features of a state, D
features of an encoded text.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.inputs import require_type, require_whole
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores, SampledActions

from .choice_tables import ChoiceTables
from .encoders import CachedEncoder, Encoder, HashingEncoder, with_own_feature
from .policy_files import read_policy, write_policy

SIMILARITY_GAIN = 20.0
"""Factor of the weight s in the tool logits of `ToolSelectionPolicy`, where s multiplies the similarity of request and
description. Similarities are small, and without the factor Adam would change s too slowly."""

OWN_FEATURE = 3.0
"""Weight of the text-specific feature of a parameter value. It separates "feet" in `from_unit` from "feet" in `to_unit`."""

UNAVAILABLE = -1e30
"""Log-probs below this threshold belong to unavailable tools."""

ROWS_AT_ONCE = 4
"""Rows are padded to a multiple of this number. On a CPU, a matrix product of 1 to 3 rows sums in another order
than a larger product, and would give slightly different log-probs."""

PROBE = "Convert 12 miles to feet, please."
"""Text that is encoded to check that a loaded policy gets the encoder it was trained with."""


def state_text(state: Any) -> Any:
    """The text of a `ToolTask`, or the state itself (a text or a vector)."""
    return state.text if isinstance(state, ToolTask) else state


def task_slots(state: Any, tool: Tool) -> Mapping[str, Any]:  # noqa: ARG001  # a user's `fill` may use the tool
    """The slot values of a `ToolTask`, for parameters that the tool's schema does not enumerate."""
    return state.slots if isinstance(state, ToolTask) else {}


class ToolSelectionPolicy(nn.Module):
    """A policy that chooses tools by their descriptions, not by their position in a list.

    Let x be the vector of a state, e(.) the vector of a text, and e'(.) the vector of a value text with its own feature
    (`with_own_feature`):

        logit(tool k) = e(name and description of k) . (W h(x) + b + 20 s x)
        logit(value v of a parameter) = e'(v) . (W' h(x) + b' + s' x)

    h is the identity or a network. The terms with s compare a request with a description directly, and exist only if states are
    texts. W, b and s are initialised to 0, so every tool and every value is equally likely at first. No weight belongs to a
    single tool, so the policy generalises to tools that are added later (`add_tools`).

    Steps: the policy decides the tool, then each enumerated parameter (`ParameterChoices`), in the schema's order. The other
    parameters are filled in from the state and are not decisions. Unavailable tools have probability 0 and no gradient.

    Args:
        catalogue: The tools.
        encoder: Frozen text encoder, N texts -> [N, D]. Its vectors are cached.
        num_features: F if states are vectors of length F. None if states are texts.
        hidden: Widths of h's layers, with tanh between them. Empty makes h the identity.
        describe: Maps a state to the text or vector that represents it. The default uses the text of a `ToolTask`.
        fill: Maps (state, tool) to values of the parameters that are not enumerated. The default uses the slots of a
            `ToolTask`. Names that the tool lacks, or that the policy decides, are ignored.
        available: Maps a state to the names of the tools that may be chosen, or to None for all tools. None allows all tools
            in every state.

    Raises:
        ConfigError: `num_features` or a width in `hidden` is below 1.

    Example:
        >>> def add(a: float, b: float) -> float: "Add two numbers."
        >>> def shout(text: str) -> str: "Write a text in capitals."
        >>> policy = ToolSelectionPolicy(ToolCatalogue([Tool.from_function(add), Tool.from_function(shout)]))
        >>> policy.tool_probabilities(["what is two plus two?"])
        tensor([[0.5000, 0.5000]])
    """

    tool_vectors: Tensor
    """Encoded name and description of each tool, [K, D]."""
    value_vectors: Tensor
    """Encoded text of each distinct parameter value, [C, D]."""
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
        fill: Callable[[Any, Tool], Mapping[str, Any]] = task_slots,
        available: Callable[[Any], Collection[str] | None] | None = None,
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
        self._use(catalogue)
        num_text_features = self.tool_vectors.shape[1]
        widths = [num_text_features if num_features is None else num_features, *hidden]
        layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.tool_query = _zero_linear(widths[-1], num_text_features)
        self.value_query = _zero_linear(widths[-1], num_text_features)
        self.similarity = nn.Parameter(torch.zeros(2)) if num_features is None else None

    def add_tools(self, *tools: Tool) -> None:
        """Add tools to the catalogue. The weights do not change, so an optimizer can continue.

        Raises:
            ConfigError: The catalogue already has a tool of that name.
        """
        self._use(self.catalogue.with_tools(*tools))

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

    def get_parameters(self) -> dict[str, Tensor]:
        """The trainable weights by name. No weight belongs to a single tool."""
        return dict(self.named_parameters())

    # Methods for users.

    @torch.no_grad()
    def predict(self, states: Any) -> list[ToolCall]:
        """The most likely tool for each state, with the most likely values of its parameters."""
        tools, values = self._log_probs(states)
        best, rows = tools.argmax(1), torch.arange(len(tools), device=tools.device)
        per_value = self._value_log_probs(values, rows, best)
        chosen = per_value.argmax(2) if per_value.numel() else best.new_zeros(len(best), 0)
        return self._calls(states, rows.tolist(), torch.cat([best.unsqueeze(1), chosen], dim=1).tolist())

    @torch.no_grad()
    def tool_probabilities(self, states: Any) -> Float[Tensor, "B K"]:
        """pi(tool | state), in the catalogue's order."""
        return self._log_probs(states)[0].exp()

    def save(self, folder: str | Path) -> None:
        """Save the weights, the sizes, and the tools' names and schemas. Functions and the encoder are not saved.

        A saved policy in the folder is replaced. If the replacement is interrupted, `load` returns the previous policy or
        raises.
        """
        tools = [
            {"name": t.name, "category": t.category, "description": t.description, "parameters": dict(t.parameters)}
            for t in self.catalogue.values()
        ]
        sizes = {
            "num_features": self.num_features,
            "hidden": self.hidden,
            "num_text_features": self.tool_vectors.shape[1],
        }
        tensors = self.state_dict() | {"encoder_probe": self.encoder([PROBE])}
        write_policy(Path(folder), sizes | {"tools": tools}, tensors)

    @classmethod
    def load(cls, folder: str | Path, catalogue: ToolCatalogue, **options: Any) -> "ToolSelectionPolicy":
        """Load a policy that `save` wrote, for any catalogue.

        Args:
            folder: Folder that was passed to `save`.
            catalogue: Tools to choose from. They may differ from the tools of the saved policy.
            options: Options of the constructor. The encoder must be the encoder that the policy was trained with.

        Raises:
            ConfigError: The folder holds no complete policy, or the encoder differs.
        """
        sizes, weights = read_policy(Path(folder))
        policy = cls(catalogue, num_features=sizes["num_features"], hidden=sizes["hidden"], **options)
        if policy.tool_vectors.shape[1] != sizes["num_text_features"]:
            raise ConfigError(
                f"{folder}: the policy was trained with an encoder of {sizes['num_text_features']} features; "
                f"this encoder has {policy.tool_vectors.shape[1]}. Pass the encoder of the training as encoder=..."
            )
        probe = weights.pop("encoder_probe")
        difference = policy.encoder([PROBE]) - probe
        if float(difference.norm()) > 0.05 * float(
            probe.norm()
        ):  # a change of precision alone makes a smaller difference
            raise ConfigError(
                f"{folder}: the policy was trained with another encoder. "
                f"Pass the encoder of the training as encoder=..."
            )
        try:
            policy.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"{folder}: the weights must have the sizes in policy.json: {error} Save the policy again."
            ) from error
        return policy

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
            "_values": tables.values,
            "_exists": tables.exists,
            "_decides": tables.decides,
        }.items():
            dtype = known.dtype if value.is_floating_point() else value.dtype
            self.register_buffer(name, value.to(known.device, dtype), persistent=False)

    def _vectors(self, states: Any) -> Float[Tensor, "B F"]:
        """The vector x of each state."""
        described = [self.describe(state) for state in states]
        if not described:
            return self.tool_vectors.new_zeros(0, self.num_features or self.tool_vectors.shape[1])
        if self.num_features is None:
            wrong = next((what for what in described if not isinstance(what, str)), None)
            if wrong is not None:
                raise ContractError(
                    f"ToolSelectionPolicy: states must be texts; got {type(wrong).__name__}. "
                    f"Pass num_features=... if states are vectors, or describe=... to convert states to texts."
                )
            return self.encoder(described).to(self.tool_vectors)
        text = next((what for what in described if isinstance(what, str)), None)
        vectors = (
            [] if text is not None else [torch.as_tensor(what, dtype=self.tool_vectors.dtype) for what in described]
        )
        wrong = next((list(vector.shape) for vector in vectors if vector.shape != (self.num_features,)), text)
        if wrong is not None:
            raise ContractError(
                f"ToolSelectionPolicy: states must be vectors of num_features = {self.num_features}; got {wrong!r}."
            )
        return torch.stack(vectors).to(self.tool_vectors.device)

    def _log_probs(self, states: Any) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """log pi(tool | state) and the logits of all values, both at least in float32."""
        vectors = self._vectors(states)
        num_states = len(vectors)
        vectors = nn.functional.pad(vectors, (0, 0, 0, -num_states % ROWS_AT_ONCE))
        hidden = self.body(vectors)
        tool_query, value_query = self.tool_query(hidden), self.value_query(hidden)
        if self.similarity is not None:
            tool_query = tool_query + SIMILARITY_GAIN * self.similarity[0] * vectors
            value_query = value_query + self.similarity[1] * vectors
        logits = _wide(tool_query @ self.tool_vectors.T)[:num_states]
        allowed = self._allowed(states)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        return logits.log_softmax(1), _wide(value_query @ self.value_vectors.T)[:num_states]

    def _allowed(self, states: Any) -> Bool[Tensor, "B K"] | None:
        if self.available is None:
            return None
        rows = []
        for place, state in enumerate(states):
            names = self.available(state)
            row = [True] * len(self.catalogue) if names is None else [name in names for name in self.catalogue]
            if not any(row):
                raise ContractError(
                    f"ToolSelectionPolicy: available(state) must name at least one tool of the catalogue; "
                    f"for state {place} it named {list(names or ())[:9]}."
                )
            rows.append(row)
        return torch.tensor(rows, dtype=torch.bool, device=self.tool_vectors.device).view(-1, len(self.catalogue))

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
        tools = self._tables.tools
        return [
            self._tables.call(taken, self.fill(states[row], tools[taken[0]]))
            for row, taken in zip(rows, steps, strict=True)
        ]


def _zero_linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _wide(logits: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Convert to float32, or keep float64: bfloat16 has only 3 digits, and float16 cannot represent values below -65504."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _entropy(log_probs: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows"]:
    """H = - sum p log p, in nats, exact and differentiable. A choice with probability 0 adds 0."""
    # Without the clamp, at p = 0 a log-prob of almost -inf times a gradient above 1 is -inf, and -inf times p is NaN.
    return -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1000.0))
