"""Compiled, the objective has the same loss and the same gradient, in one graph; and a trainer reaches the same weights."""

import textwrap

import pytest

from grpo.surrogates import SURROGATES
from tests.support.launches import printed_by

OBJECTIVE = """
import sys
import torch
from grpo import Mask, ObjectiveConfig, ObjectiveInputs, Truncate, grpo_objective, step_weights
from grpo.surrogates import SURROGATES

backend = sys.argv[1]
torch.manual_seed(0)
mask = torch.arange(6) < torch.tensor([[6], [3], [0], [4]])
old = -0.1 - torch.rand(4, 6)
leaves = dict(
    log_probs=old + 0.3 * torch.randn(4, 6), entropy=torch.rand(4, 6), kl=torch.rand(4, 6), values=torch.randn(4, 6),
)
others = dict(
    ref_log_probs=old + 0.1, behaviour_log_probs=old + 0.2 * torch.randn(4, 6), old_values=torch.randn(4, 6),
    returns=torch.randn(4, 6), mask=mask, weights=step_weights(mask, "row_mean"),
    advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), selected=torch.rand(4, 6) < 0.5, keep=torch.rand(4, 6) < 0.8,
)
terms = [
    dict(entropy_coef=0.1, value_clip=0.1, sampler_correction=Truncate(), off_policy_threshold=0.1, kl_coef=0.1),
    dict(entropy_coef=0.1, entropy_estimator="score_function", sampler_correction=Mask(level="row"), kl_coef=0.1,
         kl_estimator="k3_weighted"),
    dict(kl_coef=0.1, kl_estimator="exact"),
]


def both_ways(config, old_log_probs):
    def loss_of(log_probs, entropy, kl, values):
        given = dict(log_probs=log_probs, entropy=entropy, kl=kl, values=values, old_log_probs=old_log_probs)
        return grpo_objective(ObjectiveInputs(**given, **others), config).loss

    torch._dynamo.reset()  # each configuration is a program of its own: the limit on programs is for one
    for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend=backend)):
        given = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
        loss = function(**given)
        loss.backward()
        yield [loss.detach(), *(leaf.grad for leaf in given.values())]


for number, (name, kind) in enumerate(SURROGATES.items()):
    other_level = dict(level=("row", "row_sum", "row_step", "none")[number % 4]) if "level" in kind().to_dict() else {}
    cases = [
        (ObjectiveConfig(surrogate=kind(), kl_coef=0.1), old),
        (ObjectiveConfig(surrogate=kind(**other_level), **terms[number % 3]), old if number % 2 else None),
    ]
    for config, old_log_probs in cases if backend == "aot_eager" else cases[number % 2 : number % 2 + 1]:
        expected, found = both_ways(config, old_log_probs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=lambda m: f"{config}: {m}")
    print(name)
"""


def output_of(script: str, *arguments: str) -> str:
    """What a script prints, in a process of its own: the compiler cannot trace the type checks of pytest's hook."""
    return printed_by("-c", textwrap.dedent(script), *arguments, seconds=290)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_surrogate_and_every_term_is_one_graph_with_the_same_loss_and_gradient(backend: str) -> None:
    """In two configurations without the generation of machine code, and in one with it."""
    assert output_of(OBJECTIVE, backend).split() == [*SURROGATES]


TRAINER = """
import torch
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, KLControl, ObjectiveConfig
from tests.support.policies import RowScoring, weights_of


def batch(width, num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_rows,), generator=generator).tolist()
    lengths[0] = width
    actions = [tuple(torch.randint(0, 3, (length,), generator=generator).tolist()) for length in lengths]
    rewards = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    groups = [row // 4 for row in range(num_rows)]
    return ExperienceBatch.from_rows(groups, actions, rewards, groups, mask=mask)


def trained(compiled):
    torch.manual_seed(0)
    policy, reference = RowScoring(), RowScoring()
    config = GRPOConfig(
        compile_objective=compiled, micro_batch_size=4, batch_size=8, num_epochs_per_update=2, seed=0,
        kl_control=KLControl(target=1e-6), objective=ObjectiveConfig(kl_coef=0.05, entropy_coef=0.01),
    )
    trainer = GRPOTrainer(
        config=config, policy=policy, reward_model=lambda states, actions: [0.0] * len(states),
        reference_policy=reference, optimizer=torch.optim.SGD(policy.parameters(), lr=0.5),
    )
    metrics = [trainer.update(batch(width, num_rows, seed)) for seed, (width, num_rows) in enumerate(SIZES)]
    return weights_of(policy), metrics


SIZES = [(4, 8), (3, 8), (6, 16), (5, 12), (1, 8), (7, 4)]
weights, metrics = trained(compiled=False)
assert not torch._dynamo.utils.counters["stats"]
compiled_weights, compiled_metrics = trained(compiled=True)
num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert torch._dynamo.utils.counters["graph_break"].total() == 0
torch.testing.assert_close(compiled_weights, weights, rtol=1e-12, atol=1e-14)
for one, other in zip(compiled_metrics, metrics, strict=True):
    assert set(one) == set(other)
    for name in other:
        if "time" not in name and "seconds" not in name:
            assert abs(one[name] - other[name]) <= 1e-9 * max(1.0, abs(other[name])), (name, one[name], other[name])
print(num_graphs)
"""


@pytest.mark.slow
def test_a_trainer_reaches_the_same_weights_with_a_compiled_objective() -> None:
    """Micro-batches of six widths and an adaptive KL coefficient, in few graphs."""
    assert 1 <= int(output_of(TRAINER)) <= 8
