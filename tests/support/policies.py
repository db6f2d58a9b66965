"""Small hand-made policies, rewards and optimizers that the tests of `grpo` train and watch.

Nothing here is shared with the code under test but its public data classes.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo import ActionScores, SampledActions


class TablePolicy(nn.Module):
    """A softmax over one row of logits per state (strings or ints); actions are ints. One log-prob per row, no more.

    `script` fixes what is "sampled": actions[b][g], the same at every call. `calls` counts the calls of each method,
    and those of scoring by whether a gradient was wanted.
    """

    def __init__(
        self,
        states: Sequence[Any] = ("a", "b"),
        num_actions: int = 2,
        *,
        logits: Any = None,
        script: list[list[int]] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.places = {state: place for place, state in enumerate(states)}
        start = torch.zeros(len(states), num_actions) if logits is None else torch.as_tensor(logits, dtype=dtype)
        self.logits = nn.Parameter(start.to(dtype, copy=True))
        self.script = script
        self.calls: Counter[str] = Counter()

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.calls["generate"] += 1
        if self.script is not None:
            return [list(group) for group in self.script]
        probabilities = self._logits_of(states).softmax(1)
        return torch.multinomial(probabilities, num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.calls["score with gradient" if torch.is_grad_enabled() else "score"] += 1
        chosen = torch.as_tensor(actions, dtype=torch.int64)
        return self._logits_of(states).log_softmax(1)[torch.arange(len(chosen)), chosen]

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _logits_of(self, states: Any) -> Tensor:
        return self.logits[[self.places[state] for state in states]]


class DuckPolicy:
    """A policy that is no `nn.Module`: a dict of tensors and the six methods, with sampling of its own generator."""

    def __init__(self, num_states: int = 2, num_actions: int = 3, seed: int = 0) -> None:
        self.tensors = {"logits": torch.zeros(num_states, num_actions, dtype=torch.float64, requires_grad=True)}
        self.generator = torch.Generator().manual_seed(seed)
        self.mode = "train"

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        probabilities = self.tensors["logits"].detach()[list(states)].softmax(1)
        return torch.multinomial(probabilities, num_actions_per_state, True, generator=self.generator).tolist()

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        rows = self.tensors["logits"][list(states)].log_softmax(1)
        return rows.gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return self.tensors

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"

    def to(self, device: Any) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


class VectorPolicy(nn.Module):
    """A small network over vectors; discrete actions. Lists, tensors and arrays of states go in; `container` comes out."""

    def __init__(
        self,
        width: int = 3,
        num_actions: int = 4,
        *,
        hidden: int = 8,
        dropout: float = 0.0,
        container: str = "list",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, num_actions)
        ).to(dtype)
        self.container = container
        self.dtype = dtype
        self.seen: list[tuple[type, type]] = []
        self.computed_in: list[torch.dtype] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        drawn = torch.multinomial(self._log_softmax(states).exp(), num_actions_per_state, replacement=True)
        return {"list": drawn.tolist, "tensor": lambda: drawn, "array": drawn.numpy}[self.container]()

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.seen.append((type(states), type(actions)))
        chosen = torch.as_tensor(actions, dtype=torch.int64)
        return self._log_softmax(states).gather(1, chosen.unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _log_softmax(self, states: Any) -> Tensor:
        inputs = states if isinstance(states, Tensor) else torch.as_tensor(np.asarray(states), dtype=self.dtype)
        logits = self.net(inputs.to(self.dtype))
        self.computed_in.append(logits.dtype)
        return logits.log_softmax(1)


class SequencePolicy(nn.Module):
    """Writes up to `max_steps` tokens after an int state; token 0 ends a row. A GRU reads what was written.

    A None inside an action is an observation: it takes a place, and is no decision. What stands off the mask is NaN.
    `calls` counts as in `TablePolicy`.
    """

    def __init__(
        self, num_states: int = 4, num_tokens: int = 3, max_steps: int = 4, *, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.max_steps = max_steps
        self.start = nn.Embedding(num_states, 5, dtype=dtype)
        self.embed = nn.Embedding(num_tokens + 2, 4, dtype=dtype)  # tokens, the observation, the beginning
        self.cell = nn.GRU(4, 5, batch_first=True).to(dtype)
        self.head = nn.Linear(5, num_tokens, dtype=dtype)
        self.calls: Counter[str] = Counter()
        self.rows_scored: list[int] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return self._sample(states, num_actions_per_state)[0]

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        scores = self._scores(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0).sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _scores(self, states: Any, actions: Sequence[Sequence[int | None]]) -> ActionScores:
        self.calls["score with gradient" if torch.is_grad_enabled() else "score"] += 1
        self.rows_scored.append(len(actions))
        width = max((len(action) for action in actions), default=0)
        tokens = torch.zeros(len(actions), width, dtype=torch.int64)
        mask = torch.zeros(len(actions), width, dtype=torch.bool)
        for row, action in enumerate(actions):
            for place, token in enumerate(action):
                tokens[row, place] = self.num_tokens if token is None else token
                mask[row, place] = token is not None
        logits = self._logits(list(states), tokens)
        log_softmax = logits.log_softmax(2)
        log_probs = log_softmax.gather(2, tokens.clamp(max=self.num_tokens - 1).unsqueeze(2)).squeeze(2)
        entropy = -(log_softmax.exp() * log_softmax).sum(2)
        nan = torch.full_like(log_probs, float("nan"))
        return ActionScores(
            log_probs=torch.where(mask, log_probs, nan), mask=mask, entropy=torch.where(mask, entropy, nan)
        )

    def _logits(self, states: list[int], tokens: Tensor) -> Tensor:
        beginning = torch.full((len(states), 1), self.num_tokens + 1)
        read = self.embed(torch.cat([beginning, tokens[:, :-1]], 1))
        hidden, _ = self.cell(read, self.start(torch.tensor(states)).unsqueeze(0))
        return self.head(hidden)

    def _sample(self, states: Any, num_actions_per_state: int) -> tuple[list[list[tuple[int, ...]]], Tensor, Tensor]:
        rows = [state for state in states for _ in range(num_actions_per_state)]
        tokens = torch.zeros(len(rows), self.max_steps, dtype=torch.int64)
        log_probs = torch.zeros(len(rows), self.max_steps, dtype=self.head.weight.dtype)
        with torch.no_grad():
            for place in range(self.max_steps):
                now = self._logits(rows, tokens)[:, place].log_softmax(1)
                tokens[:, place] = torch.multinomial(now.exp(), 1).squeeze(1)
                log_probs[:, place] = now[torch.arange(len(rows)), tokens[:, place]]
        ended = (tokens == 0).cumsum(1) - (tokens == 0).long()
        mask = ended == 0
        actions = [tuple(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
        starts = range(0, len(actions), num_actions_per_state)
        return [actions[start : start + num_actions_per_state] for start in starts], mask, log_probs


class RowScoring(SequencePolicy):
    """`ScoresActions`."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        return self._scores(states, actions)


