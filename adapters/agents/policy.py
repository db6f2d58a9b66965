"""A language model that talks and acts over many turns, as a policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adapters.llm import HFPolicy
from grpo import ActionScores, ExperienceBatch, SampledActions
from grpo.arguments import describe, require_integers, require_lengths
from grpo.errors import ConfigError, ContractError
from grpo.rewards import is_async
from grpo.types import CONTINUES

from .branching import Branch, Branching
from .call_check import require_readable_calls
from .chat import Chat, Limits
from .conversations import Conversation, EndedBy, observed_mask, step_mask
from .environments import EnvironmentLoop
from .executed_calls import ExecutedCalls
from .messages import Message
from .rollouts import Job, Rollouts
from .scoring import plan_passes, reference_log_probs, require_observations_of_text, score_conversations
from .speakers import Seat, Speaker
from .turns import ModelTurns, ScriptedTurns


class AgentPolicy:
    """A policy whose actions are whole conversations. States are whatever `make` needs: a task, a scenario, a row of data.

    A `Conversation` is one row. Its steps are the tokens that the model sampled, in all its turns. What the environment said
    is context: the model reads it, and it has no loss. No sampled token is tokenized again, and none is left out.

    All conversations of all groups go on together. Whenever the model is free, it samples the next turn of every conversation
    that waits for one. The random numbers of a conversation are its own, so its tokens do not depend on `concurrency`.

    Args:
        policy: The language model. `policy.sampling.max_new_tokens` limits one message.
        make: Makes the environment of a conversation from its state, `make(state) -> Environment`; or an agent program,
            `async def play(chat, state) -> reward`, which asks `chat` for the model's messages itself.
        max_turns: Maximum number of messages of the model in a conversation.
        max_tokens: Maximum number of tokens of a context. A turn is sampled only if the context has room for
            `max_new_tokens` more, or for the smaller maximum of its request; else the context ends, and the conversation of an
            environment with it. None uses the model's maximum.
        concurrency: Maximum number of conversations at a time.
        timeout: Seconds that an environment or an agent program may take between two messages of the model. A conversation
            that takes longer ends. Seconds in which this process was stopped or had no CPU do not count. None: no limit.
        turn_timeout: Seconds that a message of the model may take, from the request to its end. A conversation that waits for
            longer ends without a reward, so the result of a run depends on the time. None: no limit.
        num_retries: How often a conversation is held again, from its beginning, whose environment or program fails or hangs.
            What was said before is forgotten. Afterwards, the conversation has no reward, and `RewardConfig` decides.
        one_at_a_time: Whether blocking methods of environments are called one after another, because their package is not safe
            in several threads (TextWorld, for example). A method that hangs then holds up all environments. The log says when
            an environment fails beside others and not alone.
        branch: Where the conversations of a group branch. They are sampled, and forwarded, once up to there. A single
            conversation per state does not branch, and `generate_actions` never does. The environments need `snapshot()` and
            `restore(state)`. None: all conversations are independent.
        executor: A `ToolExecutor` of `adapters.tools`, which runs the tool calls of environments, and of programs by
            `chat.call_tools(message)`, in processes of its own: a call that hangs ends at its deadline. Each conversation has a
            folder of its own. None: environments' tools are called in threads of this process.
        observations: Whether to score what the environment and tools answered, too, for `objective.observation_coef`: all
            tokens after the model's first token that it did not sample, the template's around answers included. The first
            message does not count. The same forward passes compute these log-probs, at more positions.
        seats: Who may speak in a conversation, for agent programs: the trained policy in several roles, frozen models such as a
            user, a judge or an older self, and functions. Empty: the trained policy alone.

    Raises:
        ConfigError: A limit is invalid, the tokenizer has no usable chat template, or an option does not fit an agent program
            or an environment.

    Example:
        Train a model on an environment::

            policy = AgentPolicy(HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", lora=True), lambda task: Game(task), max_turns=6)
            trainer = GRPOTrainer(config=GRPOConfig(group_size=8), policy=policy, reward_model=EnvironmentReward())
            trainer.train(tasks, num_iterations=100)
    """

    def __init__(
        self,
        policy: HFPolicy,
        make: Callable[..., Any],
        *,
        max_turns: int = 8,
        max_tokens: int | None = None,
        concurrency: int = 64,
        timeout: float | None = 60.0,
        turn_timeout: float | None = None,
        num_retries: int = 0,
        one_at_a_time: bool = False,
        branch: Branching | None = None,
        executor: Any = None,
        observations: bool = False,
        seats: Sequence[Seat] = (),
    ) -> None:
        if not callable(make):
            raise ConfigError(
                "AgentPolicy: make must be a function state -> Environment, or async def play(chat, state) -> reward; got "
                f"{describe(make)}. Pass a function, such as lambda state: MyEnvironment(state)."
            )
        is_program = is_async(make)
        if is_program and one_at_a_time:
            raise ConfigError(
                "AgentPolicy: one_at_a_time is for environments, whose methods AgentPolicy calls; got an agent program. Leave "
                "it out, and hold a lock around the program's own calls, or set concurrency=1."
            )
        require_integers("AgentPolicy", 1, max_turns=max_turns, concurrency=concurrency)
        require_integers("AgentPolicy", 1, optional=True, max_tokens=max_tokens)
        require_integers("AgentPolicy", 0, num_retries=num_retries)
        for name, seconds in {"timeout": timeout, "turn_timeout": turn_timeout}.items():
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"AgentPolicy: {name} must be above 0; got {seconds}. Pass None for no limit.")
        if branch is not None:
            _require_branching(branch, make, max_turns, executor)
        self.policy, self.make, self.max_turns, self.max_tokens = policy, make, max_turns, max_tokens
        self._speaker = Speaker(policy)
        self.template = self._speaker.template
        require_readable_calls(policy.tokenizer, self.template)
        self.seats = {seat.name: seat for seat in _require_seats(seats, make, policy)}
        """Who may speak in a conversation, by name."""
        self._frozen = {
            name: Speaker(seat.policy) for name, seat in self.seats.items() if isinstance(seat.policy, HFPolicy)
        }
        self.branch, self.executor, self._concurrency = branch, executor, concurrency
        self.observations = observations
        self._executed = None if executor is None else ExecutedCalls(executor)
        self.has_dependent_rows = branch is not None
        """Whether rows of a group share steps, so that `max_at_k` is refused."""
        known = [limit for limit in (max_tokens, policy.max_positions) if limit is not None]
        self._max_tokens = min(known, default=None)
        play = make if is_program else EnvironmentLoop(make, one_at_a_time=one_at_a_time)
        self._rollouts = Rollouts(
            play,
            concurrency=concurrency,
            timeout=timeout,
            turn_timeout=turn_timeout,
            num_retries=num_retries,
            tries_alone=not is_program and not one_at_a_time,
        )
        if hasattr(policy, "reference_log_probabilities"):
            # an attribute, because a policy without a reference must not have this method
            self.reference_log_probabilities = self._reference_log_probabilities

    def generate_actions(
        self, states: Sequence[Any], num_actions_per_state: int, **sampling: Any
    ) -> list[list[Conversation]]:
        """`num_actions_per_state` conversations about each state.

        Args:
            states: B states.
            num_actions_per_state: Number of conversations per state, G.
            sampling: Settings of `SamplingConfig` for this call only, for example `temperature=0`.
        """
        turns = ModelTurns(self.policy, self.template, sampling)
        conversations, _ = self._converse(states, num_actions_per_state, turns)
        return _grouped(conversations, num_actions_per_state)

    def replay(self, states: Sequence[Any], scripts: Sequence[Sequence[str | Message]]) -> list[Conversation]:
        """Conversations in which given messages are said in place of the model's, for supervised training.

        The environments answer as in a rollout, and the template writes the context. The log-probs of the conversations are
        NaN: nobody sampled them. `score_actions` gives the model's log-probs.

        Args:
            states: N states.
            scripts: The turns of each conversation: a text as the model would write it, tool calls included, or a message.
                A conversation ends after its script, if the environment has not ended it.

        Raises:
            ContractError: A conversation ended before its script, or a turn is longer than `sampling.max_new_tokens`.

        """
        require_lengths("AgentPolicy.replay", len(states), scripts=scripts)
        turns = ScriptedTurns(self.policy, self.template, scripts)
        conversations, _ = self._converse(states, 1, turns)
        for i, conversation in enumerate(conversations):
            if len(conversation.turns) < turns.max_turns(i):
                raise ContractError(
                    f"AgentPolicy.replay: conversation {i} must have the {turns.max_turns(i)} turns of its script; it ended "
                    f"after {len(conversation.turns)} by {conversation.ended_by!r}, info={conversation.info}. Shorten the "
                    "script, or raise the limit."
                )
        return conversations

    def demonstrations(self, states: Sequence[Any], scripts: Sequence[Sequence[str | Message]]) -> ExperienceBatch:
        """The conversations of `replay` as demonstrations, to imitate.

        Example:
            A supervised warm start::

                given = policy.demonstrations(states, scripts)
                trainer.train(None, demonstrations=given, num_iterations=100)
        """
        conversations = self.replay(states, scripts)
        is_masked = self.policy.options.mask_truncated
        given = ExperienceBatch.from_demonstrations(
            states, conversations, mask=step_mask(conversations, mask_truncated=is_masked)
        )
        return replace(given, observed_mask=self._observed_mask(conversations))

    def _observed_mask(self, conversations: Sequence[Conversation]) -> Bool[Tensor, "N O"] | None:
        if not self.observations:
            return None
        require_observations_of_text(conversations)
        return observed_mask(conversations, mask_truncated=self.policy.options.mask_truncated)

    def sample_actions(self, states: Sequence[Any], num_actions_per_state: int) -> SampledActions:
        """Conversations with their log-probs under the sampling distribution and, if sampling is exact, their scores.

        Raises:
            ConfigError: `num_actions_per_state` is no multiple of the number of rows that grow from one root.
        """
        branching = None if num_actions_per_state == 1 else self.branch  # an evaluation
        turns = ModelTurns(self.policy, self.template, {})
        conversations, metrics = self._converse(states, num_actions_per_state, turns, branching)
        device = next(iter(self.policy.model.parameters())).device
        mask = step_mask(conversations, mask_truncated=self.policy.options.mask_truncated)
        behaviour = torch.zeros(mask.shape)
        for row, conversation in zip(behaviour, conversations, strict=True):
            log_probs = torch.tensor(conversation.behaviour_log_probs)[: mask.shape[1]]
            row[: len(log_probs)] = log_probs
        mask, behaviour = mask.to(device), behaviour.to(device)
        return SampledActions(
            actions=_grouped(conversations, num_actions_per_state),
            mask=mask,
            behaviour_log_probs=behaviour,
            scores=ActionScores(log_probs=behaviour, mask=mask) if turns.is_exact else None,
            observed_mask=self._observed_mask(conversations),
            metrics=metrics,
        )

    def score_actions(self, states: Sequence[Any], actions: Sequence[Conversation]) -> ActionScores:
        """Scores of N conversations: each sampled token in the context in which it was sampled, and each observation."""
        return score_conversations(self.policy, actions, with_observations=self.observations)

    def get_log_probabilities(self, states: Sequence[Any], actions: Sequence[Conversation]) -> Float[Tensor, " N"]:
        """The sum of the log-probs of each conversation's steps."""
        return self.score_actions(states, actions).log_probs.sum(1)  # masked log-probs are 0

    def _reference_log_probabilities(
        self, states: Sequence[Any], actions: Sequence[Conversation]
    ) -> Float[Tensor, "N T"]:
        return reference_log_probs(self.policy, actions)

    def plan_micro_batches(self, states: Sequence[Any], actions: Sequence[Conversation]) -> list[Sequence[int]]:
        """Rows of each forward pass, within the language model's `max_tokens_per_forward` positions."""
        return plan_passes(self.policy, actions)

    def state_keys(self, states: Sequence[Any], actions: Sequence[Conversation]) -> Int[Tensor, "N T"]:
        """The state in which each step was taken, for GiGPO: what the environment's `state_key()` returned before its turn.
        With branches, it is the last fork before the step.

        A decision is a turn, or all turns between two forks. Its first token has the key, and the others continue it, so that
        long turns do not count more than short ones.

        Raises:
            ConfigError: An environment has no `state_key()`.
        """
        if any(turn.state_key is None for action in actions for turn in action.turns):
            raise ConfigError(
                "advantage.credit='gigpo' needs the state before each message; an environment has no state_key(). Add the "
                "method, which returns an equal value in equal states, or set chat.state_key in an agent program."
            )
        known: dict[Any, int] = {}
        keys = torch.zeros(step_mask(actions).shape, dtype=torch.int64)
        for row, action in zip(keys, actions, strict=True):
            row[: len(action)] = CONTINUES
            begin = 0
            for turn in action.turns:
                if not turn.continues:
                    row[begin] = known.setdefault(turn.state_key, len(known))
                begin += turn.num_tokens
        return keys

    def sync_sampler(self) -> None:
        """Send the model's weights to the sampler, if the sampler has its own copy of them."""
        self.policy.sync_sampler()

    def shard_units(self) -> list[torch.nn.Module]:
        """Refuse `grpo.distributed.Sharded`: the number of passes through the layers depends on the conversations."""
        raise ConfigError("AgentPolicy: weights cannot be divided among ranks; got the engine Sharded. Use Replicated.")

    def settings(self) -> dict[str, Any]:
        """How the language model samples."""
        return self.policy.settings()

    def get_parameters(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return self.policy.get_parameters()

    def train(self) -> "AgentPolicy":
        """Set the model to training mode, which turns dropout on."""
        self.policy.train()
        return self

    def eval(self) -> "AgentPolicy":
        """Set the model to evaluation mode, which turns dropout off."""
        self.policy.eval()
        return self

    def to(self, device: torch.device | str) -> "AgentPolicy":
        """Move the model and its reference to a device."""
        self.policy.to(device)
        return self

    def _converse(
        self,
        states: Sequence[Any],
        size: int,
        turns: ModelTurns | ScriptedTurns,
        branching: Branching | None = None,
    ) -> tuple[list[Conversation], dict[str, float]]:
        """`size` conversations per state, in order, and the metrics."""

        def make_chat(job: Job, sample: Any) -> Chat:
            limits = Limits(
                max_turns=min(self.max_turns, turns.max_turns(job.index)),
                max_tokens=self._max_tokens,
                max_new_tokens=turns.max_new_tokens,
            )
            chat = Chat(
                self._speaker,
                sample,
                limits,
                seed=job.seed,
                sampling_seed=job.sampling_seed,
                seats=self.seats,
                frozen=self._frozen,
                executed=self._executed,
            )
            if branching is not None:
                chat.branch = Branch(branching=branching, leaf=job.index, num_leaves=branching.num_leaves)
            return chat

        num_leaves = 1 if branching is None else branching.num_leaves
        if size % num_leaves:
            raise ConfigError(
                f"AgentPolicy: the group size must be a multiple of {num_leaves}, the number of rows that grow from one root "
                f"with branch.width={branching and branching.width}; got {size}. Use {size + num_leaves - size % num_leaves}."
            )
        seeds = torch.randint(2**31, (len(states),)).tolist()
        sampling_seeds = torch.randint(2**62, (len(states) * size // num_leaves,)).tolist()
        jobs = [
            Job(index=i, state=states[i // size], seed=seeds[i // size], sampling_seed=sampling_seeds[i // num_leaves])
            for i in range(0, len(states) * size, num_leaves)
        ]
        num_abandoned, num_retried, num_lost = self._counts()
        with self.policy.keeping_prefixes(self._concurrency):
            held = self._rollouts.run(jobs, make_chat, turns)
        repeats = [1 if chat.branch is None else chat.branch.num_leaves for chat, _ in held]
        conversations = [c for (_, c), count in zip(held, repeats, strict=True) for _ in range(count)]
        metrics = _metrics(held, conversations, self._rollouts.num_abandoned - num_abandoned)
        counts = {"retries": self._counts()[1] - num_retried, "lost_calls": self._counts()[2] - num_lost}
        return conversations, metrics | {f"agents/{name}": float(count) for name, count in counts.items()}

    def _counts(self) -> tuple[int, int, int]:
        """Environments that hang, conversations that were held again, and lost calls, so far."""
        num_lost = 0 if self._executed is None else self._executed.num_lost
        return self._rollouts.num_abandoned, self._rollouts.num_retried, num_lost


def _metrics(
    held: Sequence[tuple[Chat, Conversation]], conversations: Sequence[Conversation], num_abandoned: int
) -> dict[str, float]:
    """Counts and sums of a rollout, because metrics of several rollouts are added. Turns that branches share count once."""
    begins = [0 if chat.branch is None else chat.branch.num_shared_turns for chat, _ in held]
    turns = [turn for (_, c), begin in zip(held, begins, strict=True) for turn in c.turns[begin:]]
    metrics = {
        "agents/turns": float(len(turns)),
        "agents/tokens": float(sum(turn.num_tokens for turn in turns)),
        "agents/contexts": float(sum(len(c.segments) for _, c in held)),
        "agents/malformed_calls": float(sum(chat.counts["malformed_calls"] for chat, _ in held)),
        "agents/failed_calls": float(sum(chat.counts["failed_calls"] for chat, _ in held)),
        "agents/abandoned": float(num_abandoned),
    }
    for seat in dict.fromkeys(turn.seat for turn in turns if turn.seat is not None):
        rewards = [turn.reward for turn in turns if turn.seat == seat]
        metrics[f"agents/turns_of/{seat}"] = float(len(rewards))
        metrics[f"agents/rewards_of/{seat}"] = sum(reward for reward in rewards if not math.isnan(reward))
    for name in dict.fromkeys(name for chat, _ in held for name in chat.counts if name.startswith("turns_of/")):
        metrics[f"agents/{name}"] = float(sum(chat.counts.get(name, 0) for chat, _ in held))
    for reason in get_args(EndedBy):
        metrics[f"agents/ended_by_{reason}"] = float(sum(c.ended_by == reason for c in conversations))
    return metrics


def _require_seats(seats: Any, make: Any, policy: HFPolicy) -> Sequence[Seat]:
    names = [getattr(seat, "name", None) for seat in seats]
    if not all(isinstance(seat, Seat) for seat in seats) or len({*names}) < len(names):
        raise ConfigError(
            f"AgentPolicy: seats must be a list of Seat with a name each; got {describe(seats)}, {names}."
        )
    if same := [seat.name for seat in seats if seat.policy is policy]:
        raise ConfigError(
            "AgentPolicy: the model of a seat must be another one than the trained model, which is not frozen; got the trained "
            f"one for {same}. Leave policy=... out, or pass a copy."
        )
    if seats and not is_async(make):
        raise ConfigError(
            "AgentPolicy: seats need an agent program, which says who speaks; got an environment. Pass async def play(chat, "
            "state), or remove seats=[...]."
        )
    return seats


def _require_branching(branch: Any, make: Any, max_turns: int, executor: Any) -> None:
    if not isinstance(branch, Branching):
        raise ConfigError(f"AgentPolicy: branch must be a Branching; got {describe(branch)}. Pass Branching(...).")
    if is_async(make):
        raise ConfigError(
            "AgentPolicy: branch needs environments, whose state can be copied; got an agent program, which cannot continue in "
            "several ways. Pass a function state -> Environment, or remove branch=..."
        )
    if executor is not None:
        raise ConfigError(
            "AgentPolicy: branch needs tools without files, because those of an executor are not copied; got branch=... and "
            "executor=... Remove one of them."
        )
    if branch.at[-1] >= max_turns:
        raise ConfigError(
            f"AgentPolicy: branch.at must be below max_turns={max_turns}, else nothing follows the fork; got {branch.at}."
        )


def _grouped(conversations: list[Conversation], size: int) -> list[list[Conversation]]:
    return [conversations[begin : begin + size] for begin in range(0, len(conversations), size)]
