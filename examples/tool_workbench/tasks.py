"""Requests for the workbench's tools, composed from the phrase tables with random values."""

from itertools import chain, cycle
from random import Random
from typing import Any

from adapters.tools import ToolTask
from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from examples.tool_workbench.words import content_words, words, words_of
from grpo.errors import ConfigError

from .phrases import OPENINGS, PHRASES
from .tools import workbench_catalogue
from .values import VALUES, render

Combination = tuple[str, str]
"""A construction and an object."""


def make_workbench_tasks(num_tasks: int, seed: int, catalogue: ToolCatalogue | None = None) -> list[ToolTask]:
    """Make tasks for every tool equally often. Half of the requests share no content word with the tool's description.

    Labels: `words` is `shared words` or `no shared word`. `difficulty` is `easy` if the request uses the description's words
    and every enumerated parameter keeps its default, `medium` if it uses other words or asks for a parameter value, and `hard`
    if it does both.

    Args:
        num_tasks: Number of tasks. Tools alternate.
        seed: Random seed.
        catalogue: Workbench tools to ask for. None asks for all of them.

    Raises:
        ConfigError: The catalogue has a tool that is not in the workbench.
    """
    tools = _tools(catalogue)
    return _make(num_tasks, tools, _diagonals(tools, seed), Random(f"tasks {seed}"))


def workbench_split(
    num_train: int, num_held_out: int, seed: int, catalogue: ToolCatalogue | None = None
) -> tuple[list[ToolTask], list[ToolTask]]:
    """Make training tasks and held-out tasks. Held-out requests combine known words in new ways.

    A held-out request combines a construction with an object that no training request combines. The held-out combinations
    depend only on the seed and the tool. All words of a held-out request occur in training requests. Half of the requests of
    each part share no content word with the tool's description.

    Args:
        num_train: Number of training tasks. 8 tasks per tool use every construction and every object. 10 tasks
            per tool also use every cue.
        num_held_out: Number of held-out tasks.
        seed: Random seed.
        catalogue: Workbench tools to ask for. None asks for all of them.

    Raises:
        ConfigError: The catalogue has a tool that is not in the workbench, or the training tasks are too few to cover the words
            of the held-out tasks.
    """
    tools = _tools(catalogue)
    diagonals = _diagonals(tools, seed)
    known = {kind: several[1:] for kind, several in diagonals.items()}
    new = {kind: several[:1] for kind, several in diagonals.items()}
    train = _make(num_train, tools, known, Random(f"train {seed}"))
    vocabulary = frozenset(word for task in train for word in words(task.text))
    return train, _make(num_held_out, tools, new, Random(f"held out {seed}"), vocabulary)


def shares_words(task: ToolTask) -> bool:
    """Whether the request shares a content word with the name or description of its tool."""
    return task.labels["words"] == "shared words"


def _tools(catalogue: ToolCatalogue | None) -> list[Tool]:
    tools = list((workbench_catalogue() if catalogue is None else catalogue).values())
    strange = [tool.name for tool in tools if tool.name not in PHRASES]
    if strange:
        raise ConfigError(
            f"make_workbench_tasks: the catalogue must have only tools of the workbench; it also has {', '.join(strange)}. "
            "Leave these tools out with catalogue.without(...)."
        )
    return tools


def _diagonals(tools: list[Tool], seed: int) -> dict[tuple[str, bool], list[list[Combination]]]:
    """All pairs of a construction and an object, by tool and kind, in parts. Each part uses every construction and object."""
    found = {}
    for tool in tools:
        for oblique, wording in ((False, PHRASES[tool.name].plain), (True, PHRASES[tool.name].oblique)):
            generator = Random(f"combinations {seed} {tool.name} {oblique}")
            objects = generator.sample(wording.objects, len(wording.objects))
            found[tool.name, oblique] = [
                [(one, objects[(i + shift) % len(objects)]) for i, one in enumerate(wording.constructions)]
                for shift in range(len(objects))
            ]
    return found


def _make(
    num_tasks: int,
    tools: list[Tool],
    diagonals: dict[tuple[str, bool], list[list[Combination]]],
    generator: Random,
    vocabulary: frozenset[str] | None = None,
) -> list[ToolTask]:
    tasks = []
    # Part by part, so that even few tasks use every construction and every object.
    decks = {
        kind: cycle(list(chain.from_iterable(generator.sample(one, len(one)) for one in several)))
        for kind, several in diagonals.items()
    }
    for index in range(num_tasks):
        turn, place = divmod(index, len(tools))
        # Plain and oblique alternate from tool to tool and from turn to turn.
        tool, oblique = tools[place], (turn + place) % 2 == 1
        combination = next(decks[tool.name, oblique])
        candidates = (_compose(tool, combination, oblique, generator) for _ in range(200))
        task = next((one for one in candidates if vocabulary is None or vocabulary.issuperset(words(one.text))), None)
        if task is None:
            raise ConfigError(
                f"every request for {tool.name} has a word that no training task has. Use more training tasks: at least 10 "
                f"for each of the {len(tools)} tools."
            )
        tasks.append(task)
    generator.shuffle(tasks)
    return tasks


def _compose(tool: Tool, combination: Combination, oblique: bool, generator: Random) -> ToolTask:
    phrases = PHRASES[tool.name]
    construction, noun = combination
    core = construction.replace("{object}", noun)
    slots = VALUES[tool.name](generator)
    chosen = _choose_values(tool, core, generator)
    cues, decided = [], False
    insertions = {name: render(name, value) for name, value in slots.items()}
    for name, (value, cued) in chosen.items():
        decided |= cued
        if cued:
            wording = generator.choice(phrases.cues[name][value])
            if f"{{{name}}}" in core:
                insertions[name] = wording
            else:
                cues.append(wording)
    for name, wordings in phrases.extras.items():
        if generator.random() < 0.3:
            slots[name] = generator.randint(2, 4)
            cues.append(generator.choice(wordings).format_map({name: slots[name]}))
    generator.shuffle(cues)
    opening, ending = generator.choice(OPENINGS)
    text = " ".join([*filter(None, [opening]), ", ".join([core.format_map(insertions), *cues])]) + ending
    text = text[0].upper() + text[1:]
    choices = {name: value for name, (value, _) in chosen.items() if value is not ABSENT}
    return ToolTask(
        text=text,
        tool=tool.name,
        arguments=slots | choices,
        slots=slots,
        labels={
            "difficulty": ("easy", "medium", "hard")[oblique + decided],
            "words": "shared words" if content_words(text) & words_of(tool) else "no shared word",
        },
    )


def _choose_values(tool: Tool, core: str, generator: Random) -> dict[str, tuple[Any, bool]]:
    """Value of each enumerated parameter, and whether the request states the value."""
    silent = generator.random() < 0.3
    chosen: dict[str, tuple[Any, bool]] = {}
    for choice in tool.choices:
        values = list(choice.values)
        if choice.name == "to_unit":
            values.remove(chosen["from_unit"][0])
        schema = tool.properties[choice.name]
        unsaid = schema.get("default", ABSENT)
        must_be_said = unsaid not in choice.values or f"{{{choice.name}}}" in core
        value = unsaid if silent and not must_be_said else generator.choice(values)
        cued = must_be_said or (value is not unsaid and (value != unsaid or generator.random() < 0.5))
        chosen[choice.name] = (value, cued)
    return chosen