class Changing(RowScoring):
    """Its scores in updates are changed by a function."""

    def __init__(self, change: Callable[[ActionScores], ActionScores]) -> None:
        super().__init__()
        self.change = change

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return self.change(scores) if torch.is_grad_enabled() else scores


class Critic(RowScoring):
    """Also gives a value for each position in a sequence. The values are a view of a parameter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.value = nn.Parameter(torch.zeros(self.max_steps, dtype=self.head.weight.dtype))

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, values=self.value[: scores.mask.shape[1]].expand(scores.mask.shape))


class GroupScoring(RowScoring):
    """`ScoresGroups`: remembers the group sizes it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group_sizes: list[list[int]] = []

    def score_groups(self, states: Any, actions: Any) -> ActionScores:
        self.calls["groups"] += 1
        self.group_sizes.append([len(group) for group in actions])
        rows = [state for state, group in zip(states, actions, strict=True) for _ in group]
        return self._scores(rows, [action for group in actions for action in group])


class ExactSampling(RowScoring):
    """`SamplesWithScores`, exact; with `tells_scores = False` it tells the behaviour log-probs alone."""

    tells_scores = True

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        self.calls["sample"] += 1
        actions, mask, log_probs = self._sample(states, num_actions_per_state)
        scores = ActionScores(log_probs=log_probs, mask=mask) if self.tells_scores else None
        return SampledActions(actions=actions, mask=mask, behaviour_log_probs=log_probs, scores=scores)


