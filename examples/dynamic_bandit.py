"""A policy tracks the best arm of a bandit that changes: the demo of `adapters/bandits/demo.py`, also `grpo demo`.

python -m examples.dynamic_bandit                # trains, prints a table, writes runs/dynamic_bandit.png
python -m examples.dynamic_bandit --seed 7
"""

from adapters.bandits.demo import main

if __name__ == "__main__":
    main()
