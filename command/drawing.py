"""command/drawing.py: axes for figures, and what happens where matplotlib does not draw.

All figures are drawn into files, so no backend of a screen is asked for. What only draws never ends
a command whose work is done: the reason is printed in one line instead.

It stands apart from eval.py and the step logs because both draw, and neither is about drawing. The
figures themselves: policy_report.py (policies compared), learning_curves.py (a run's steps),
demo_figures.py (what the files of the book show). Left out: styles and colours of our own.
"""

import os

import numpy as np


def make_axes(title, x, y, panels=1):
    """-> a figure, and its axes: one, or an array of `panels`, in rows of three where they are more
    than four"""
    # A notebook hands its own backend to the processes that it starts, which may not have that
    # module. Here nothing is shown on a screen. matplotlib reads the variable when it is imported
    # first.
    os.environ["MPLBACKEND"] = "agg"
    # pyplot would keep every figure in memory, and a run draws many.
    from matplotlib.figure import Figure

    columns = panels if panels <= 4 else 3
    rows = -(-panels // columns)
    figure = Figure(figsize=(2 + 4 * columns, 4 * rows), layout="constrained")
    ax = figure.subplots(rows, columns)
    if rows > 1:
        # The last row may have room for more panels than there are.
        for spare in ax.flat[panels:]:
            spare.remove()
        ax = ax.flatten()[:panels]
    for panel in np.atleast_1d(ax):
        panel.grid(alpha=0.3)
    # The title stands over the first panel alone.
    np.atleast_1d(ax)[0].set(title=title, xlabel=x, ylabel=y)
    return figure, ax


def draw_safely(draw_it, *inputs):
    """Calls draw_it(*inputs). An error there never ends the command, whose work is done. -> "" or
    why there is no figure, in one line"""
    try:
        draw_it(*inputs)
    except Exception as error:
        first_line, *_ = f"{error}\n".split("\n")
        return f"{draw_it.__name__}: no figure ({type(error).__name__}: {first_line})"
    return ""
