"""Try a tiny model of every class of `AutoModelForCausalLM`, and print the tables of docs/llm.md.

`python tools/try_architectures.py [MODEL_TYPE ...]` takes minutes for all types. Each class is sampled and scored beside longer
and shorter prompts, and compared with each row alone. If a class is accepted and wrong, the last line names it and the exit
status is 1.
"""

import sys
import warnings
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from grpo.errors import GRPOError
from tests.support.scored_architectures import assert_scores_as_alone
from tests.support.tiny_architectures import model_types, tiny_of


def outcome_of(model_type: str) -> str:
    """What becomes of a class, in words."""
    try:
        tiny_of(model_type)
    except Exception as error:  # configs that are not tiny, or that need other packages
        return f"not built: {type(error).__name__}"
    try:
        return "shares prompts" if assert_scores_as_alone(model_type) else "each row as a whole"
    except GRPOError as error:
        return f"refused: {str(error).split(';')[0][:100]}"
    except AssertionError as error:
        return f"WRONG: {' '.join(str(error).split())[:200]}"


def main(names: list[str]) -> int:
    """Print how many classes have each outcome, and which. Return 1 if one is silently wrong."""
    warnings.simplefilter("ignore")
    found: dict[str, list[str]] = defaultdict(list)
    for model_type in names or model_types():
        found[outcome_of(model_type)].append(model_type)
    print("| outcome | classes | model types |\n|---|---|---|")
    for outcome, types in sorted(found.items(), key=lambda entry: -len(entry[1])):
        print(f"| {outcome.replace('|', '/')} | {len(types)} | {', '.join(sorted(types))} |")
    wrong = [name for outcome, types in found.items() if outcome.startswith("WRONG") for name in types]
    print(f"\n{len(wrong)} silently wrong{': ' + ', '.join(wrong) if wrong else ''}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
