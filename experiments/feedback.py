"""feedback.py: What does the recipe come to, seed by seed, with targeted feedback and without it?

Both arms are the same RL from the same SFT: the default run, and one without the distillation of
hints. The habit that feedback is to remove is a call to a tool that is not there.

    reward alone                  without the distillation of hints
    with targeted feedback        the default run

    python -m experiments.feedback

The table's last part has a line for each run, with what the whole default run took.

Found (seeds 1337, 1, 2): wrong tools go from .399 of the held-out rollouts to .034, by the reward
alone to .408. Solved .892, and .890 by the reward alone. Figure: figures/feedback.png.
"""

import json
import math
import re
import sys

from command import step_log
from experiments import runner
from experiments.runner import Arm, Experiment


# 1. More numbers of a run's end than every experiment has.
def whole_run(folder, policies):
    """What SFT left behind, what RL made of it, and what the command took: numbers of one run.
    folder: of the run; policies: those of its evaluation"""
    # Of the evaluation. A number that this run does not have is nan.
    before = policies.get("before RL")
    numbers = {
        "wrong tool before RL": before["overall"]["bad_tool"] if before else math.nan,
        "ended by itself": policies["after RL"]["overall"]["finished"],
        "constants after SFT": math.nan,
        "minutes": math.nan,
        "GB": math.nan,
    }

    # Only the default run has a log of SFT in its folder: the other arm begins after it. What the
    # command took stands in the last line of the evaluation's table.
    lines = step_log.read_step_log(folder, "sft")
    if lines:
        numbers["constants after SFT"] = lines[-1].get("constants", math.nan)
        table = json.loads((folder / "summary.json").read_text())["table"]
        minutes, gigabytes = re.search(r"([\d.]+) minutes, ([\d.]+) GB", table).groups()
        numbers.update(minutes=float(minutes), GB=float(gigabytes))
    return numbers


# 2. The arms. One flag switches the technique off; all else is the same.
EXPERIMENT = Experiment(
    question="The recipe, with targeted feedback and without",
    curves=("bad_tool", "solved"),
    arms={"reward alone": Arm(("--feedback=0",)), "with targeted feedback": Arm()},
    more=whole_run,
    by_seed=(
        "constants after SFT",
        "before RL",
        "solved",
        "wrong tool before RL",
        "wrong tool",
        "ended by itself",
        "minutes",
        "GB",
    ),
)

if __name__ == "__main__":
    runner.main("experiments.feedback", sys.argv[1:])
