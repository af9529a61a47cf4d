"""The kinds of generated tasks, a class each.

A kind says what is asked, what the codebase looks like before and after, and what the expert does.
How a task is drawn, verified and judged is the same for all (synth_tasks.draw_task): the codebase
passes its tests, the one that the agent is given fails in the targets' own tests and in no other,
and hidden inputs decide.

    unnamed           what is asked where the prompt names no function
    done              how the expert's last message begins
    red_line          how the test run shows a function that is still to be done, as a pattern whose
                      group is module.name
    needs             tools without which nobody can do it
    ask(...)          what is asked where the prompt names the function
    begin(...)        a Beginning: the codebase as it is to be, and as the agent is given it
    solve(...)        what the expert does for some of the targets: a generator of Actions

A kind more is a file here with one class, a line in KINDS, and a row of synth_tasks.LEVELS.

Standard library only.
"""

from world.kinds.extend import Extend
from world.kinds.put_back import PutBack
from world.kinds.rename import Rename
from world.kinds.repair import Repair

KINDS = {"put_back": PutBack(), "repair": Repair(), "rename": Rename(), "extend": Extend()}
