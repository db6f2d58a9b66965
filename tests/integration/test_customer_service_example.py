"""The customer service of the examples: the shop's policy, the customer, the reward, and what a model learns."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from adapters.agents import AgentPolicy, Conversation, Message
from examples.customer_service import (
    CustomerService,
    Scenario,
    create_customer_service_reward,
    grade,
    make_model,
    make_scenarios,
)
from examples.customer_service import __main__ as customer_service
from examples.customer_service.model import careless_script
from examples.customer_service.service import OUTCOMES, right_outcome
from tests.integration.test_readme import ROOT, python_blocks
from tests.support.example_runs import run_example

FACTS: dict[str, Any] = {
    "name": "mira",
    "manner": "brief",
    "opening": "i want my money back for the lamp.",
    "reason": "i changed my mind.",
    "order": "KQZ",
    "item": "lamp",
    "amount": 57,
    "weeks": "two",
    "status": "delivered",
    "stock": "sold out",
}
ASK, ASK_BOTH = "please tell me your order number.", "please tell me your order number and the reason."
SORRY = "sorry, we cannot do this."
Script = list[str | Message]


@pytest.fixture(scope="module")
def policy() -> AgentPolicy:
    return AgentPolicy(make_model(), CustomerService, max_turns=6)


def about(topic: str = "refund", **facts: Any) -> Scenario:
    return {"topic": topic, "context": FACTS | facts}


def call(name: str, order: str = "KQZ", **more: Any) -> Message:
    function = {"name": name, "arguments": {"order_number": order, **more}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
    }


LOOK_UP, REFUND = call("look_up_order"), call("refund", amount=57)
THANKS = "thank you, the refund is done."
SOLVED: Script = [ASK_BOTH, LOOK_UP, REFUND, THANKS]
"""Solves `about()`, a refund of 57 euros after two weeks."""


def played(policy: AgentPolicy, script: Script, scenario: Scenario | None = None) -> Conversation:
    (found,) = policy.replay([scenario or about()], [script])
    return found


def perfect_script(scenario: Scenario) -> Script:
    """Asks for what is hidden, looks the order up, does what the policy demands, and tells it."""
    facts, outcome = scenario["context"], right_outcome(scenario)
    asks = {"open": 0, "brief": 1, "vague": 2}[facts["manner"]]
    script: Script = [ASK_BOTH, ASK][:asks] or ["please tell me the reason."]
    script.append(call("look_up_order", facts["order"]))
    if outcome not in ("refuse", "wait"):
        script.append(call(outcome, facts["order"], **({"amount": facts["amount"]} if outcome == "refund" else {})))
    return [*script, f"thank you. {OUTCOMES[outcome]}."]


def test_the_policy_of_the_shop(subtests: pytest.Subtests) -> None:
    """Each rule of the table in the example, by hand."""
    rules = [
        (about(), "refund"),
        (about(weeks="four"), "refund"),
        (about(weeks="five"), "refuse"),
        (about(weeks="five", reason="it broke."), "refund"),
        (about(amount=100), "refund"),
        (about(amount=101), "escalate"),
        (about(amount=101, weeks="five"), "escalate"),
        (about("shipping", status="lost"), "send_again"),
        (about("shipping", status="shipped"), "wait"),
        (about("damaged", stock="in stock"), "send_again"),
        (about("damaged", stock="sold out", amount=250, weeks="eight"), "refund"),
        (about("cancel", status="packed"), "cancel_order"),
        (about("cancel", status="shipped"), "refuse"),
        (about("fraud", status="packed"), "escalate"),
    ]
    for scenario, outcome in rules:
        with subtests.test(scenario=scenario):
            assert right_outcome(scenario) == outcome


def test_held_out_scenarios_share_no_number_name_or_combination_with_training() -> None:
    train = [s["context"] for s in make_scenarios(2000, seed=0)]
    held_out = [s["context"] for s in make_scenarios(400, seed=1, held_out=True)]
    assert make_scenarios(5, seed=3) == make_scenarios(5, seed=3) != make_scenarios(5, seed=4)
    for kind in ("order", "amount", "name", "opening"):
        known = {facts[kind] for facts in train}
        assert len(known) > 20
        assert not known & {facts[kind] for facts in held_out}
    for facts in (train, held_out):  # and all outcomes occur on both sides
        topics = ("refund", "shipping", "damaged", "cancel", "fraud")
        found = [right_outcome({"topic": topics[i % 5], "context": each}) for i, each in enumerate(facts)]
        assert min(found.count(outcome) for outcome in OUTCOMES) > len(found) / 25


def test_a_perfect_agent_solves_every_scenario(policy: AgentPolicy) -> None:
    scenarios = make_scenarios(40, seed=0) + make_scenarios(40, seed=1, held_out=True)
    rows = policy.replay(scenarios, [perfect_script(scenario) for scenario in scenarios])
    rewards = create_customer_service_reward()
    assert [grade(scenario, row)["solved"] for scenario, row in zip(scenarios, rows, strict=True)] == [1.0] * 80
    best = {"refund": 2.1}  # .2 + .3 + .2 + .2 + .2 + 1; without a refund, no amount can be right
    expected = [best.get(right_outcome(scenario), 1.9) for scenario in scenarios]
    assert rewards.compute_rewards(scenarios, rows).tolist() == pytest.approx(expected)


def test_each_mistake_costs_what_it_should(policy: AgentPolicy, subtests: pytest.Subtests) -> None:
    """By hand: looked up .2, right action .3, right amount .2, told .2, politeness .2 x its share, solved 1."""
    mistakes: dict[str, tuple[Script, float]] = {
        "none": (SOLVED, 2.1),
        "no look-up": ([ASK_BOTH, REFUND, THANKS], 0.2 + 0.2),
        "look-up too late": ([ASK_BOTH, REFUND, LOOK_UP, THANKS], 0.2 + 0.2),
        "look-up of another order": ([ASK_BOTH, call("look_up_order", "KQX"), REFUND, THANKS], 0.2 + 0.2),
        "wrong amount": ([ASK_BOTH, LOOK_UP, call("refund", amount=75), THANKS], 0.2 + 0.3 + 0.2 + 0.2),
        "paid twice": ([ASK_BOTH, LOOK_UP, REFUND, REFUND, THANKS], 0.2 + 0.2 + 0.2),
        "something else besides": ([ASK_BOTH, LOOK_UP, REFUND, call("escalate"), THANKS], 0.2 + 0.2 + 0.2),
        "a call that failed changes nothing": (
            [ASK_BOTH, LOOK_UP, call("refund", "KQX", amount=57), REFUND, THANKS],
            2.1,
        ),
        "wrong action": ([ASK_BOTH, LOOK_UP, call("escalate"), "thank you, a colleague will write."], 0.2 + 0.2),
        "nothing done": ([ASK_BOTH, LOOK_UP, THANKS], 0.2 + 0.2 + 0.2),
        "told something else": ([ASK_BOTH, LOOK_UP, REFUND, SORRY], 0.2 + 0.3 + 0.2 + 0.2),
        "told several things": ([ASK_BOTH, LOOK_UP, REFUND, f"{THANKS} {SORRY}"], 0.2 + 0.3 + 0.2 + 0.2),
        "curt once": ([ASK_BOTH, LOOK_UP, REFUND, "the refund is done."], 0.2 + 0.3 + 0.2 + 0.2 + 0.1),
        "rude once": (["please. nonsense. order number?", *SOLVED[1:]], 0.2 + 0.3 + 0.2 + 0.2 + 0.1),
        "never ends": ([ASK_BOTH, LOOK_UP, REFUND], 0.2 + 0.2),
        "silent": ([LOOK_UP], 0.2),
    }
    rewards = create_customer_service_reward()
    for name, (script, expected) in mistakes.items():
        with subtests.test(mistake=name):
            row = played(policy, script)
            assert rewards.compute_rewards([about()], [row]).item() == pytest.approx(expected)
            assert grade(about(), row)["solved"] == (expected == 2.1)
    right_refusal = played(policy, [ASK_BOTH, LOOK_UP, SORRY], about(weeks="five"))
    assert rewards.compute_rewards([about(weeks="five")], [right_refusal]).item() == pytest.approx(1.9)
    assert math.isnan(grade(about(weeks="five"), right_refusal)["right_amount"])
    only_solved = create_customer_service_reward(
        looked_up=0.0, right_action=0.0, right_amount=0.0, told=0.0, polite=0.0, solved=3.0
    )
    assert only_solved.compute_rewards([about()], [played(policy, SOLVED)]).tolist() == [3.0]


def test_a_conversation_that_failed_has_no_reward() -> None:
    ((row,),) = AgentPolicy(make_model(), lambda state: CustomerService({})).generate_actions([about()], 1)  # type: ignore[typeddict-item]
    assert row.ended_by == "error"
    assert create_customer_service_reward().compute_rewards([about()], [row]).isnan().all()


def test_the_customer_tells_only_what_is_asked(policy: AgentPolicy) -> None:
    def heard(manner: str, *script: str) -> list[str]:
        found = played(policy, list(script), about(manner=manner))
        return [message["content"] for message in found.messages if message["role"] == "user"]

    opening = "hello, i am mira. i want my money back for the lamp."
    assert heard("brief", ASK, "please tell me the reason.") == [opening, "it is KQZ.", "i changed my mind."]
    assert heard("vague", ASK_BOTH, ASK, "thank you.") == [
        opening,
        "it is for a lamp. i changed my mind.",
        "it is KQZ.",
        "goodbye.",
    ]
    assert heard("open", SORRY) == [f"{opening} the number is KQZ.", "goodbye."]


def test_scripts_have_right_numbers_and_are_careless(policy: AgentPolicy) -> None:
    scenarios = make_scenarios(200, seed=0)
    rng = random.Random(0)
    rows = policy.replay(scenarios, [careless_script(scenario, rng) for scenario in scenarios])
    graded = [grade(scenario, row) for scenario, row in zip(scenarios, rows, strict=True)]
    assert 0.6 < sum(parts["looked_up"] for parts in graded) / 200 < 0.8
    assert sum(parts["solved"] for parts in graded) / 200 < 0.2
    results = [message["content"] for row in rows for message in row.messages if message["role"] == "tool"]
    assert not any(result.startswith("Error") for result in results)


def test_the_tokenizer_gives_texts_back_and_has_tokens_for_the_domain() -> None:
    tokenizer = make_model().tokenizer
    for scenario in make_scenarios(20, seed=0):
        opening, _ = CustomerService(scenario).reset()
        assert tokenizer.decode(tokenizer(opening)["input_ids"]) == opening
        assert len(tokenizer(opening)["input_ids"]) < 30
    odd = 'What? {"E": [1, 2.5]}'
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd


def test_the_minimal_example_of_the_documentation_has_at_most_20_lines() -> None:
    document = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    section = document[document.index("## Customer service, whole") :]
    code = python_blocks(section)[0].code
    assert len(code.strip().splitlines()) <= 20
    for part in ("make_scenarios(", "max_turns=6", "create_customer_service_reward(", "make_model(", ".train("):
        assert part in code


def test_the_reference_is_the_model_after_the_warm_up(tmp_path: Path) -> None:
    """With one update per iteration, the first one measures a KL of 0 with it, and the second one does not."""
    typed = "--scripts 24 --warmup-steps 2 --iterations 2 --held-out 8 --profile conservative --kl-coef 0.1"
    customer_service.run(0, customer_service.arguments([*typed.split(), "--out", str(tmp_path)]))
    lines = (tmp_path / "seed-0" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["train/kl_mean"] for line in lines if "train/kl_mean" in line)
    assert abs(first) < 1e-6 < second


@pytest.mark.faults  # three minutes
def test_the_example_learns(tmp_path: Path) -> None:
    """Shortened: fewer scripts, steps and iterations. The share of solved scenarios rises, and the files are written."""
    options = ["--seeds=0", "--scripts=800", "--warmup-steps=250", "--iterations=30", "--held-out=40"]
    printed = run_example("customer_service", *options, "--out", str(tmp_path), folder=tmp_path)
    rows = {
        name: [float(share) for share in re.findall(r"([\d.]+)%", shares)]
        for name, shares in re.findall(r"^\| 0 \| ([\w -]+) \| (.*) \|$", printed, re.MULTILINE)
    }
    assert [*rows] == ["before", "warm-up alone", "after GRPO"]
    solved = {name: shares[-2] for name, shares in rows.items()}
    assert solved["before"] == 0.0
    assert solved["after GRPO"] > solved["warm-up alone"] + 5.0, printed
    metrics = [json.loads(line) for line in (tmp_path / "seed-0" / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval/avg_reward" in line for line in metrics) >= 2
    lines = (tmp_path / "seed-0" / "transcripts.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert "assistant, reward" in (tmp_path / "seed-0" / "transcripts.html").read_text()
