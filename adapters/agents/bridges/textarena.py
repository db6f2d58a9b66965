"""Games of TextArena. Requires textarena (`pip install textarena`)."""

from collections.abc import Callable
from typing import Any

from adapters.agents.messages import Message
from grpo.errors import ConfigError

from .packages import needed
from .seeded import Seeded

MOST_MOVES = 1000
"""How many moves the others may make between two moves of the policy."""


class TextArena:
    """A game of TextArena, which the policy plays alone or against others.

    The policy reads the prompt first, and then what has happened since its last move. The reward comes at the end, as the game
    gives it: 1 for a win, 0 for a draw and -1 for a loss in most games. After an invalid move, most games explain it and ask
    again once. The second one loses, and `info["invalid_move"]` is True. A limit of turns is a rule of the game.

    Args:
        env_id: Name of the game, such as "TicTacToe-v0".
        opponent: Plays all other players: `opponent(text) -> move`. The text is what TextArena shows to its own agents, so one
            of them can be the opponent. None: the game has one player.
        player: Which player the policy is. None: it depends on the seed, so all conversations of a group have the same.
        num_players: Number of players. None: 1 without an opponent, else 2.
        observe: Shortens or rewrites each text that the policy reads. None: the policy reads TextArena's texts.
        options: Options of the game, as `textarena.make` takes them.

    Raises:
        ConfigError: The package textarena is not installed, or there are other players and no opponent.
    """

    def __init__(
        self,
        env_id: str,
        *,
        opponent: Callable[[str], str] | None = None,
        player: int | None = None,
        num_players: int | None = None,
        observe: Callable[[str], str] = str,
        **options: Any,
    ) -> None:
        textarena = needed("textarena", by="TextArena", install="textarena")
        self._num_players = num_players or (1 if opponent is None else 2)
        if (self._num_players > 1 and opponent is None) or (player or 0) >= self._num_players:
            raise ConfigError(
                f"TextArena: player must be below num_players, and other players need an opponent; got player={player}, "
                f"num_players={self._num_players}, opponent={opponent}. Pass opponent=a function from a text to a move."
            )
        self._opponent, self._player, self._observe = opponent, player, observe
        self._game = Seeded(textarena.make, env_id, **options)
        self._inner = self._game.environment
        while isinstance(self._inner, textarena.Wrapper):  # the wrappers repeat all earlier texts in each text
            self._inner = self._inner.env
        self._move = textarena.ObservationType.PLAYER_ACTION

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game, up to the policy's first move."""
        self._game.reset(num_players=self._num_players, seed=seed)
        self._me = self._player if self._player is not None else (seed or 0) % self._num_players
        self._play_others(False)
        return self._text(), {"player": self._me}

    def step(self, action: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the policy's move, and the moves of the others up to the policy's next one."""
        self._play_others(self._is_done or self._game.step(action["content"])[0])
        if not self._is_done:
            return self._text(), 0.0, False, False, {"player": self._me}
        rewards, info = self._game.close()
        reward = float((rewards or {}).get(self._me, 0.0))
        return self._text(), reward, True, False, {"player": self._me, **info[self._me]}

    def _play_others(self, is_done: bool) -> None:
        num_moves = 0
        while not is_done and self._inner.state.current_player_id != self._me:
            if self._opponent is None or num_moves == MOST_MOVES:  # some games ask for ever after invalid moves
                raise RuntimeError(f"the opponent has made {num_moves} moves, and the policy still has none")
            is_done, _ = self._game.step(self._opponent(self._game.get_observation()[1]))
            num_moves += 1
        self._is_done = is_done

    def _text(self) -> str:
        """What has happened since the policy's last move, without this move itself."""
        state = self._inner.state
        messages = state.observations[self._me] if self._is_done else self._inner.get_observation()[1]
        told = [(sender, text) for sender, text, kind in messages if sender != self._me or kind is not self._move]
        return self._observe("\n".join(f"[{state.role_mapping.get(s, f'Player {s}')}] {text}" for s, text in told))
