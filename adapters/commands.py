"""What each command of `grpo` does. `cli` reads the command line."""

import argparse
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo import (
    GRPOConfig,
    GRPOTrainer,
    compare_policies,
    load_weights,
    measure_policy,
    seed_everything,
    with_settings,
)
from grpo import presets as all_presets
from grpo.arguments import describe, install_command, nearest_name
from grpo.checks import check_policy, check_reward_model
from grpo.errors import ConfigError
from grpo.experience_collector import ExperienceCollector

TRAIN = ("num_iterations", "num_epochs", "eval_every", "checkpoint_every", "keep_last")
"""The arguments of `train` that a file of settings may have."""
SECTIONS = ("preset", "config", "train")
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
RECIPES: dict[str, Callable[[], GRPOConfig]] = {
    name: recipe
    for name, recipe in vars(all_presets).items()
    if inspect.isfunction(recipe) and recipe.__module__ == all_presets.__name__ and not name.startswith("_")
}


def demo(args: argparse.Namespace) -> None:
    """Train on the bandit whose best arm moves."""
    from .bandits.demo import main

    main(["--seed", args.seed, "--plot", args.plot])


def train(args: argparse.Namespace) -> None:
    """Train a task, and keep the run in a folder."""
    from .tracking import RunFolder, write_report
    from .tracking.run_folder import METRICS

    config, options = settings_of(args.settings, args.changes)
    policy, reward_model, states, eval_states = task_of(args.task, seed=config.seed)
    folder = args.out or Path("runs") / args.task.partition(":")[2]
    if not args.resume and ((folder / METRICS).exists() or any((folder / CHECKPOINTS).glob("iteration-*"))):
        raise ConfigError(f"{folder} has a run already. Pass --resume to continue it, or --out with another folder.")
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward_model)
    with RunFolder(folder) as sink:
        history = trainer.train(
            states,
            eval_states=eval_states,
            sinks=[sink],
            checkpoint_dir=folder / CHECKPOINTS,
            resume="auto" if args.resume else None,
            **options,
        )
    if history:
        first, last = history[0]["rewards/mean"], history[-1]["rewards/mean"]
        start = trainer.iteration - len(history) + 1
        print(f"Iterations {start} to {trainer.iteration}: the mean reward went from {first:.3f} to {last:.3f}.")
    print(f"Report: {write_report(folder)}")


def check(args: argparse.Namespace) -> None:
    """Test whether a policy keeps its contract."""
    reward_model = None
    if args.states is None:
        policy, reward_model, states, _ = task_of(args.policy)
    else:
        policy, states = _made(named(args.policy), args.policy), named(args.states)
    # each state is scored one by one, and eight take seconds
    states = drawn(states)[:8]
    report = check_policy(policy, states, num_samples=args.num_samples)
    print(report)
    is_sound = not report.failures
    if reward_model is not None:
        collector = ExperienceCollector(policy=policy, reward_model=reward_model, group_size=1)
        row_states, actions, _ = collector.sample(states, 1)
        of_rewards = check_reward_model(reward_model, states=row_states, actions=actions)
        print(f"\n{of_rewards}")
        is_sound = is_sound and not of_rewards.failures
    if not is_sound:
        raise SystemExit(1)


def compare(args: argparse.Namespace) -> None:
    """Compare a task's policy before training and with a run's weights."""
    from .tracking import write_report
    from .tracking.run_folder import COMPARISON

    config = settings_in(args.folder)
    policy, reward_model, states, eval_states = task_of(args.task, seed=config.get("seed"))
    states = drawn(states) if eval_states is None else eval_states
    if config.get("seed") is None:
        print(
            "The run has no seed, so the policy before training is not the run's, but another one that the task makes."
        )
    before = measure_policy(policy, states, reward_model, num_actions_per_state=args.num_actions)
    load_weights(args.folder / CHECKPOINTS, policy)
    report = compare_policies(before, policy, states, reward_model)
    print(report)
    report.to_json(args.folder / COMPARISON)
    print(f"\nReport: {write_report(args.folder)}")


def report(args: argparse.Namespace) -> None:
    """Make one HTML page of a run's folder."""
    from .tracking import write_report

    print(write_report(args.folder, args.out))


def presets(args: argparse.Namespace) -> None:
    """List the recipes, or print the settings of one."""
    if args.name is None:
        for name, recipe in RECIPES.items():
            print(f"{name:30s}{(recipe.__doc__ or '').partition(chr(10))[0]}")
        return
    recipe = _recipe(args.name)
    print(f"# {inspect.getdoc(recipe)}".replace("\n", "\n# ").replace("# \n", "#\n"))
    print(json.dumps(recipe().to_dict(), indent=2))


# Settings


