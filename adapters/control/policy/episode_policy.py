"""A policy whose actions are whole episodes of a Gymnasium environment."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor, nn

from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask, pad_to_steps
from adapters.control.environments.masks import KEY, flat_mask, take_mask
from adapters.control.environments.pools import EnvironmentPool, WorkerLost
from grpo.arguments import (
    describe,
    refuse_options,
    require_instances,
    require_integers,
    require_lengths,
    with_checked_arguments,
)
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores, ExperienceBatch, SampledActions

from .building import networks_of, pool_of
from .distributions import ActionDistribution, Kind, distribution_for
from .fast_forward import fast_forward
from .observations import ObservationEncoder, RunningNormalizer, as_batch
from .open_episodes import OpenEpisodes
from .options import EpisodeOptions
from .policy_files import as_bytes, as_name, as_plain, load_policy, require_same, save_policy
from .rollouts import MAX_LOSSES_IN_A_ROW, MAX_STEPS, Decide, Record, require_finite, roll_out, take_steps
from .sampled_episodes import (
    EpisodeWarnings,
    all_steps,
    as_episodes,
    metrics_of,
    metrics_of_ended,
    recorded_episode,
)

ActionMask: TypeAlias = Literal["info"] | Callable[[Tensor], Tensor] | None
"""Source of action masks: `info` takes those of the environment, from `info["action_mask"]`, `action_masks()` or the part
`action_mask` of its observations; a function maps encoded observations [n, ...] to bool [n, K]."""

LOGGER = logging.getLogger("grpo")


class EpisodePolicy(nn.Module):
    """A policy over episodes: pi(episode | start) = product over steps of pi(action | observation).

    States are `EpisodeStart`s and actions are `Episode`s. A pool of environments runs all episodes of all groups together.
    Updates use shuffled minibatches of single steps from all episodes (`SplitsSteps`).

    Args:
        environment: An id, a function that creates an environment, a Gymnasium vector environment, or a pool of `make_pool`.
        num_members: Number of concurrent environments. More members use each forward pass better and take more memory. None
            uses the number of environments of a given vector environment or pool, otherwise 16.
        torso: Module from observations [n, *shape] to features [n, F], without a memory. None uses `mlp_torso`, or `CNNTorso`
            for images.
        distribution: Action distribution: `gaussian` (`auto` for boxes), `squashed`, `beta`, or an `ActionDistribution`.
        critic: Whether to also predict `values` with a network like the actor's (for `credit="gae"`), or a module from
            observations to [n, 1].
        action_mask: Source of the mask of allowed categories. None allows all.
        options: All other settings. None uses the defaults of `EpisodeOptions`.
        make: Keywords of `make_pool`: `vectorization`, and keywords of the environment.

    Raises:
        ConfigError: The environment cannot be created, a space is not supported, or settings contradict each other.
    """

    _sampled_with: Tensor

    @with_checked_arguments
    def __init__(
        self,
        environment: Any,
        *,
        num_members: int | None = None,
        torso: nn.Module | None = None,
        distribution: Kind | ActionDistribution = "auto",
        critic: bool | nn.Module = False,
        action_mask: ActionMask = None,
        options: EpisodeOptions | None = None,
        **make: Any,
    ) -> None:
        super().__init__()
        require_instances("EpisodePolicy", nn.Module | None, "an nn.Module or None", torso=torso)
        require_instances(
            "EpisodePolicy", str | ActionDistribution, "a name or distribution", distribution=distribution
        )
        require_instances("EpisodePolicy", nn.Module | bool, "True, False or an nn.Module", critic=critic)
        require_instances("EpisodePolicy", EpisodeOptions | None, "EpisodeOptions or None", options=options)
        refuse_options("EpisodePolicy", EpisodeOptions, make)
        options = options or EpisodeOptions()
        is_info = isinstance(action_mask, str) and action_mask == "info"
        if not (action_mask is None or is_info or callable(action_mask)):
            raise ConfigError(
                f"EpisodePolicy: action_mask must be 'info', a callable (encoded observations -> bool [n, K]) or None; got "
                f"{action_mask!r}."
            )
        if options.repeat > 1 and action_mask is not None:
            raise ConfigError(
                f"EpisodePolicy: repeat={options.repeat} and an action mask contradict each other, because an action that is "
                "repeated may be masked by then. Use repeat=1, or let the environment repeat."
            )
        self.pool, self._make_evaluation_pool = pool_of(
            environment, num_members, make, infos=is_info, names=list(inspect.signature(EpisodePolicy).parameters)
        )
        self.max_episode_steps, self.repeat = options.max_episode_steps, options.repeat
        self.time_limit = self._time_limit(None)
        self.num_steps = options.num_steps
        self.open_episodes = None if options.num_steps is None else OpenEpisodes(self.pool.num_members)
        self.encoder = ObservationEncoder(self.pool.observation_space, keeps_images=torso is not None)
        self.distribution = (
            distribution_for(self.pool.action_space, distribution) if isinstance(distribution, str) else distribution
        )
        if action_mask is not None and not self.distribution.num_categories:
            raise ConfigError(
                f"EpisodePolicy: action_mask needs actions with categories, Discrete or MultiDiscrete; got "
                f"{self.pool.action_space}. Declare bits as MultiDiscrete([2, 2, ...]), whose masks have two entries per bit, "
                "or leave action_mask out."
            )
        self.action_mask = action_mask
        self.state_key_decimals = options.state_key_decimals
        scales_pixels = self.encoder.is_image or (self.encoder.has_images and torso is None)
        if options.normalize_observations and scales_pixels:
            raise ConfigError(
                "EpisodePolicy: normalize_observations=True does not support images, whose networks scale pixels. Leave it "
                "out. With a preset: dataclasses.replace(preset, normalize_observations=False)."
            )
        self.normalizer = RunningNormalizer(self.encoder.shape) if options.normalize_observations else None
        self.actor, self.critic = networks_of(self.encoder, self.distribution, torso, critic, options)
        # what a file of `save` needs to build the policy again
        self._arguments = {
            "environment": as_plain(environment),
            "torso": as_plain(torso),
            "distribution": as_plain(distribution),
            "critic": as_plain(critic),
            "action_mask": as_plain(action_mask),
            "num_members": self.pool.num_members,
            "options": options.to_dict(),
            "make": {} if isinstance(environment, EnvironmentPool) else {k: as_plain(v) for k, v in make.items()},
        }
        # what decides what a weight means: policies of equal shapes may read the same weights differently
        self._built = {
            "observations": list(self.encoder.shape),
            "actions": str(self.pool.action_space),
            "distribution": type(self.distribution).__name__,
            "torso": [list(options.hidden), options.activation] if torso is None else type(torso).__name__,
            "std": options.std,
            "normalize_observations": options.normalize_observations,
            "critic": self.critic is not None,
        }
        self._evaluation_pool: EnvironmentPool | None = None
        self._warnings = EpisodeWarnings(
            has_limit=(self.max_episode_steps, self.pool.max_episode_steps) != (None, None)
        )
        self._has_said_masks = False
        # a buffer, so that a resumed run knows whether these weights have sampled; NaN differs from all weights
        self.register_buffer("_sampled_with", torch.full_like(self._fingerprint(), torch.nan))
        if options.split_steps:  # an attribute, because a method would declare the capability in both cases
            self.split_steps = self._split_steps

    def _time_limit(self, max_steps: int | None) -> int:
        """The maximum length of an episode: `max_steps` and the environment's limit, or else `max_episode_steps`."""
        limits = [limit for limit in (max_steps, self.pool.max_episode_steps) if limit is not None]
        return min(limits, default=self.max_episode_steps or MAX_STEPS)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EpisodePolicy":
        """Copy the weights and share the environments. Use copies for scoring, or let only one policy sample at a time."""
        for shared in (self.pool, self.open_episodes, self._evaluation_pool):
            memo[id(shared)] = shared
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    # Sampling

    @torch.no_grad()
    def sample_actions(self, states: Sequence[EpisodeStart], num_actions_per_state: int) -> SampledActions:
        """Sample G episodes from each of B starts, with their scores. Seeds come from torch's global generator."""
        require_instances("EpisodePolicy", Sequence, "a list of EpisodeStart objects", states=states)
        if not states:
            raise ContractError(
                f"EpisodePolicy: states must be a list of EpisodeStart objects; got {describe(states)}. Use episode_starts()."
            )
        require_integers("EpisodePolicy", 1, num_actions_per_state=num_actions_per_state)
        weights = self._fingerprint()
        if self.normalizer is not None and not torch.equal(weights, self._sampled_with):
            self.normalizer.begin()  # statistics change together with the weights, so the policy is constant between updates
        self._sampled_with.copy_(weights)
        starts = [_seeded(state) for state in states]
        metrics: dict[str, float] = {}
        generator = torch.get_rng_state()
        if self.open_episodes is None:
            rows = [start for start in starts for _ in range(num_actions_per_state)]
            record = self.roll_out(rows, seed=draw_seed(), max_steps=self.max_episode_steps)
        else:
            self._require_members(len(starts), num_actions_per_state)
            before = list(self.open_episodes.by_member)
            record = self._roll_on(starts, self.open_episodes)
            metrics = metrics_of_ended(record, before)
        # from the outputs that drew the actions, so that no forward pass is repeated
        scores = self._score_steps(record.observations, record.actions, record.allowed, parameters=record.parameters)
        episodes = as_episodes(record, scores.log_probs.squeeze(1).cpu())
        self._warnings.look_at_generator(generator, torch.get_rng_state())
        self._warnings.look_at(record, episodes, num_actions_per_state)
        scores = self._as_rows(scores, episodes)
        if self.normalizer is not None:  # last: if memory runs out before, these episodes are discarded
            self.normalizer.see(record.observations.to(self.device))
        grouped = [episodes[i : i + num_actions_per_state] for i in range(0, len(episodes), num_actions_per_state)]
        return SampledActions(
            actions=grouped,
            mask=scores.mask,
            behaviour_log_probs=scores.log_probs,
            scores=scores,
            metrics=metrics_of(record) | metrics,
        )

    def _require_members(self, num_starts: int, num_actions_per_state: int) -> None:
        if num_actions_per_state > 1:
            raise ConfigError(
                f"EpisodePolicy: num_steps={self.num_steps} lets episodes go on from where they stood, so a group has "
                f"no common start; got groups of {num_actions_per_state}. Use group_size=1, and "
                "GRPOTrainer(advantages=FittedAdvantages(...)) or a critic, which compare nothing within a group."
            )
        if num_starts > self.pool.num_members:
            raise ConfigError(
                f"EpisodePolicy: num_steps={self.num_steps} needs a member per state, because episodes stay in theirs; got "
                f"{num_starts} states and num_members={self.pool.num_members}. Pass num_members={num_starts}, or fewer states."
            )

    def _roll_on(self, starts: Sequence[EpisodeStart], going_on: OpenEpisodes) -> Record:
        """Take `num_steps` steps in each member, in its open episode or in one that begins."""
        seed, num_lost, num_losses = draw_seed(), 0, 0
        while True:
            num_lost += going_on.stand(self.pool, self.encoder, self._take_again)
            going_on.are_standing = False  # until this has ended well
            try:
                record = roll_out(
                    self.pool,
                    starts,
                    decide=self._decider(),
                    distribution=self.distribution,
                    encode=self.encoder,
                    allow=self._allow,
                    seed=seed,
                    max_steps=self._time_limit(self.max_episode_steps),
                    repeat=self.repeat,
                    num_steps=self.num_steps,
                    open_episodes=going_on.by_member,
                )
            except WorkerLost as lost:
                num_lost, num_losses = num_lost + len(lost.members), num_losses + 1
                if num_losses <= MAX_LOSSES_IN_A_ROW:
                    continue
                raise ContractError(
                    f"Environments were lost {num_losses} times in one iteration. The last loss: {lost.reason}. Run them with "
                    "vectorization='sync' to see the environment's own errors."
                ) from lost
            going_on.put(record.going_on)
            return replace(record, num_lost=num_lost)

    def _take_again(
        self, members: NDArray[np.int64], actions: Tensor, taken: NDArray[np.int64]
    ) -> tuple[Tensor, NDArray[np.bool_], NDArray[np.int64]]:
        left = self._time_limit(self.max_episode_steps) - taken
        step, counts = take_steps(self.pool, members, self.distribution.to_env(actions), left, self.repeat)
        return self.encoder(step.observations), step.terminated | step.truncated, taken + counts

    @property
    def _pool_of_whole_episodes(self) -> EnvironmentPool:
        """The pool for evaluations: one of its own if episodes go on in the other, and the environments can be made again."""
        if self.open_episodes is None:
            return self.pool
        if self._make_evaluation_pool is None:
            self.open_episodes.are_standing = False  # the evaluation moves them, so training replays them afterwards
            return self.pool
        if self._evaluation_pool is None:
            self._evaluation_pool = self._make_evaluation_pool()
        return self._evaluation_pool

    @torch.no_grad()
    def roll_out(
        self,
        starts: Sequence[EpisodeStart],
        *,
        seed: int,
        max_steps: int | None = None,
        deterministic: bool = False,
    ) -> Record:
        """Run one episode from each start.

        Args:
            starts: The starts, one per episode.
            seed: Seed of the noise.
            max_steps: Maximum length of an episode, in addition to the environment's own limit. None uses the policy's
                `max_episode_steps` if the environment has no limit.
            deterministic: Whether to take the most likely action at each step, instead of a random one.
        """
        return roll_out(
            self._pool_of_whole_episodes,
            starts,
            decide=self._decider(),
            distribution=self.distribution,
            encode=self.encoder,
            allow=self._allow,
            seed=seed,
            max_steps=self._time_limit(max_steps),
            repeat=self.repeat,
            deterministic=deterministic,
        )

    def generate_actions(
        self, states: Sequence[EpisodeStart], num_actions_per_state: int, **kwargs: Any
    ) -> list[list[Episode]]:
        """Sample episodes as `sample_actions` does, and return them without scores."""
        return self.sample_actions(states, num_actions_per_state).actions

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[Any, Any]:
        """Actions for one observation or a batch, with the signature of Stable-Baselines3's `predict`.

        Args:
            observation: An observation of the environment, or a batch of observations.
            state: Returned unchanged. Stable-Baselines3 uses it for recurrent policies.
            episode_start: Ignored. Stable-Baselines3 uses it for recurrent policies.
            deterministic: Whether to return the most likely action (the mean of a Gaussian) instead of a random action.
            action_masks: The mask of the observation, or one mask for each of a batch, as in sb3-contrib. It is required with
                `action_mask="info"`, unless the observation contains it.

        Returns:
            The action or batch of actions in the environment's format, and `state`.

        Raises:
            ContractError: The observation does not fit its space, or is not finite.
            ConfigError: There is no mask, and the policy needs one.
        """
        if (
            self.action_mask == "info"
            and action_masks is None
            and isinstance(observation, Mapping)
            and KEY in observation
        ):
            observation, action_masks = take_mask(observation)
        batch, single = as_batch(self.pool.observation_space, observation)
        observations = self.encoder(batch)
        if action_masks is not None:
            given = [action_masks] if single else action_masks
            allowed: Tensor | None = self._masks_of(given)
        elif self.action_mask == "info":
            raise ConfigError(
                "EpisodePolicy.predict gets no info, which action_mask='info' needs. Pass action_masks=info['action_mask'], or "
                "use evaluate_policy."
            )
        else:
            allowed = self._allow(observations, None)
        actions = self.act(observations, allowed, deterministic=deterministic)
        taken = self.distribution.to_env(actions)
        return (taken[0] if single else taken), state

    @torch.no_grad()
    def act(self, observations: Tensor, allowed: Tensor | None, *, deterministic: bool) -> Shaped[Tensor, "n *action"]:
        """Encoded actions for encoded observations. Random actions use torch's global generator."""
        parameters = self.decide(observations).cpu()
        require_finite(parameters)
        if deterministic:
            return self.distribution.mode(parameters, allowed)
        rng = np.random.default_rng(draw_seed())
        noise = torch.from_numpy(self.distribution.noise(rng, len(observations)))
        return self.distribution.sample(parameters, noise, allowed)

    def decide(self, observations: Shaped[Tensor, "n *features"]) -> Float[Tensor, "n P"]:
        """Parameters of the action distribution."""
        return self.actor(self._prepared(observations))

    def _decider(self) -> Decide:
        """`decide` for rollouts. It computes in NumPy if the network is supported and the batch is small."""
        fast = fast_forward(self.normalizer, self.actor)

        def decide(observations: Tensor) -> Tensor:
            if fast is not None and len(observations) <= fast.max_rows:
                return torch.from_numpy(fast(observations.numpy()))
            return self.decide(observations).cpu()

        return decide

    def demonstrations(self, observations: Sequence[Any], actions: Sequence[Any]) -> ExperienceBatch:
        """Recorded episodes to imitate, as demonstrations: what somebody else did in this environment.

        Args:
            observations: For each episode, the observations at its L decisions as a batch [L, ...], in the environment's
                format. A batch [L + 1, ...] also has the observation after the last decision.
            actions: For each episode, the L actions as a batch [L, ...], in the environment's format.

        Example:
            A supervised warm start from one episode of an expert::

                given = policy.demonstrations([expert_observations], [expert_actions])
                trainer.train(None, demonstrations=given, num_iterations=50)

        Raises:
            ConfigError: The masks of allowed actions come from the environment, which a recording does not have.
            ContractError: An episode's observations and actions do not fit together, or not into the environment's spaces.
        """
        if self.action_mask == "info":
            raise ConfigError(
                "EpisodePolicy.demonstrations: a recording has no masks, which action_mask='info' needs. Make Episode objects "
                "with `allowed`, and pass them to ExperienceBatch.from_demonstrations."
            )
        require_lengths("EpisodePolicy.demonstrations", len(observations), actions=actions)
        given = zip(observations, actions, strict=True)
        episodes = [recorded_episode(self.encoder, self.distribution, *one, self.action_mask) for one in given]
        starts = [EpisodeStart()] * len(episodes)
        return ExperienceBatch.from_demonstrations(starts, episodes, mask=episode_mask(episodes) if episodes else None)

    # Scoring

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        """Scores of whole episodes [N, T], or of single steps from `split_steps` [S, 1], in one forward pass."""
        if isinstance(actions, Tensor):
            require_instances("EpisodePolicy", Tensor, "a tensor like actions, from split_steps", states=states)
            observations, allowed = self._unpacked(states)
            return self._score_steps(observations, actions, allowed)
        return self._as_rows(self._score_steps(*all_steps(actions)), actions)

    def get_log_probabilities(self, states: Any, actions: Any) -> Float[Tensor, " N"]:
        """log pi of whole episodes, summed over their steps."""
        return self.score_actions(states, actions).log_probs.sum(1)

    def _split_steps(self, states: Any, actions: Sequence[Episode]) -> tuple[Tensor, Tensor]:
        """Split episodes into rows of one step: the observation (with its mask, concatenated) and the action."""
        observations, taken, allowed = all_steps(actions)
        if allowed is not None:
            observations = torch.cat([observations.flatten(1).float(), allowed.float()], dim=1)
        return observations, taken

    def _unpacked(self, steps: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split rows of `split_steps` into observations and masks."""
        if self.action_mask is None:
            return steps, None
        width = int(np.prod(self.encoder.shape))
        observations = steps[:, :width].unflatten(1, self.encoder.shape)
        return observations.to(self.encoder.dtype), steps[:, width:].bool()

    def state_keys(self, states: Any, actions: Sequence[Episode]) -> Int[Tensor, "N T"]:
        """A number for each observation, equal for observations that agree to `state_key_decimals` decimals."""
        observations = torch.cat([episode.observations for episode in actions]).flatten(1)
        rounded = (observations.double() * 10.0**self.state_key_decimals).round().long()
        odd = np.random.default_rng(0).integers(2**62, size=rounded.shape[1], dtype=np.int64) * 2 + 1
        hashes = (rounded * torch.from_numpy(odd)).sum(1)  # overflow wraps around
        return pad_to_steps(hashes, episode_mask(actions))

    def _score_steps(
        self, observations: Tensor, actions: Tensor, allowed: Tensor | None, parameters: Tensor | None = None
    ) -> ActionScores:
        """Score each step as a row of its own, [S, 1]."""
        device = self.device
        observations, actions = observations.to(device), actions.to(device)
        allowed = None if allowed is None else allowed.to(device)
        prepared = self._prepared(observations)
        found = self.actor(prepared) if parameters is None else parameters.to(device)
        log_probs = self.distribution.log_prob(found, actions, allowed)
        entropy = self.distribution.entropy(found, allowed)
        return ActionScores(
            log_probs=log_probs.unsqueeze(1),
            mask=torch.ones(len(log_probs), 1, dtype=torch.bool, device=device),
            entropy=None if entropy is None else entropy.unsqueeze(1),
            values=None if self.critic is None else self.critic(prepared),
        )

    def _as_rows(self, steps: ActionScores, episodes: Sequence[Episode]) -> ActionScores:
        """Rearrange scores from [S, 1] to [N, T], and add the critic's values at the end of truncated episodes."""
        mask = episode_mask(episodes, self.device)

        def padded(values: Tensor | None) -> Tensor | None:
            return None if values is None else pad_to_steps(values.squeeze(1), mask)

        final_values = None
        if self.critic is not None:
            last = torch.stack([episode.final_observation for episode in episodes]).to(self.device)
            cut_off = torch.tensor([not episode.terminated for episode in episodes], device=self.device)
            final_values = torch.where(cut_off, self.critic(self._prepared(last)).squeeze(1), 0.0)
        return ActionScores(
            log_probs=pad_to_steps(steps.log_probs.squeeze(1), mask),
            mask=mask,
            entropy=padded(steps.entropy),
            values=padded(steps.values),
            final_values=final_values,
        )

    # Files

    def save(self, path: str | Path) -> Path:
        """Write the policy to one file: weights, statistics of observations, and how it was built. `EpisodePolicy.load` reads
        it, also in another process.

        Args:
            path: The file, such as `cartpole.safetensors`. Missing folders are created, and a file that is there is replaced.

        Returns:
            The path.
        """
        state = self.state_dict() | {"_extra_state": as_bytes(self._built)}  # without episodes that go on
        return save_policy(path, state, self._arguments)

    @classmethod
    def load(cls, path: str | Path, **arguments: Any) -> "EpisodePolicy":
        """Build the policy that `save` has written.

        Args:
            path: The file.
            arguments: Arguments of the policy, in place of those in the file. What a file cannot hold has to be passed: a
                function that creates the environment, a torso, a distribution or a critic of your own, or a function as
                `action_mask`.

        Raises:
            ConfigError: What a file cannot hold was not passed.
            CheckpointError: The file is damaged, or the policy is built in another way than the one that was saved.
        """

        def build(found: dict[str, Any]) -> EpisodePolicy:
            if isinstance(found["options"], Mapping):
                found["options"] = EpisodeOptions.from_dict(found["options"])
            return cls(**found)

        policy: EpisodePolicy = load_policy(path, build, arguments)
        return policy

    def get_extra_state(self) -> Any:
        """How the policy is built, as a part of its state dict, and the episodes that go on."""
        built = as_bytes(self._built)
        return built if self.open_episodes is None else {"built": built, **self.open_episodes.state_dict()}

    def set_extra_state(self, state: Any) -> None:
        """Check that weights belong to a policy that is built like this one, and go on with the episodes.

        Raises:
            CheckpointError: Names what differs.
        """
        has_episodes = isinstance(state, Mapping)
        require_same(type(self).__name__, state["built"] if has_episodes else state, self._built)
        if has_episodes and self.open_episodes is not None:
            self.open_episodes.load_state_dict(state)

    # Several ranks

    def settings(self) -> dict[str, Any]:
        """The arguments of the policy, which are the same on all ranks: a name in place of an environment or a network."""
        return {name: as_name(value) for name, value in self._arguments.items()}

    def collected_statistics(self) -> Tensor | None:
        """Count, mean and summed squared deviations of this rank's new observations. None: nothing is normalised."""
        if self.normalizer is None:
            return None
        count, mean, squares = self.normalizer.pending
        return torch.stack([count.expand_as(mean), mean, squares]).cpu()

    def share_statistics(self, of_ranks: Sequence[Tensor | None]) -> None:
        """Normalise later iterations with the observations of all ranks."""
        if self.normalizer is not None:
            parts = [part.to(self.device) for part in of_ranks if part is not None]
            self.normalizer.include([(count.flatten()[0], mean, squares) for count, mean, squares in parts])

    # Parts

    def _fingerprint(self) -> Float64[Tensor, " W"]:
        """The sum of each weight tensor of actor and critic, not of what a subclass adds. Any optimizer step changes it."""
        critic = () if self.critic is None else self.critic.parameters()
        weights = chain(self.actor.parameters(), critic)
        return torch.stack([weight.detach().sum(dtype=torch.float64) for weight in weights])

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._sampled_with.device

    def get_parameters(self) -> dict[str, Tensor]:
        """Weights of actor and critic, and the normaliser's constants, so that a synchronised copy normalises equally."""
        constants = {} if self.normalizer is None else {"shift": self.normalizer.shift, "scale": self.normalizer.scale}
        return {**dict(self.named_parameters()), **{f"normalizer.{name}": value for name, value in constants.items()}}

    def _prepared(self, observations: Tensor) -> Tensor:
        observations = observations.to(self.device)
        return observations if self.normalizer is None else self.normalizer(observations)

    def _allow(self, observations: Tensor, infos: Sequence[dict[str, Any]] | None) -> Tensor | None:
        if self.action_mask is None:
            if not self._has_said_masks and infos and KEY in infos[0]:
                self._has_said_masks = True
                LOGGER.warning(
                    "EpisodePolicy: the environment gives masks of allowed actions in info['action_mask'], and they are not "
                    "used. EpisodePolicy(action_mask='info') uses them."
                )
            return None
        if callable(self.action_mask):
            return self.action_mask(observations)
        if infos is None:
            raise ConfigError(
                "EpisodePolicy: action_mask='info' needs a pool with infos. Create it with make_pool(..., infos=True)."
            )
        if any(KEY not in info for info in infos):
            raise ContractError(
                "EpisodePolicy: action_mask='info' needs info['action_mask'] after every reset and step, a method "
                "action_masks(), or observations with a part 'action_mask'; this environment returned none. Pass a callable "
                "(encoded observations -> bool [n, K]), or action_mask=None."
            )
        return self._masks_of([info[KEY] for info in infos])

    def _masks_of(self, masks: Sequence[Any]) -> Bool[Tensor, "n K"]:
        """The masks of n observations, in any form, as rows."""
        rows = [flat_mask(self.pool.action_space, mask) for mask in masks]
        num_categories = self.distribution.num_categories
        if wrong := [len(row) for row in rows if len(row) != num_categories]:
            raise ContractError(
                f"EpisodePolicy: a mask must have one entry per category, K = {num_categories} for "
                f"{self.pool.action_space}; got {wrong[0]}. Correct the mask."
            )
        return torch.from_numpy(np.stack(rows))


def draw_seed() -> int:
    """Draw a seed from torch's global generator, which the trainer seeds and saves in checkpoints."""
    return int(torch.randint(2**62, ()))


def _seeded(start: EpisodeStart) -> EpisodeStart:
    """Add a seed if there is none, so that all episodes of the group have the same start."""
    if not isinstance(start, EpisodeStart):
        raise ContractError(
            f"EpisodePolicy: states must be EpisodeStart objects; got {type(start).__name__}. Use episode_starts()."
        )
    if start.seed is not None or start.snapshot is not None:
        return start
    return replace(start, seed=draw_seed() % 2**32)
