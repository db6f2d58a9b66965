"""Estimate of the reward of any call, fitted to logged decisions."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.text.evidence import Evidence
from grpo.arguments import require_each, require_instances
from grpo.errors import ConfigError
from grpo.logs import Estimate, key_of

from .records import ToolSample


class RewardRegression:
    """Logistic regression of the reward on the request and the call. An instance is a function: logs -> estimate.

        q(x, a) = low + (high - low) sigmoid(b + sum over the decisions j of a of z[j])
        z[j]    = x . u[j] + s4 [x contains j]                                                  for a parameter value j
        z[j]    = x . u[j] + x . (V e[j]) + 3 s1 cos(x, e[j]) + s2 named(x, j) + s3 filled(x, j)    for a tool j

    x is the request's vector with a constant appended, e[j] the vector of the tool's name and description, and cos is taken
    after the means over all requests and all tools are subtracted. `named` and `filled` count what the request contains, as in
    `ToolSelectionPolicy`. u, V, b and s1 to s4 are fitted. u gives each decision weights of its own; V and s carry what is
    learned over to tools that were rarely logged. `low` and `high` are the least and the largest logged reward.

    Args:
        catalogue: The tools.
        encoder: Text encoder, N texts -> [N, D], for example `policy.encoder`. None: states are vectors; V and s are left out.
        ridge: Weight of half the squared norm of u, V and s, added to the sum of the losses of all logged decisions. A larger
            value trusts few decisions less.

    Example:
        >>> def add(a: float) -> float: "Add."
        >>> logs = [ToolSample(state=[1.0], tool="add", log_prob=[0.0], reward=r) for r in (0, 1)]
        >>> q = RewardRegression(ToolCatalogue([Tool.from_function(add)]))(logs)
        >>> q([[1.0]], [ToolCall(tool="add")])
        tensor([0.5000])
    """

    def __init__(
        self,
        catalogue: ToolCatalogue,
        encoder: Callable[[Sequence[str]], Tensor] | None = None,
        *,
        ridge: float = 0.03,
    ) -> None:
        require_instances("RewardRegression", ToolCatalogue, "a ToolCatalogue", catalogue=catalogue)
        if not ridge > 0:
            raise ConfigError(f"RewardRegression.ridge must be above 0; got {ridge}.")
        self.catalogue, self.encoder, self.ridge = catalogue, encoder, ridge
        text_of = {
            (name, choice.name, i): text
            for name, of in catalogue.choices.items()
            for choice in of
            for i, text in enumerate(choice.texts)
        }
        self._number: Mapping[tuple[Any, ...], int] = {
            one: i for i, one in enumerate([*((name,) for name in catalogue), *text_of])
        }
        self._evidence = Evidence(catalogue)
        self._place_of_values = [catalogue.value_places[text] for text in text_of.values()]

    def __call__(self, logs: Sequence[ToolSample]) -> Estimate:
        """Fit the regression. Raises ConfigError if `logs` is no list of samples, or empty."""
        logs = require_each("RewardRegression: logs", ToolSample, logs)
        if not logs:
            raise ConfigError("RewardRegression needs logged decisions; got none.")
        states = {state: number for number, state in enumerate(dict.fromkeys(key_of(row.state) for row in logs))}
        made = [self.catalogue.decisions(row.action) for row in logs]
        calls = {call: number for number, call in enumerate(dict.fromkeys(made))}
        rewards = torch.tensor([row.reward for row in logs], dtype=torch.float32)
        low, high = float(rewards.min()), float(rewards.max())
        scaled = (rewards - low) / (high - low) if high > low else torch.zeros_like(rewards)
        cells = torch.tensor([states[key_of(row.state)] for row in logs]), torch.tensor([calls[one] for one in made])
        counts, sums = torch.zeros(2, len(states), len(calls))
        counts.index_put_(cells, torch.ones_like(scaled), accumulate=True)
        sums.index_put_(cells, scaled, accumulate=True)

        vectors = self._vectors(list(states))
        mean = vectors.mean(0)
        model = _Scores(len(mean), self._tool_vectors, len(self._number))
        matrix, features = self._matrix(list(calls)), self._features(list(states), mean)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50, history_size=10, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            logits = model.scores(*features) @ matrix.T + model.bias
            total = (counts * nn.functional.softplus(logits) - sums * logits).sum() + self.ridge / 2 * model.norm()
            total.backward()
            return total

        optimizer.step(loss)

        @torch.no_grad()
        def estimate(states: Sequence[Any], calls: Sequence[ToolCall]) -> Tensor:
            scores = model.scores(*self._features(states, mean))
            matrix = self._matrix([self.catalogue.decisions(call) for call in calls])
            return low + (high - low) * ((scores * matrix).sum(1) + model.bias).sigmoid()

        return estimate

    def _matrix(self, calls: Sequence[tuple[tuple[Any, ...], ...]]) -> Float[Tensor, "A J"]:
        """How much each decision counts in each call: 1 for its tool, `SMALL` for its values, 0 for other decisions."""
        found = torch.zeros(len(calls), len(self._number))
        for row, decisions in enumerate(calls):
            for one in decisions:
                if one in self._number:  # the catalogue may lack the tool
                    found[row, self._number[one]] = 1.0 if len(one) == 1 else SMALL
        return found

    def _features(self, states: Sequence[Any], mean: Float[Tensor, " F"]) -> tuple[Tensor, Tensor]:
        """x with a constant appended, [N, F + 1], and what s1 to s4 weigh, [N, J, 4]."""
        vectors = self._vectors(states)
        shared, num_tools = torch.zeros(len(states), len(self._number), 4), len(self.catalogue)
        if self.encoder is not None:
            tools = nn.functional.normalize(self._tool_vectors - self._tool_vectors.mean(0))
            named, filled, contained = self._evidence(states)
            shared[:, :num_tools, 0] = GAIN * nn.functional.normalize(vectors - mean) @ tools.T
            shared[:, :num_tools, 1], shared[:, :num_tools, 2] = named, filled
            shared[:, num_tools:, 3] = contained[:, self._place_of_values]
        return nn.functional.pad(vectors, (0, 1), value=SMALL), shared

    def _vectors(self, states: Sequence[Any]) -> Float[Tensor, "N F"]:
        texts = [state for state in states if isinstance(state, str)]
        if self.encoder is None and not texts:
            return torch.stack([torch.as_tensor(state, dtype=torch.float32) for state in states])
        if self.encoder is None or len(texts) != len(states):
            raise ConfigError(
                "RewardRegression: states must be texts if there is an encoder, and vectors if there is none. "
                "Pass encoder=policy.encoder, or leave it out."
            )
        return torch.as_tensor(self.encoder(texts)).detach().float().cpu()

    @cached_property
    def _tool_vectors(self) -> Float[Tensor, "K D"]:
        tools = self.catalogue.values()
        return torch.zeros(len(tools), 0) if self.encoder is None else self._vectors([tool.text for tool in tools])


class _Scores(nn.Module):
    """The scores z[j] of all decisions.

    The weights of tool j are u[j] + V e[j]. Their ridge penalty, at the best u and V with these sums, is that of weights with
    the covariance 1[i = j] + e[i] . e[j] between tools: weights = free L', L L' = 1 + E E', with the squared norm of `free`.
    """

    def __init__(self, num_features: int, tool_vectors: Float[Tensor, "K D"], num_decisions: int) -> None:
        super().__init__()
        num_tools = len(tool_vectors)
        self.factor = torch.eye(num_decisions)
        covariance = torch.eye(num_tools) + tool_vectors @ tool_vectors.T
        self.factor[:num_tools, :num_tools] = torch.linalg.cholesky(covariance)
        self.free = nn.Parameter(torch.zeros(num_features + 1, num_decisions))
        self.shared = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(()))

    def scores(self, vectors: Float[Tensor, "N F"], shared: Float[Tensor, "N J 4"]) -> Float[Tensor, "N J"]:
        """z[j] for each row."""
        return vectors @ (self.free @ self.factor.T) + shared @ self.shared

    def norm(self) -> Tensor:
        """Squared norm of u, V and s."""
        return self.free.square().sum() + self.shared.square().sum()


SMALL = 0.3
"""Size of what says little about the right tool: the constant feature of a request, and the values of parameters. The ridge
holds their weights back."""

GAIN = 3.0
"""Factor of the similarity. Cosines are small, and without the factor their weight would be fitted slowly."""
