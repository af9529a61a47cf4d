"""command/failures.py: what ended a run, in one line, and the command that goes on.

A full disk, a full GPU, a machine that cannot start a sandbox: none of them is an error of the
program, and none costs more than the steps since the last checkpoint. A traceback would hide both.

The command is the one that was typed: `python train.py ...`, or that of an experiment, whose runner
starts train.py many times and goes on by itself with the runs that are left.

It stands apart from train.py because a run that goes well never comes here.
"""

import contextlib
import errno
import os
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from command import checkpoints
from command.flags import is_first_rank, usage_error
from world.machine import MachineFailure, failures_line
from world.task import Refusal

# The words before the flags of the command. A program that runs train.py with a patch writes its
# own words here.
PROGRAM = "python train.py"
# An environment variable. An experiment sets it to its own command in each run that it starts.
EXPERIMENT_COMMAND = "EXPERIMENT_COMMAND"


@contextlib.contextmanager
def explain_failures(config, argv):
    """A context: a failure of the machine or of the input inside it ends the command with one line.
    config: of the first stage; argv: the flags as they were typed"""
    try:
        yield
    # What every rank meets, and the first one tells
    except checkpoints.SaveFailed as error:
        usage_error(f"{error}. Free some space, then: {command_to_type(config, argv)}")
    except (checkpoints.DamagedCheckpoint, Refusal) as error:
        usage_error(str(error))
    # What one rank alone may meet
    except MachineFailure as failure:
        usage_error(
            f"this machine failed: {failure}; free it, and the same command goes on", any_rank=True
        )
    except OSError as error:
        # A full disk, met outside of checkpoints and logs. Other errors are no fault of the disk:
        # their traceback is needed.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = f"{error.filename}: " if error.filename else ""
        usage_error(
            f"{what}cannot be written: {checkpoints.explain_write_error(error)}. Free some space, "
            f"then: {command_to_type(config, argv)}",
            any_rank=True,
        )
    except torch.OutOfMemoryError as error:
        usage_error(explain_full_card(config, argv, error), any_rank=True)


def end_stopped(config, argv, number):
    """Ends a command that a signal has stopped: prints the command that goes on, and exits with the
    code that a shell expects, 128 + the signal's number"""
    if is_first_rank():
        print(f"stopped; to go on: {command_to_type(config, argv)}", file=sys.stderr)
    raise SystemExit(128 + number)


def command_to_type(config, argv, more=()):
    """The command that goes on: with --resume where there is a checkpoint, which an experiment's
    command does without. more: further flags"""
    experiment = os.environ.get(EXPERIMENT_COMMAND)
    if experiment:
        return " ".join([experiment, *more])
    words = [*argv, *more]
    if not config.resume and checkpoints.last_stage(config.out) != Path(config.out):
        words.append("--resume")
    # Who started the ranks starts them again.
    program = PROGRAM
    if dist.is_torchelastic_launched():
        program = f"torchrun ... {PROGRAM.removeprefix('python ')}"
    return f"{program} {shlex.join(words)}"


def say_lost_rollouts(say, causes, total):
    """One line about the rollouts of a step that failed because of the machine. Where no other
    rollout is left, the run ends. say: prints a line; causes: one for each failed rollout of any
    rank; total: how many rollouts the step has"""
    say(f"rl: {failures_line(causes, total)}")
    if len(causes) == total:
        usage_error(
            "no rollout of this step could be played on this machine; free what the line above "
            "names, and the same command goes on"
        )


def explain_full_card(config, argv, error):
    """The one line for a GPU whose memory is full, with what makes the run fit"""
    # Both flags may change when a stage goes on (may_change in train.Config).
    half = max(1, config.micro_tokens // 2)
    told = str(error).splitlines()[0][:160].rstrip()
    smaller = f"--micro_tokens={half}", "--recompute"
    again = command_to_type(config, argv, smaller)
    return (
        f"the GPU's memory is full ({told}) What is saved is whole. Half as much at a time, and "
        f"less kept of it: {again} (if that is not enough: --weight_dtype=bfloat16, and in rl "
        "fewer --tasks_per_step or a smaller --window, with another --out)"
    )


@contextlib.contextmanager
def report_rank_failure():
    """When a rank dies, the collectives of the others fail with a line about sockets. This context
    makes of it a MachineFailure that says what has happened."""
    try:
        yield
    except RuntimeError as error:
        # Words that gloo and NCCL use when a peer is gone ("Connection closed", "Timed out" with or
        # without a capital letter). Other errors pass unchanged.
        signs = "onnection", "imed out", "gloo", "NCCL"
        if not dist.is_initialized() or not any(sign in str(error) for sign in signs):
            raise
        rank, world = dist.get_rank(), dist.get_world_size()
        raise MachineFailure(
            f"rank {rank} of {world}: another rank died or stopped answering "
            f"({str(error).splitlines()[0][:100]})"
        ) from error
