"""An environment and a reward function written for TRL's `GRPOTrainer`. Nothing of this project is imported here."""

from typing import Any


class Counter:
    """A number that the model shall bring to a goal."""

    def __init__(self) -> None:
        self.total, self.goal = 0, 0

    def reset(self, goal: int, **columns: Any) -> str:
        """Begin at 0. TRL appends the text to the last message of the prompt."""
        self.total, self.goal = 0, goal
        return f"The goal is {goal}."

    def add(self, number: int) -> str:
        """Adds a number to the total.

        Args:
            number: The number.

        Returns:
            The total.
        """
        self.total += number
        return self._shown()

    def get_reward(self) -> float:
        """How far the total is from the goal, as a negative number."""
        return -float(abs(self.goal - self.total))

    def _shown(self) -> str:
        return f"The total is {self.total}."


def price(
    prompts: Any, completions: Any, goal: list[int], environments: list[Counter], **columns: Any
) -> list[float | None]:
    """Half a point for each message. It does not apply where the total is negative."""
    assert [environment.goal for environment in environments] == goal
    assert prompts[0][-1]["content"] == f"Count. The goal is {goal[0]}."
    return [
        None if environment.total < 0 else -0.5 * len(said)
        for environment, said in zip(environments, completions, strict=True)
    ]
