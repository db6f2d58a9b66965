"""Published kinds of bug, rebuilt as small policies and losses, each beside its correct twin.

A correct policy or loss has hooks, and each bug replaces one of them. The sources state the fact, not this code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from grpo.arguments import pad_steps
from grpo.types import ActionScores, ObjectiveInputs, ObjectiveOutput

ITEMS = ["a user", "another user"]
PROMPTS = [(1, 2), (3,), (2, 4, 1)]


def draw(logits):
    return int(torch.multinomial(logits.softmax(-1), 1))


def but(right: type, **attributes: Any) -> Any:
    """A subclass that differs in these attributes, which its name says."""
    return type(f"{right.__name__} but for {' and '.join(attributes)}", (right,), attributes)


class Slates(nn.Module):
    """Slates of 4 different items of 40. Almost no slate repeats."""

    states, items, size = ITEMS, 40, 4
    sampling_temperature, masked_when_scored = 1.0, True

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(self.items, generator=torch.Generator().manual_seed(3)))

    def truncate(self, logits):
        return logits

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        logits = (self.scores.detach() / self.sampling_temperature).expand(len(states) * num_actions_per_state, -1)
        chosen = []
        for _ in range(self.size):
            chosen.append(torch.multinomial(self.truncate(logits).softmax(-1), 1))
            logits = logits.scatter(1, chosen[-1], torch.finfo(logits.dtype).min)
        return torch.cat(chosen, 1).view(len(states), num_actions_per_state, self.size)

    def get_log_probabilities(self, states, actions):
        logits, found = self.scores.expand(len(actions), -1), []
        for item in actions.unbind(1):
            found.append(logits.log_softmax(-1).gather(1, item.unsqueeze(1)))
            if self.masked_when_scored:
                logits = logits.scatter(1, item.unsqueeze(1), torch.finfo(logits.dtype).min)
        return torch.cat(found, 1)

    def get_parameters(self):
        return dict(self.named_parameters())


HotSlates = but(Slates, sampling_temperature=1.3)
UnmaskedSlates = but(Slates, masked_when_scored=False)


class NucleusSlates(Slates):
    def truncate(self, logits):
        kept = logits >= logits.topk(30).values[:, -1:]
        return torch.where(kept, logits, torch.finfo(logits.dtype).min)


class WholeSlates(Slates):
    """The same, with one log-prob per slate."""

    def get_log_probabilities(self, states, actions):
        return super().get_log_probabilities(states, actions).sum(1)


HotWholeSlates = but(WholeSlates, sampling_temperature=1.6)
UnmaskedWholeSlates = but(WholeSlates, masked_when_scored=False)

EOS, SEPARATOR, LONGEST = 0, 5, 4


class Tokens(nn.Module):
    """Completions of one to four of five tokens, ended by token 0. Prompts of several lengths; a separator follows them."""

    states = PROMPTS

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = nn.Parameter(torch.randn(6, 5, generator=generator))  # last token, next token
        self.first = nn.Parameter(torch.randn(6, 5, generator=generator))  # first token of the prompt, next token
        self.places = nn.Parameter(0.5 * torch.randn(9, 5, generator=generator))  # place in the text, next token

    def logits(self, text, place):
        return self.table[text[-1]] + self.first[text[0]] + self.places[place]

    def text_to_score(self, prompt, completion):
        """What the model reads before each token of the completion."""
        return [(*prompt, SEPARATOR, *completion[:t]) for t in range(len(completion))]

    def place(self, text, longest_prompt, prompt):
        return len(text)

    def sampling_logits(self, logits):
        return logits

    def decided(self, completion):
        """The steps of a completion."""
        return [True] * len(completion)

    def sample_one(self, prompt):
        completion = ()
        while len(completion) < LONGEST and EOS not in completion:
            text = (*prompt, SEPARATOR, *completion)
            completion = (*completion, draw(self.sampling_logits(self.logits(text, len(text)).detach())))
        return completion

    @torch.no_grad()
    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[self.sample_one(prompt) for _ in range(num_actions_per_state)] for prompt in states]

    def entropy(self, log_probs):
        return -(log_probs.exp() * log_probs).sum(-1)

    def score_actions(self, states, actions):
        rows = [(tuple(prompt), tuple(completion)) for prompt, completion in zip(states, actions, strict=True)]
        places = {row: place for place, row in enumerate(dict.fromkeys(rows))}  # many rows are equal: score them once
        scores = self.score_different(list(places), max(map(len, states)), max(map(len, actions)))
        index = torch.tensor([places[row] for row in rows])
        return ActionScores(log_probs=scores.log_probs[index], mask=scores.mask[index], entropy=scores.entropy[index])

    def score_different(self, rows, longest, width):
        log_probs, mask, entropy = [], [], []
        for prompt, completion in rows:
            texts = self.text_to_score(prompt, completion)
            logits = [self.logits(text, self.place(text, longest, prompt)) for text in texts]
            every = torch.stack(logits).log_softmax(-1)
            chosen = every.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
            log_probs.append(pad_steps(chosen.unsqueeze(0), width, 0.0))
            entropy.append(pad_steps(self.entropy(every).unsqueeze(0), width, 0.0))
            mask.append(pad_steps(torch.tensor([self.decided(completion)]), width, False))
        return ActionScores(log_probs=torch.cat(log_probs), mask=torch.cat(mask), entropy=torch.cat(entropy))

    def get_log_probabilities(self, states, actions):
        scores = self.score_actions(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0).sum(1)

    def get_parameters(self):
        return dict(self.named_parameters())


class ShiftedLabels(Tokens):
    """The logits after a token score the token itself."""

    def text_to_score(self, prompt, completion):
        return [(*prompt, SEPARATOR, *completion[: t + 1]) for t in range(len(completion))]


class DroppedSeparator(Tokens):
    def text_to_score(self, prompt, completion):
        return [(*prompt, *completion[:t]) for t in range(len(completion))]


class CountedPadding(Tokens):
    """Completions are padded with the token that ends them, and the padding is scored."""

    def score_actions(self, states, actions):
        return super().score_actions(states, [(*action, *[EOS] * (LONGEST - len(action))) for action in actions])


UnscoredEnd = but(Tokens, decided=lambda self, completion: [token != EOS for token in completion])
"""The padding is the token that ends a completion, so the mask of the padding hides the end, too."""
PlacesOfPaddedPrompts = but(Tokens, place=lambda self, text, longest, prompt: len(text) + longest - len(prompt))
"""Prompts are padded on the left, and the padding is counted in the places."""


DropoutWhenSampling = but(
    Tokens, sampling_logits=lambda self, logits: nn.functional.dropout(logits, 0.4, training=True)
)


class PaddedVocabulary(Tokens):
    """The output layer is padded to eight tokens; the entropy counts them."""

    def entropy(self, log_probs):
        return super().entropy(nn.functional.pad(log_probs, (0, 3), value=-2.0).log_softmax(-1))


class MeanLogProbs(Tokens):
    """The mean over the steps where the sum is asked for."""

    def score_actions(self, states, actions):
        scores = super().score_actions(states, actions)
        return ActionScores(log_probs=scores.log_probs / scores.mask.sum(1, keepdim=True), mask=scores.mask)


class SharedNoise(Tokens):
    """All completions of a prompt come from the same random numbers."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[self.sample_one(prompt)] * num_actions_per_state for prompt in states]