class Planning(RowScoring):
    """`PlansMicroBatches`: the parts that `plan` makes of N rows."""

    plan: Callable[[int], list[list[int]]] = staticmethod(lambda num_rows: [list(range(num_rows))])

    def plan_micro_batches(self, states: Any, actions: Any) -> list[Sequence[int]]:
        self.calls["plan"] += 1
        return list(self.plan(len(actions)))


class EpisodePolicy(nn.Module):
    """`SplitsSteps`: an action is an episode (observations [t, 2], moves [t]); a step can be scored on its own."""

    def __init__(self, num_moves: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, num_moves)).double()
        self.rows_scored: list[int] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return [[self._play(state) for _ in range(num_actions_per_state)] for state in states]

    def _play(self, state: float) -> tuple[Tensor, Tensor]:
        length = int(torch.randint(1, 5, ()))
        observations = state + torch.rand(length, 2, dtype=torch.float64)
        return observations, torch.multinomial(self.net(observations).softmax(1), 1).squeeze(1)

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        scores = self.score_actions(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0).sum(1)

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        self.rows_scored.append(len(actions))
        if isinstance(actions, Tensor):
            log_probs = self.log_probs_of(states, actions).unsqueeze(1)
            return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))
        lengths = torch.tensor([len(moves) for _, moves in actions])
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        observations, moves = self.split_steps(states, actions)
        log_probs = torch.zeros(mask.shape, dtype=torch.float64)
        return ActionScores(log_probs=log_probs.masked_scatter(mask, self.log_probs_of(observations, moves)), mask=mask)

    def split_steps(self, states: Any, actions: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([seen for seen, _ in actions]), torch.cat([moves for _, moves in actions])

    def log_probs_of(self, observations: Tensor, moves: Tensor) -> Tensor:
        return self.net(observations).log_softmax(1).gather(1, moves.unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps every gradient it was stepped with, as one vector each."""

    def __init__(self, policy: Any, lr: float = 0.5) -> None:
        super().__init__(list(policy.get_parameters().values()), lr=lr)
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        self.gradients.append(flat([torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]))
        super().step(closure)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries, copied, as one vector."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def weights_of(policy: Any) -> Tensor:
    """All parameters, copied, as one vector."""
    return flat(list(policy.get_parameters().values()))


def gradient_of(policy: Any, loss: Tensor) -> Tensor:
    """By autograd alone: the gradient of `loss`, with nothing left behind."""
    parameters = list(policy.get_parameters().values())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return flat([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])


def digest(*values: Any) -> str:
    """SHA-256 over the exact bytes of tensors and arrays, and the repr of all else, in nested containers."""
    sha = hashlib.sha256()

    def feed(value: Any) -> None:
        sha.update(type(value).__name__.encode())
        if isinstance(value, Tensor):
            sha.update(f"{value.dtype}{list(value.shape)}".encode())
            value = value.to_local() if hasattr(value, "to_local") else value  # the rows of this rank
            sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            sha.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                sha.update(repr(key).encode())
                feed(entry)
        elif isinstance(value, list | tuple):
            for entry in value:
                feed(entry)
        else:
            sha.update(repr(value).encode())

    for value in values:
        feed(value)
    return sha.hexdigest()
