"""A server of OpenEnv with one environment: it asks for a digit twice, and each digit in an answer is worth a quarter.

python -m tests.frameworks.openenv_server PORT
"""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Says(Action):
    message: str


class Asks(Observation):
    text: str


class Digits(Environment[Says, Asks, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Asks:
        self.turn = 0
        return Asks(text="a digit please")

    def step(self, action: Says, timeout_s: float | None = None, **_: Any) -> Asks:
        self.turn += 1
        digits = sum(character.isdigit() for character in action.message)
        return Asks(text="another one", reward=digits / 4, done=self.turn == 2)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)


if __name__ == "__main__":
    app = create_app(Digits, Says, Asks, env_name="digits", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
