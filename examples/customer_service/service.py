"""Customer service: scenarios, a customer with hidden facts, a shop with tools, and a reward that checks the shop's policy.

The shop's policy, for each topic:

| topic | what the agent must do, after it looked up the order |
|---|---|
| refund | up to 100 euros: refund it, if the item broke or was bought up to four weeks ago; else say no. Above: escalate |
| shipping | send a lost parcel again; of any other parcel, say that it is on its way |
| damaged | send the item again if it is in stock; else refund the amount |
| cancel | cancel the order if it is packed; say no if it has been shipped |
| fraud | escalate |

The order number and the reason for a refund are known to the customer only, who tells them when asked. The other facts are in
the shop's system. The agent has to be polite in each message to the customer, and say at the end what was done.
"""

import random
from collections.abc import Sequence
from typing import Any, TypedDict

from adapters.agents import Conversation, Message
from grpo import WeightedRewards

OPENINGS = {
    "refund": ("i want my money back for the {item}.", "i would like a refund for the {item}."),
    "shipping": ("my {item} did not come.", "where is the parcel with my {item}?"),
    "damaged": ("my {item} came damaged.", "the parcel with the {item} was damaged."),
    "cancel": ("please cancel my order of the {item}.", "i do not need the {item} any more, please cancel it."),
    "fraud": ("i did not order a {item}.", "someone used my card to buy a {item}."),
}
STATUSES = {
    "refund": ("delivered",),
    "shipping": ("lost", "shipped"),
    "damaged": ("delivered",),
    "cancel": ("packed", "shipped"),
    "fraud": ("packed", "shipped", "delivered"),
}
REASONS = ("it broke.", "i changed my mind.")
MANNERS = ("open", "brief", "vague")
"""Customers tell the order number at once, when asked, or when asked twice."""
WEEKS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
ITEMS = ("lamp", "chair", "clock", "radio", "table", "phone", "bag", "watch")
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
SYLLABLES = ("mi", "ra", "jo", "len", "ta", "bo", "su", "kim")
OUTCOMES = {
    "refund": "refund",
    "send_again": "new parcel",
    "cancel_order": "cancelled",
    "escalate": "colleague",
    "refuse": "cannot",
    "wait": "on its way",
}
"""What the agent can do in the end, and the words with which it tells the customer."""
COURTESIES, RUDE = ("please", "thank", "sorry"), ("nonsense",)


class Scenario(TypedDict):
    """What a conversation is about."""

    topic: str
    """What the customer wants, a key of `OPENINGS`."""
    context: dict[str, Any]
    """The facts: the customer's name, manner, opening and reason; the order's number, item, amount, weeks, status and stock."""


def make_scenarios(count: int, *, seed: int, held_out: bool = False) -> list[Scenario]:
    """Scenarios with all topics in turn.

    Args:
        count: Number of scenarios.
        seed: Seed of the facts.
        held_out: Whether to make scenarios for evaluation. Their order numbers, amounts, names, and combinations of opening
            and item are in no scenario for training, whatever the seed: the sum of the digits or places is divisible by 5.
    """
    rng = random.Random(seed)

    def drawn(*ranges: range) -> tuple[int, ...]:
        """Numbers whose digits' sum says that they belong to this side of the split."""
        while True:
            numbers = tuple(rng.choice(numbers) for numbers in ranges)
            if (sum(int(digit) for number in numbers for digit in str(number)) % 5 == 0) == held_out:
                return numbers

    def drawn_letters() -> list[int]:
        while True:
            places = rng.sample(range(len(LETTERS)), 3)
            if (sum(places) % 5 == 0) == held_out:
                return places

    def scenario(topic: str) -> Scenario:
        opening, item = drawn(range(2), range(len(ITEMS)))
        first, second = drawn(range(8), range(8))
        (amount,) = drawn(range(10, 100) if rng.random() < 0.7 else range(101, 300))
        letters = drawn_letters()
        context = {
            "name": SYLLABLES[first] + SYLLABLES[second],
            "manner": rng.choice(MANNERS),
            "opening": OPENINGS[topic][opening].format(item=ITEMS[item]),
            "reason": rng.choice(REASONS),
            "order": "".join(LETTERS[place] for place in letters),
            "item": ITEMS[item],
            "amount": amount,
            "weeks": rng.choice(WEEKS),
            "status": rng.choice(STATUSES[topic]),
            "stock": rng.choice(("in stock", "sold out")),
        }
        return {"topic": topic, "context": context}

    return [scenario([*OPENINGS][i % len(OPENINGS)]) for i in range(count)]


def right_outcome(scenario: Scenario) -> str:
    """What the shop's policy demands, a key of `OUTCOMES`."""
    facts = scenario["context"]
    match scenario["topic"]:
        case "refund" if facts["amount"] > 100:
            return "escalate"
        case "refund":
            return "refund" if facts["reason"] == REASONS[0] or WEEKS.index(facts["weeks"]) < 4 else "refuse"
        case "shipping":
            return "send_again" if facts["status"] == "lost" else "wait"
        case "damaged":
            return "send_again" if facts["stock"] == "in stock" else "refund"
        case "cancel":
            return "cancel_order" if facts["status"] == "packed" else "refuse"
        case _:
            return "escalate"