def settings_of(path: Path | None, changes: Sequence[str]) -> tuple[GRPOConfig, dict[str, Any]]:
    """Read a file of settings, and apply changes such as "objective.kl_coef=0.1".

    Returns:
        The config, and the arguments of `train`.

    Raises:
        ConfigError: A name is unknown (the message has the nearest one), or a value is not allowed.
    """
    given = {} if path is None else _read(path)
    _require_known("the file of settings", given, SECTIONS)
    kinds = {"preset": (str, "a name"), "config": (dict, "settings by name"), "train": (dict, "settings by name")}
    for section, (kind, words) in kinds.items():
        if not isinstance(given.get(section) or kind(), kind):
            raise ConfigError(f"{section} must hold {words}; got {describe(given[section])}.")
    config = _recipe(given["preset"])() if given.get("preset") else GRPOConfig()
    options = dict(given.get("train") or {})
    named_changes: dict[str, Any] = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise ConfigError(f"--set needs NAME=VALUE; got {change!r}.")
        if name.startswith("train."):
            options[name.removeprefix("train.")] = _parsed(text)
        else:
            named_changes[name.removeprefix("config.")] = _parsed(text)
    _require_known("train", options, TRAIN)
    config = with_settings(with_settings(config, given.get("config") or {}), named_changes)
    return config, options if "num_epochs" in options else {"num_iterations": 100} | options


def _read(path: Path) -> dict[str, Any]:
    """Read YAML or JSON. Numbers such as 1e-5, which YAML takes for text, become numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of settings {path} cannot be read: {error}") from error
    values = _load(text, path.suffix == ".json", str(path))
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold settings by name; got {type(values).__name__}.")
    plain: dict[str, Any] = _with_numbers(values or {})
    return plain


def _load(text: str, is_json: bool, where: str) -> Any:
    if is_json:
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, where))
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"Settings in YAML need {install_command('cli')}. JSON needs nothing.") from error
    try:
        for node in _mappings(yaml.compose(text, Loader=yaml.SafeLoader)):
            _without_repeats([(key.value, None) for key, _ in node.value], f"{where}, line {node.start_mark.line + 1}")
        # files of settings are passed on and not read as programs, so they must not run code
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error


def _mappings(node: Any) -> Iterator[Any]:
    """The mappings in a document of YAML, whose nodes hold pairs, lists of nodes or text."""
    if node is not None and not isinstance(node.value, str):
        is_mapping = node.id == "mapping"
        if is_mapping:
            yield node
        for entry in [value for _, value in node.value] if is_mapping else node.value:
            yield from _mappings(entry)


def _without_repeats(pairs: Sequence[tuple[Any, Any]], where: str) -> dict[Any, Any]:
    """The pairs as a dict. YAML and JSON would keep the last of two values with one name, in silence."""
    names = [str(name) for name, _ in pairs]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"{where}: the setting {repeated[0]!r} stands twice. Keep one of them, or join their parts.")
    return dict(pairs)


def _with_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> int | float | str:
    """The number that a text stands for, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parsed(text: str) -> Any:
    """A value of the command line: a number, true, false, null, a JSON list or dict, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        words = {"none": None, "true": True, "false": False}
        return words[text.lower()] if text.lower() in words else _number(text)


def _require_known(where: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ConfigError(f"{where} has no setting {name!r}. {nearest_name(name, names)}")


def _recipe(name: str) -> Callable[[], GRPOConfig]:
    if name not in RECIPES:
        raise ConfigError(f"There is no preset {name!r}. {nearest_name(name, list(RECIPES))}")
    return RECIPES[name]


# Objects that the command line names


def named(name: str) -> Any:
    """Import what MODULE:NAME names.

    Raises:
        ConfigError: The name has another form, or the module lacks it.
    """
    module, sign, attribute = name.partition(":")
    if not (module and sign and attribute):
        raise ConfigError(f"A task is named as MODULE:FUNCTION, such as my_project.tasks:task; got {name!r}.")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ConfigError(f"There is no module {error.name!r} for {name}. Run grpo where the module is.") from error
    if not hasattr(found, attribute):
        public = [each for each in vars(found) if not each.startswith("_")]
        raise ConfigError(f"{module} has no {attribute!r}. {nearest_name(attribute, public)}")
    return getattr(found, attribute)


def task_of(name: str, *, seed: int | None = None) -> tuple[Any, Any, Any, Any]:
    """Call a task: its policy, reward model, states, and the states of evaluations or None.

    Args:
        name: MODULE:FUNCTION.
        seed: Seeds the generators first, so that the task makes the same policy again. None: they are not seeded.

    Raises:
        ConfigError: The task returns something else.
    """
    task = named(name)
    if seed is not None:
        seed_everything(seed)
    made = _made(task, name)
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        kind = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(
            f"{name} must return (policy, reward_model, states) or (policy, reward_model, states, eval_states); got {kind}."
        )
    policy, reward_model, states, eval_states = (*made, None)[:4]
    return policy, reward_model, states, eval_states


def drawn(states: Any) -> Any:
    """The states themselves, or the first ones that a function of the iteration returns."""
    return states(0) if callable(states) else states


def settings_in(folder: Path) -> dict[str, Any]:
    """The config of the run in a folder, as it was started last."""
    from .tracking.run_folder import SETTINGS

    try:
        starts = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["starts"]
        config: dict[str, Any] = starts[-1]["settings"]["config"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder} is not a folder that `grpo train` wrote: {error}") from error
    return config


def _made(value: Any, name: str) -> Any:
    """The result of a function or a class, or the object itself."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return value
    try:
        inspect.signature(value).bind()
    except TypeError as error:
        raise ConfigError(
            f"{name} must be callable without arguments; it takes {inspect.signature(value)} ({error}). Give each argument a "
            "default, or name a function that passes them."
        ) from error
    return value()
