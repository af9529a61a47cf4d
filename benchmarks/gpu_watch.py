"""benchmarks/gpu_watch.py: runs train.py while two threads watch it, for the part `job` of
benchmarks/gpu.py.

    python -m benchmarks.gpu_watch FILE FLAGS...        FLAGS are those of train.py

One thread looks every 10 ms at where the main thread is: a profile by wall time that slows
nothing. The other reads from nvidia-smi for what share of the time the card runs a kernel. Both
count only while the training loop runs, so imports, the tokenizer and the demonstrations are left
out. FILE gets the result as JSON, every two seconds and at the end.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import torch

import hsdp
import muon
import rollout
import train
from command import checkpoints
from fast import sampler

PERIOD = 0.01  # seconds between two looks at the main thread

# A look counts for the first phase that has one of its functions on the main thread's stack. The
# table holds the functions themselves, not their names: when one is renamed, this file fails at
# once instead of measuring nothing.
PHASES = {
    "saving": [checkpoints.save_checkpoint],
    "publishing": [rollout.InTurn.publish, train.Run.full_state],
    "prefill": [sampler.Sampler.prefill],
    # Agents and workspaces, and waiting for tools and judges
    "tools": [sampler.Sampler.handle_turns, Future.result],
    "sampling": [sampler.Sampler.step],
    "update": [
        train.Reinforcement.group_losses,
        torch.Tensor.backward,
        hsdp.clip_grad_norm,
        muon.Muon.step,
        train.update_router_bias,
    ],
}
LOOP = train.loop


class Watch:
    """What both threads count. One instance watches one run of train.py and writes to one file."""

    def __init__(self, path):
        self.path = Path(path)
        self.phases = Counter()  # looks per phase, while the loop runs
        self.busy = []  # nvidia-smi's percentages, while the loop runs
        self.in_loop = False
        self.ended = threading.Event()
        self.main_thread = threading.main_thread().ident

    def watch_stack(self):
        """The profiling thread: counts in which phase the main thread is, until the run ends"""
        # A frame knows its code object, so the functions are looked up by theirs. unwrap: a
        # decorated function runs the code of the function inside.
        codes_of = {}
        for phase, functions in PHASES.items():
            codes_of[phase] = {inspect.unwrap(function).__code__ for function in functions}
        loop_code = inspect.unwrap(LOOP).__code__

        written = time.monotonic()
        while not self.ended.wait(PERIOD):
            # The code objects of all functions on the main thread's stack at this moment.
            frame = sys._current_frames().get(self.main_thread)
            codes = set()
            while frame:
                codes.add(frame.f_code)
                frame = frame.f_back

            # Count only while the training loop runs. When several phases match, the first in the
            # table counts.
            self.in_loop = loop_code in codes
            if self.in_loop:
                found = (phase for phase in PHASES if codes & codes_of[phase])
                self.phases[next(found, "other")] += 1

            # Write every two seconds, because a stage may be killed at its time limit.
            if time.monotonic() - written > 2:
                self.write()
                written = time.monotonic()

    def watch_card(self):
        """The second thread: reads from nvidia-smi how busy the card is, five times a second"""
        # nvidia-smi numbers all cards of the machine, CUDA numbers only the visible ones.
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = [
            "nvidia-smi",
            f"--id={card}",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]

        # nvidia-smi ends by itself after this process has ended: nobody reads its output then.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout:
                if self.in_loop and line.strip().isdigit():
                    self.busy.append(int(line))

    def write(self):
        """Writes the shares so far as JSON; `busy` is None where nvidia-smi has said nothing"""
        looks = sum(self.phases.values())
        result = {
            "looks": looks,
            "phases": {phase: self.phases[phase] / max(1, looks) for phase in [*PHASES, "other"]},
            "busy": sum(self.busy) / len(self.busy) / 100 if self.busy else None,
        }

        # A rename replaces the file at once, so nobody reads half of it.
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(self.path)


def main(path, flags):
    """Runs train.py with these flags in this process, watched by the two threads"""
    # Daemon threads: they cannot keep the process alive.
    watch = Watch(path)
    stack_thread = threading.Thread(target=watch.watch_stack, daemon=True)
    stack_thread.start()
    if torch.cuda.is_available() and shutil.which("nvidia-smi"):
        threading.Thread(target=watch.watch_card, daemon=True).start()

    # The result is written also when the training fails.
    try:
        train.main(flags)
    finally:
        watch.ended.set()
        stack_thread.join()
        watch.write()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
