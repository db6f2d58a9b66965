"""Questions of reasoning_gym. Requires reasoning-gym (`pip install reasoning-gym`)."""

from typing import Any

from adapters.agents.messages import Message

from .packages import needed


class ReasoningGym:
    """A question of one of reasoning_gym's sets. The reward is the set's own score of the answer, from 0 to 1.

    The answer is what stands between `<answer>` and `</answer>`, or else the whole message. An answer that the set cannot read
    has the reward 0.

    Args:
        name: Name of the set, such as "chain_sum".
        config: Settings of the set. With `seed=...` the question is always the same. Without it, the question depends on the
            seed of the group.
    """

    def __init__(self, name: str, **config: Any) -> None:
        self._package = needed("reasoning_gym", by="ReasoningGym", install="reasoning-gym")
        self._name, self._config = name, config

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """The question."""
        self._set = self._package.create_dataset(self._name, **{"seed": seed, "size": 1, **self._config})
        self._entry = self._set[0]
        return self._entry["question"], {}

    def step(self, action: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The score of the answer."""
        answer = self._package.utils.extract_answer(action["content"]) or action["content"].strip()
        try:
            score = self._set.score_answer(answer, self._entry)
        except Exception:  # some sets raise an error for an answer in another form, which is a wrong answer
            score = 0.0
        return "", float(score), True, False, {"answer": self._entry["answer"]}