class SeparateSampler(Tokens):
    """Samples with weights of its own, which `sync_sampler` copies."""

    def __init__(self):
        super().__init__()
        self.copied = {name: value.detach().clone() for name, value in self.named_parameters()}

    def sync_sampler(self):
        self.copied = {name: value.detach().clone() for name, value in self.named_parameters()}

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        own = {name: value.detach().clone() for name, value in self.named_parameters()}
        try:
            for name, value in self.named_parameters():
                value.data.copy_(self.copied[name])
            return super().generate_actions(states, num_actions_per_state)
        finally:
            for name, value in self.named_parameters():
                value.data.copy_(own[name])


StaleSampler = but(SeparateSampler, sync_sampler=lambda self: None)


class Squashed(nn.Module):
    """A two-dimensional action, tanh of a normal variable."""

    states = ITEMS

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor([0.2, -0.4]))
        self.log_std = nn.Parameter(torch.tensor([-0.5, -0.7]))

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        noise = torch.randn(len(states), num_actions_per_state, 2)
        return (self.mean + self.log_std.exp() * noise).tanh().detach()

    def normal(self):
        return torch.distributions.Normal(self.mean, self.log_std.exp())

    def get_log_probabilities(self, states, actions):
        inner = actions.clamp(-0.999999, 0.999999).atanh()
        return (self.normal().log_prob(inner) - torch.log1p(-inner.tanh().square())).sum(1)

    def get_parameters(self):
        return dict(self.named_parameters())


