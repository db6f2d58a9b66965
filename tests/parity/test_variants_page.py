"""The variants of docs/variants.md, as users would write them, against TRL's own code: values and gradients."""

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch, step_weights
from tests.support.peer_cases import Logits
from tests.support.trl_code import imported

PAGE = Path(__file__).resolve().parents[2] / "docs" / "variants.md"


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the code of the page defines."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), found)
    return found


def theirs(module: str, name: str) -> Any:
    return imported(f"experimental.{module}", name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.5])
def test_iw_opd(page: dict[str, Any], seed: int, gamma: float) -> None:
    draw = Logits(seed)
    trainer = SimpleNamespace(
        temperature=1.0, iw_opd_epsilon=1e-8, iw_opd_gamma=gamma, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    expected = theirs("iw_opd.iw_opd_trainer", "IWOPDTrainer")._compute_iw_opd_loss(
        trainer,
        draw.student,
        draw.tokens,
        draw.labels,
        torch.where(draw.mask, draw.ref_log_probs, torch.nan),
        draw.old_log_probs,
    )
    draw.assert_same(page["iw_opd"](draw.inputs("step_mean"), gamma=gamma).loss, expected)


@pytest.mark.parametrize("seed", range(3))
def test_a_star_po(page: dict[str, Any], seed: int) -> None:
    """Two groups. TRL computes V* from samples of the reference, with the formula that its source has in one line."""
    draw, beta1, beta2 = Logits(seed), 0.3, 0.7
    rewards, groups = torch.rand(Logits.NUM_ROWS, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1])
    batch = ExperienceBatch.from_rows([*range(Logits.NUM_ROWS)], [*range(Logits.NUM_ROWS)], rewards, groups)
    values = torch.cat(
        [(beta1 * (rewards[groups == g] / beta1).exp().mean().log()).expand(int((groups == g).sum())) for g in (0, 1)]
    )
    advantages = page["optimal_advantages"](batch, beta1=beta1)
    torch.testing.assert_close(advantages, rewards - values)

    def totals(log_probs: Tensor) -> Tensor:
        return torch.where(draw.mask, log_probs, 0.0).sum(1)

    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), args=SimpleNamespace(beta2=beta2),
        _metrics={"train": defaultdict(list)}, _get_sequence_logps=lambda *_: totals(draw.log_probs),
    )  # fmt: skip
    inputs = {"input_ids": None, "attention_mask": None, "logits_to_keep": Logits.NUM_STEPS}
    inputs |= {"ref_logps": totals(draw.ref_log_probs), "rewards": rewards, "v_star": values}
    expected = theirs("a2po.a2po_trainer", "A2POTrainer").compute_loss(trainer, None, inputs)
    ours = page["a_star"](draw.inputs("row_mean", advantages=advantages), beta2=beta2).loss
    draw.assert_same(ours, expected)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_the_generalized_jsd(page: dict[str, Any], beta: float) -> None:
    draw = Logits(0)
    loss = theirs("gkd.gkd_trainer", "GKDTrainer").generalized_jsd_loss
    expected = loss(draw.student, draw.teacher, labels=draw.labels, beta=beta)
    per_step = page["generalized_jsd"](draw.student.log_softmax(-1), draw.teacher.log_softmax(-1), beta=beta)
    ours = (step_weights(draw.mask, "step_mean") * per_step).sum()
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)  # TRL rounds log(beta) to float32
    draw.assert_same_slopes(ours, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_a_distillation_with_a_bounded_weight(page: dict[str, Any], seed: int) -> None:
    draw = Logits(seed)
    kl = draw.exact_kl()
    clipping = theirs("sdpo.loss_utils", "apply_importance_sampling_clipping")
    weighted = clipping(kl, draw.log_probs, draw.old_log_probs, 1.5)
    expected = (weighted * draw.mask).sum() / draw.mask.sum()
    draw.assert_same(page["clipped_distillation"](draw.inputs("step_mean", kl=kl), bound=1.5).loss, expected)
