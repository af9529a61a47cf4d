"""demos/demonstration.py: the command line of a file that shows one idea and takes no flags.

`python muon.py` (and six more) draws, prints and ends. A flag that is not there, and a place that
cannot be written, are one line and exit code 2.

It stands here because every file of the book needs the same few lines, and none of them is about
flags. Left out: flags. A file that takes some (rollout.py --replay) has a parser of its own.
"""

from command.flags import make_parser, usage_error


def run_demo(file, about, demo, argv):
    """Runs the demonstration of a file that takes no flags."""
    make_parser(file, about).parse_args(argv)
    draw_or_refuse(file, demo)


def draw_or_refuse(file, demo):
    """Runs the demonstration. Its figure goes to out/: where that cannot be written, the command
    ends with one line."""
    try:
        demo()
    except OSError as error:
        usage_error(f"{error.filename or 'cannot write'}: {error.strerror or error}", file)