class DensityOfTheInnerVariable(Squashed):
    def get_log_probabilities(self, states, actions):
        return self.normal().log_prob(actions.clamp(-0.999999, 0.999999).atanh()).sum(1)


class Flow(nn.Module):
    """A stochastic flow sampler: noise x_0, two steps with Gaussian densities, and a last step without noise.

    The action is the path x_0 ... x_3, as a tensor [4, 2]. x_0 is drawn, and not scored. The last step is masked.
    """

    noise_when_sampled, noise_when_scored, steps = 0.6, 0.6, 3

    def __init__(self):
        super().__init__()
        self.pull = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.speed = nn.Parameter(torch.tensor(0.7))

    def moved(self, x, step):
        return x + self.speed / (1 + step) * (self.pull - x)

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        path = [torch.randn(len(states), num_actions_per_state, 2)]
        for step in range(self.steps):
            noise = self.noise_when_sampled * torch.randn_like(path[0]) if step < self.steps - 1 else 0.0
            path.append((self.moved(path[-1], step) + noise).detach())
        return torch.stack(path, 2)

    def score_actions(self, states, actions):
        steps = [
            torch.distributions.Normal(self.moved(actions[:, step], step), self.noise_when_scored)
            .log_prob(actions[:, step + 1])
            .sum(1)
            for step in range(self.steps - 1)
        ]
        log_probs = torch.stack([*steps, torch.zeros(len(actions))], 1)
        return ActionScores(
            log_probs=log_probs, mask=torch.arange(self.steps).expand(len(actions), -1) < self.steps - 1
        )

    def get_log_probabilities(self, states, actions):
        return self.score_actions(states, actions).log_probs.sum(1)

    def get_parameters(self):
        return dict(self.named_parameters())


QuietFlow = but(Flow, noise_when_scored=0.8)
"""Scores steps with another noise than it samples with."""


class ShortFlow(Flow):
    """One log-prob per path of a single noisy step, and nothing said about the other steps."""

    steps = 2
    score_actions = None

    def get_log_probabilities(self, states, actions):
        return Flow.score_actions(self, states, actions).log_probs.sum(1)


class LongFlow(Flow):
    """Returns the log-probs of the noisy steps only."""

    score_actions = None

    def get_log_probabilities(self, states, actions):
        return Flow.score_actions(self, states, actions).log_probs[:, :-1]


def loss(
    inputs: ObjectiveInputs,
    *,
    log_ratio: Callable = lambda now, old: now - old,
    log_probs: Callable = lambda values: values.float() if values.element_size() < 4 else values,
    advantages: Callable = lambda values: values.unsqueeze(1),
    surrogate: Callable = torch.minimum,
    kl: Callable = lambda now, ref: (ref - now).exp() - 1 - (ref - now),
    weights: Callable = lambda inputs: inputs.weights,
    valid: Callable = lambda values, mask: torch.where(mask, values, 0.0),
) -> ObjectiveOutput:
    """PPO's clipped loss with k3 by hand. Each bug replaces one of its parts."""
    now = valid(log_probs(inputs.log_probs), inputs.mask)
    old = now.detach() if inputs.old_log_probs is None else valid(inputs.old_log_probs.to(now.dtype), inputs.mask)
    ratio, a = log_ratio(now, old).exp(), advantages(inputs.advantages).to(now.dtype)
    steps = -surrogate(ratio * a, ratio.clamp(0.8, 1.2) * a)
    if inputs.ref_log_probs is not None:
        steps = steps + (inputs.kl_coef or 0.0) * kl(now, valid(inputs.ref_log_probs.to(now.dtype), inputs.mask))
    return ObjectiveOutput(loss=(weights(inputs).to(now.dtype) * valid(steps, inputs.mask)).sum(), metrics={})


def loss_with(**parts: Callable) -> Callable[[ObjectiveInputs], ObjectiveOutput]:
    """The loss with parts replaced."""
    return lambda inputs: loss(inputs, **parts)


