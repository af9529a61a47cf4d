"""A machine with a GPU, for a machine without one: torch says that there is a card, and whoever
touches it fails.

    python -c "import pretend_cuda, runpy; runpy.run_path('hsdp.py', run_name='__main__')"
    (with tests/ on the path)

What is imitated of a real card, each seen on one:
- `torch.cuda.is_available()` is true, unless CUDA_VISIBLE_DEVICES is empty. The variable is read at
  every call, as the driver reads it.
- Every CUDA initialisation raises CardTouched, here and in every forked child. On a real card a
  forked child dies the same way once its parent has used CUDA, and each of eight ranks that
  initialise it on their own takes half a gigabyte there.
- The first backward of a process starts autograd's device threads. A child that is forked later
  cannot run a backward."""

import os

import torch


class CardTouched(AssertionError):
    """Code that should have stayed on the CPU has used the card."""


def card_is_visible():
    """Read at every call, as the driver does: a test may hide the card later."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def refuse_card(*args, **kwargs):
    raise CardTouched(f"process {os.getpid()} initialises CUDA")


torch.cuda.is_available = card_is_visible
torch.cuda.device_count = lambda: int(card_is_visible())
torch.cuda._lazy_init = refuse_card

# The id of the process that ran the first backward with the card in sight. A forked child inherits
# the value but has another id, and on a real card its autograd would fail.
process_of_first_backward = None
plain_backward = torch.autograd.backward


def backward_after_fork(*args, **kwargs):
    global process_of_first_backward
    if process_of_first_backward not in (None, os.getpid()):
        raise CardTouched(
            "a backward in a forked process, after one in its parent has started autograd's device threads"
        )
    if card_is_visible():
        process_of_first_backward = os.getpid()
    return plain_backward(*args, **kwargs)


torch.autograd.backward = backward_after_fork
