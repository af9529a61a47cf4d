"""demos/replay.py: the command line of rollout.py.

Without a flag the demonstration; with --replay=FILE a conversation that training left there (see
demos/transcript_view.py), in colour.

It stands apart from rollout.py because a flag is no part of an agent. Left out: a pager. A terminal
has one.
"""

from demos.demonstration import draw_or_refuse, make_demo_parser
from demos.transcript_view import print_transcript


def replay_or_demonstrate(argv, demo):
    """With --replay prints a conversation, without it runs the demonstration. demo: a function"""
    # The flags.
    parser = make_demo_parser("rollout.py", "A demonstration and a group of rollouts.")
    about = "print a conversation of a transcripts.jsonl, the last if no --line is given"
    parser.add_argument("--replay", metavar="FILE", help=about)
    about = "with --replay: which line of the file, from 1"
    parser.add_argument("--line", type=int, metavar="N", help=about)
    given = parser.parse_args(argv)

    # Flags that do not go together, and the demonstration.
    if given.line is not None and given.replay is None:
        parser.error("--line goes with --replay=FILE")
    if given.replay is None:
        return draw_or_refuse(parser, demo)

    # An empty name is most often a variable of the shell that is not set.
    if not given.replay:
        parser.error("--replay= names no file")
    try:
        print_transcript(given.replay, given.line)
    except ValueError as error:
        parser.error(error)