@dataclass(frozen=True)
class Bug:
    """One kind of bug."""

    kind: str
    source: str
    """Where this kind of bug is described."""
    wrong: Any
    """Makes the policy, or is the loss."""
    rule: str = "generated samples"
    """The rule that should find it."""

    @property
    def right(self) -> Any:
        """Its correct twin: the class that a policy with a bug derives from, or the loss with no part replaced."""
        return self.wrong.__base__ if isinstance(self.wrong, type) else loss

    @property
    def states(self) -> Any:
        """States for a policy. None: a loss."""
        return getattr(self.right, "states", None)


DETAILS = "Huang et al. 2024, arXiv:2403.17031"
MASKING = "Huang and Ontanon 2020, arXiv:2006.14171, section 'naive invalid action masking'"
OFF_POLICY = "Yao et al. 2025, 'Your efficient RL framework secretly brings you off-policy RL training'"

BUGS = [
    Bug("temperature in sampling only", DETAILS, HotSlates),
    Bug("actions masked in sampling only", MASKING, UnmaskedSlates),
    Bug("labels shifted by one", "Transformers documentation, causal language models", ShiftedLabels),
    Bug("padding counted as steps", DETAILS, CountedPadding),
    Bug("dropped separator", "vLLM blog 2025, 'No more retokenization drift'", DroppedSeparator),
    Bug(
        "density of the wrong variable after tanh",
        "Haarnoja et al. 2018, arXiv:1812.05905, appendix C",
        DensityOfTheInnerVariable,
    ),
    Bug(
        "noise shared within a group",
        "Paernamaa 2021, 'Using PyTorch + NumPy? You're making a mistake'",
        SharedNoise,
    ),
    Bug("stale sampler weights", OFF_POLICY, StaleSampler, "samples after an update"),
    Bug("truncation in sampling only", "DeepSeek-AI 2025, arXiv:2512.02556, 'keep sampling mask'", NucleusSlates),
    Bug("end of sequence not scored", DETAILS, UnscoredEnd),
    Bug("places counted with left padding", DETAILS, PlacesOfPaddedPrompts, "independent rows"),
    Bug("dropout in sampling", DETAILS, DropoutWhenSampling),
    Bug("entropy over a padded vocabulary", "Shoeybi et al. 2019, arXiv:1909.08053", PaddedVocabulary, "entropy"),
    Bug("mean of log-probs for their sum", "Liu et al. 2025, arXiv:2503.20783", MeanLogProbs),
    Bug(
        "the loss normalised twice",
        "Unsloth and Hugging Face 2024, 'Fixing gradient accumulation'",
        loss_with(weights=lambda inputs: inputs.weights / inputs.mask.sum()),
        "policy gradient",
    ),
    Bug(
        "advantages normalised over the micro-batch",
        "Shao et al. 2024, arXiv:2402.03300, section 4.1.2 (over the group)",
        loss_with(advantages=lambda a: ((a - a.mean()) / (a.std(correction=0) + 1e-6)).unsqueeze(1)),
        "micro-batches",
    ),
    Bug(
        "ratio of the new log-probs to themselves",
        "TRL's GRPOTrainer, which detaches them",
        loss_with(log_ratio=lambda now, old: now - now),
        "policy gradient",
    ),
    Bug(
        "KL with the wrong sign",
        "Schulman 2020, 'Approximating KL divergence'",
        loss_with(kl=lambda now, ref: -((ref - now).exp() - 1 - (ref - now))),
        "kl",
    ),
    Bug(
        "the log-ratio differentiated as a KL",
        "Tang and Munos 2025, arXiv:2506.09477",
        loss_with(kl=lambda now, ref: now - ref),
        "kl",
    ),
    Bug(
        "clipping on the wrong side",
        "Schulman et al. 2017, arXiv:1707.06347, eq. 7",
        loss_with(surrogate=torch.maximum),
        "bounds",
    ),
    Bug(
        "float16 log-probs that lose the gradient",
        "Micikevicius et al. 2018, arXiv:1710.03740, section 3.2",
        loss_with(log_probs=lambda values: values),
        "half precision",
    ),
    Bug(
        "masked steps multiplied by 0",
        "PyTorch documentation, MaskedTensor: NaN gradients of masked values",
        loss_with(valid=lambda values, mask: values * mask),
        "mask",
    ),
]
