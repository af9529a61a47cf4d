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
import train
from fast import sampler, workers

PERIOD = 0.01  # seconds between two looks at the main thread

# A look counts for the first phase of which one function is on the main thread's stack. The
# functions themselves stand here, not their names: when one is renamed, this file fails at once
# instead of measuring nothing.
PHASES = {
    "saving": [hsdp.save_sharded_checkpoint],
    "publishing": [workers.Publisher.publish, workers.Generator.refresh, train.Run.full_state],
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
    def __init__(self, path):
        self.path = Path(path)
        self.phases = Counter()  # looks per phase, while the loop runs
        self.busy = []  # nvidia-smi's percentages, while the loop runs
        self.in_loop = False
        self.ended = threading.Event()
        self.main_thread = threading.main_thread().ident

    def watch_stack(self):
        codes_of = {}
        for phase, functions in PHASES.items():
            codes_of[phase] = {inspect.unwrap(function).__code__ for function in functions}
        loop_code = inspect.unwrap(LOOP).__code__
        written = time.monotonic()
        while not self.ended.wait(PERIOD):
            # The code objects of all functions that the main thread is in at this moment.
            frame = sys._current_frames().get(self.main_thread)
            codes = set()
            while frame:
                codes.add(frame.f_code)
                frame = frame.f_back
            self.in_loop = loop_code in codes
            if self.in_loop:
                # Of several phases the first in the table counts.
                found = (phase for phase in PHASES if codes & codes_of[phase])
                self.phases[next(found, "other")] += 1
            # Now and then, since a stage may be killed at its time limit.
            if time.monotonic() - written > 2:
                self.write()
                written = time.monotonic()

    def watch_card(self):
        # nvidia-smi numbers all cards of the machine, CUDA only those that are visible to it.
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        command = [
            "nvidia-smi",
            f"--id={card}",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "-lms",
            "200",
        ]
        # It ends by itself when this process does: nobody reads its output then.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            for line in process.stdout:
                if self.in_loop and line.strip().isdigit():
                    self.busy.append(int(line))

    def write(self):
        looks = sum(self.phases.values())
        result = {
            "looks": looks,
            "phases": {phase: self.phases[phase] / max(1, looks) for phase in [*PHASES, "other"]},
            "busy": sum(self.busy) / len(self.busy) / 100 if self.busy else None,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.replace(self.path)


def main(path, flags):
    watch = Watch(path)
    stack_thread = threading.Thread(target=watch.watch_stack, daemon=True)
    stack_thread.start()
    if torch.cuda.is_available() and shutil.which("nvidia-smi"):
        threading.Thread(target=watch.watch_card, daemon=True).start()
    try:
        train.main(flags)
    finally:
        watch.ended.set()
        stack_thread.join()
        watch.write()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