def right_call(scenario: Scenario, outcome: str) -> list[tuple[str, dict[str, Any]]]:
    """The call of a tool that carries out an outcome, with right arguments. Two outcomes need no call."""
    facts = scenario["context"]
    arguments = {"order_number": facts["order"]} | ({"amount": facts["amount"]} if outcome == "refund" else {})
    return [] if outcome in ("refuse", "wait") else [(outcome, arguments)]


class CustomerService:
    """The customer, and the shop with its tools. The customer ends the conversation after a message that asks nothing."""

    def __init__(self, scenario: Scenario) -> None:
        self.facts = scenario["context"]
        self._is_vague = self.facts["manner"] == "vague"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin with the customer's opening."""
        number = f" the number is {self.facts['order']}." if self.facts["manner"] == "open" else ""
        return f"hello, i am {self.facts['name']}. {self.facts['opening']}{number}", {}

    def step(self, action: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer the agent's questions."""
        asked, answers = action["content"], []
        if "order number" in asked:
            answers.append(f"it is for a {self.facts['item']}." if self._is_vague else f"it is {self.facts['order']}.")
            self._is_vague = False
        if "reason" in asked:
            answers.append(self.facts["reason"])
        return " ".join(answers) or "goodbye.", 0.0, not answers, False, {}

    def tools(self) -> list[Any]:
        """What the agent may call."""
        return [self.look_up_order, self.refund, self.send_again, self.cancel_order, self.escalate]

    def look_up_order(self, order_number: str) -> str:
        """Looks up an order.

        Args:
            order_number: The number of the order.
        """
        facts = self._order(order_number)
        bought = f"order {facts['order']}, {facts['weeks']} weeks ago"
        return f"{bought}, {facts['status']}, {facts['stock']}: {facts['amount']} euros."

    def refund(self, order_number: str, amount: int) -> str:
        """Pays money back.

        Args:
            order_number: The number of the order.
            amount: The amount in euros.
        """
        self._order(order_number)
        return "done."

    def send_again(self, order_number: str) -> str:
        """Sends the item of an order again.

        Args:
            order_number: The number of the order.
        """
        self._order(order_number)
        return "done."

    def cancel_order(self, order_number: str) -> str:
        """Cancels an order.

        Args:
            order_number: The number of the order.
        """
        self._order(order_number)
        return "done."

    def escalate(self, order_number: str) -> str:
        """Hands the case to a colleague.

        Args:
            order_number: The number of the order.
        """
        self._order(order_number)
        return "done."

    def _order(self, number: str) -> dict[str, Any]:
        if number != self.facts["order"]:
            raise ValueError("no such order.")
        return self.facts


def grade(scenario: Scenario, conversation: Conversation) -> dict[str, float]:
    """The parts of the reward, from what was said and called. NaN: the part does not apply.

    - `looked_up`: the order was looked up before anything was done.
    - `right_action`: the tool that the policy demands was called, once, and nothing else was done.
    - `right_amount`: for refunds, the amount was right.
    - `told`: the last message tells the right outcome, and no other.
    - `polite`: share of the messages to the customer that are polite.
    - `solved`: all of these hold, and the customer ended the conversation.
    """
    if conversation.ended_by in ("error", "timeout"):
        return dict.fromkeys(PARTS, float("nan"))
    said = [message["content"].lower() for message in conversation.messages if _is_for_the_customer(message)]
    calls = _calls_that_worked(conversation.messages)
    done = [call for call in calls if call[0] != "look_up_order"]
    outcome = right_outcome(scenario)
    demanded, closing = right_call(scenario, outcome), said[-1] if said else ""
    is_closed = conversation.ended_by == "environment"
    looked_up = bool(calls) and calls[0][0] == "look_up_order"
    right_action = looked_up and is_closed and [name for name, _ in done] == [name for name, _ in demanded]
    told = is_closed and [key for key, words in OUTCOMES.items() if words in closing] == [outcome]
    polite = sum(is_polite(text) for text in said) / max(len(said), 1)
    return {
        "looked_up": float(looked_up),
        "right_action": float(right_action),
        "right_amount": float(right_action and done == demanded) if outcome == "refund" else float("nan"),
        "told": float(told),
        "polite": polite,
        "solved": float(right_action and done == demanded and told and polite == 1.0),
    }


PARTS = ("looked_up", "right_action", "right_amount", "told", "polite", "solved")


def is_polite(text: str) -> bool:
    """Whether a message has a word of courtesy and no rude word."""
    return any(word in text for word in COURTESIES) and not any(word in text for word in RUDE)


def create_customer_service_reward(
    *,
    looked_up: float = 0.2,
    right_action: float = 0.3,
    right_amount: float = 0.2,
    told: float = 0.2,
    polite: float = 0.2,
    solved: float = 1.0,
) -> WeightedRewards:
    """The reward as a weighted sum of the parts of `grade`. A solved scenario always gets the most."""
    weights = dict(zip(PARTS, (looked_up, right_action, right_amount, told, polite, solved), strict=True))

    def part(name: str) -> Any:
        def graded(states: Sequence[Scenario], actions: Sequence[Conversation]) -> list[float]:
            return [grade(state, action)[name] for state, action in zip(states, actions, strict=True)]

        return graded

    return WeightedRewards({name: part(name) for name in weights}, weights)


def _is_for_the_customer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _calls_that_worked(messages: Sequence[Message]) -> list[tuple[str, dict[str, Any]]]:
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in calls
        if not results.get(call["id"], "Error").startswith("Error")
    ]
