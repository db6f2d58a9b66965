"""A small task of writing sequences: count on from a symbol, for so many symbols, then stop.

A state is (first, count); of four symbols, (2, 3) is answered by 2 3 0 and the end token. Right answers are 2 to 7 steps long,
what an untrained policy writes 1 to 8. Axis letters as in `grpo`: B states, G answers per state, N rows, T steps (8 here).
"""

from typing import Any

import torch
from torch import Tensor, nn

from grpo import ActionScores, SampledActions

NUM_SYMBOLS = 4
END = NUM_SYMBOLS
BEGINNING = NUM_SYMBOLS + 1
LONGEST_COUNT = 6
MAX_STEPS = 8


def all_states(longest_count: int = LONGEST_COUNT) -> Tensor:
    """Every (first, count) with 1 <= count <= `longest_count`, [B, 2]."""
    return torch.cartesian_prod(torch.arange(NUM_SYMBOLS), torch.arange(1, longest_count + 1))


def right_answers(states: Tensor) -> Tensor:
    """[N, T]: the symbols, then the end token, which fills the row."""
    first, count = states.unsqueeze(2).unbind(1)
    place = torch.arange(MAX_STEPS)
    return torch.where(place < count, (first + place) % NUM_SYMBOLS, END)


def written_steps(answers: Tensor) -> Tensor:
    """[N, T]: up to the first end token and with it; what stands behind was never decided."""
    ended = answers == END
    return (ended.cumsum(1) - ended.long()) == 0


def fraction_right(states: Tensor, answers: Tensor) -> Tensor:
    """[N] in [0, 1]: steps that are right, of as many as the longer of the right and the written answer has."""
    right, written = right_answers(states), written_steps(answers)
    needed = written_steps(right)
    return ((answers == right) & written & needed).sum(1) / (written | needed).sum(1)


def exactly_right(states: Tensor, answers: Tensor) -> Tensor:
    """[N]: 1 where every step is right, the end included, else 0."""
    return (answers == right_answers(states)).all(1).double()


class Writer(nn.Module):
    """A GRU that begins from the state and reads what it has written.

    It has every capability that sequences have a use for: ragged steps with an exact entropy (`ScoresActions`), the state's
    embedding once per group (`ScoresGroups`), and scores that fall out of the sampling (`SamplesWithScores`).
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first = nn.Embedding(NUM_SYMBOLS, hidden)
        self.count = nn.Embedding(LONGEST_COUNT + 1, hidden)
        self.token = nn.Embedding(NUM_SYMBOLS + 2, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, NUM_SYMBOLS + 1)

    def score_groups(self, states: Tensor, actions: Any) -> ActionScores:
        """`actions`: [B, G, T], or one [g, T] per state."""
        sizes = torch.tensor([len(group) for group in actions])
        rows = actions.flatten(0, 1) if isinstance(actions, Tensor) else torch.cat(list(actions))
        return self._scores(self._begin(states).repeat_interleave(sizes, 0), rows)

    def score_actions(self, states: Tensor, actions: Tensor) -> ActionScores:
        return self._scores(self._begin(states), actions)

    @torch.no_grad()
    def sample_actions(self, states: Tensor, num_actions_per_state: int) -> SampledActions:
        memory = self._begin(states).repeat_interleave(num_actions_per_state, 0).unsqueeze(0)
        token = torch.full((memory.shape[1],), BEGINNING)
        ended = torch.zeros(len(token), dtype=torch.bool)
        written, logits = [], []
        for _ in range(MAX_STEPS):
            seen, memory = self.gru(self.token(token).unsqueeze(1), memory)
            logits.append(self.head(seen))
            drawn = torch.multinomial(logits[-1].squeeze(1).softmax(1), 1).squeeze(1)
            token = torch.where(ended, END, drawn)
            ended = token == END
            written.append(token)
        answers = torch.stack(written, 1)
        scores = _scores_of(torch.cat(logits, 1), answers)
        return SampledActions(
            actions=answers.view(len(states), num_actions_per_state, MAX_STEPS),
            mask=scores.mask,
            behaviour_log_probs=scores.log_probs,
            scores=scores,
        )

    def generate_actions(self, states: Tensor, num_actions_per_state: int, **kwargs: Any) -> Tensor:
        return self.sample_actions(states, num_actions_per_state).actions

    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor:
        scores = self.score_actions(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0).sum(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _begin(self, states: Tensor) -> Tensor:
        return torch.tanh(self.first(states[:, 0]) + self.count(states[:, 1]))

    def _scores(self, memory: Tensor, answers: Tensor) -> ActionScores:
        read = torch.cat([torch.full((len(answers), 1), BEGINNING), answers[:, :-1]], 1)
        seen, _ = self.gru(self.token(read), memory.unsqueeze(0))
        return _scores_of(self.head(seen), answers)


def _scores_of(logits: Tensor, answers: Tensor) -> ActionScores:
    log_softmax = logits.log_softmax(2)
    return ActionScores(
        log_probs=log_softmax.gather(2, answers.unsqueeze(2)).squeeze(2),
        mask=written_steps(answers),
        entropy=-(log_softmax.exp() * log_softmax).sum(2),
    )
