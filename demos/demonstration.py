"""demos/demonstration.py: the command line of a file that shows one idea and takes no flags.

`python muon.py` (and six more) draws, prints and ends. A flag that is not there, and a place that
cannot be written, are one line and exit code 2.

It stands here because every file of the book needs the same few lines, and none of them is about
flags. Left out: flags. A file that takes some (rollout.py --replay) adds them to `make_parser`.
"""

import argparse
import sys


def make_demo_parser(file, about):
    """A parser that answers wrong input by one line with the file's name"""
    parser = argparse.ArgumentParser(prog=file, description=about, allow_abbrev=False)

    def refuse(message):
        print(f"{file}: {message}", file=sys.stderr)
        raise SystemExit(2)

    parser.error = refuse
    return parser


def run_demo(file, about, demo, argv):
    """Run the demonstration of a file that takes no flags."""
    parser = make_demo_parser(file, about)
    parser.parse_args(argv)
    draw_or_refuse(parser, demo)


def draw_or_refuse(parser, demo):
    """Runs the demonstration. Its figure goes to out/: where that cannot be written, the command
    ends with one line."""
    try:
        demo()
    except OSError as error:
        parser.error(f"{error.filename or 'cannot write'}: {error.strerror or error}")
