"""command/hardware.py: what this machine is, and which size of model it carries.

`--device=auto`, `--dtype=auto` and `--scale=auto` are answered here. Here too the memory that a
process has held, and how freed memory goes back to the system.

It stands apart from train.py because the recipe is the same on every machine.
"""

import contextlib
import ctypes
import os
import sys

import torch

from fast import gpu_memory
from world.machine import resource


def device_of(config):
    """cpu or cuda"""
    if config.device != "auto":
        return config.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def fast_dtype(device):
    """bf16 products are several times faster than fp32 on GPUs and CPUs that have instructions for
    them, far slower elsewhere."""
    if device == "cuda":
        # compute capability 8.0 (A100) and later
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def dtype_of(config):
    """The dtype of matrix products"""
    if config.dtype == "auto":
        return fast_dtype(device_of(config))
    return getattr(torch, config.dtype)


def this_card():
    """torch's properties of the GPU of this process: name, total_memory in bytes, ..."""
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))


def uses_card(given):
    """Will a command with these flags compute on a GPU?"""
    return torch.cuda.is_available() and given.get("device") != "cpu"


def scale_of_machine(given, most):
    """--scale=auto -> (scale, {flag: value}): laptop without a GPU; with one the gpu scale, in as
    large micro-batches as its memory carries, and the laptop's model on a card that is too small
    for it. most: tokens of a micro-batch of the gpu scale"""
    if not uses_card(given):
        return "laptop", {}
    gigabytes = this_card().total_memory / 1e9
    config, shapes = gpu_memory.gpu_scale()
    tokens = gpu_memory.largest_micro_batch(config, shapes, gigabytes, most)
    return ("gpu", {"micro_tokens": tokens}) if tokens else ("laptop", {})


def peak_memory():
    """The most gigabytes that this process has held: of the GPU's memory where it uses one, else
    of the machine's"""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    # macOS counts in bytes, Linux in kilobytes.
    units = 1e9 if sys.platform == "darwin" else 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units


def release_memory():
    """Give freed memory back to the system. Every batch has other sizes, and glibc keeps the holes
    between them: gigabytes after minutes. It is not for the end of every short step, since taking
    the pages again costs a third of such a step."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
