"""runner.py: every arm of an experiment with every seed, then table, figure and numbers.

A file of this folder is one question. It holds an `Experiment`: arms, each of which is the recipe
of train.py with other flags, with a patch, or both. A patch is a function without arguments that
changes the recipe: it puts a subclass in the place of a stage, or a function in the place of
another. It acts in the process of its own arm alone.

    python -m experiments                   the questions, and what was found
    python -m experiments.feedback          all arms, three seeds: out/feedback/feedback.json, .png
        --seeds=1337,1                      these seeds
        --steps=N                           in every arm: of RL, or of pretraining if that differs,
                                            or of every stage where arms are whole runs
        --out=DIR                           in the place of out
        --keep                              adds the seeds to those in experiments/results, draws
                                            all of them anew in experiments/figures
        --scale=tiny ...                    any other flag goes to train.py, in every run
    python -m experiments.runner --arm=experiments.objective:overlong_masked -- --stage=rl ...
                                            train.py with one patch, by hand

The same command again goes on where it stopped: what is finished is not run again. The default
runs, out/base-SEED, serve all experiments. Runs that need nothing of each other run side by side,
one on each of at most four cores: on two cores that takes two thirds of the time of one run after
the other with both cores each. Results hold the commit they were made at.

Left out: a test of significance. Three seeds carry none; differences are shown seed by seed.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import train
from command import drawing, failures, launch
from command import flags as command_flags
from command.output_files import check_writable, current_commit, digest_file, nan_for_null, to_json
from experiments import tables

HERE = Path(__file__).resolve().parent
usage_error = functools.partial(command_flags.usage_error, program="experiments")
# What the runner decides in every run.
OWN_FLAGS = {"--seed", "--stage", "--start_from", "--resume", "--export"}


@dataclass(frozen=True)
class Arm:
    """One arm of an experiment; one without flags and patch is the default run itself."""

    flags: tuple = ()  # of train.py
    patch: Callable | None = None  # changes the recipe in the arm's own process
    after: str = ""  # another arm, whose run it reads

    @property
    def is_default_run(self):
        return not self.flags and not self.patch

    @property
    def patch_name(self):
        """The patch as it is written on the command line, module:function"""
        if not self.patch:
            return ""
        return f"{self.patch.__module__}:{self.patch.__name__}"


@dataclass(frozen=True)
class Experiment:
    """One question: what is compared, how each arm is run, and which numbers and curves are told"""

    question: str
    curves: tuple  # keys of the step log, drawn by step
    arms: dict  # name: Arm
    # An SFT of the experiment's own, on the default run's pretraining, from which all arms begin.
    # Without it they begin at the SFT of the default run.
    sft: Arm | None = None
    # What an arm runs. Its flags and its patch belong to the first of these, and to eval after rl.
    # Without any, an arm is a whole run, and they belong to all of it.
    stages: tuple = ("rl", "eval")
    by_level: tuple = ()  # what the figure shows by level of the held-out tasks
    # Called with the folder of a run and the policies of its evaluation -> {name: number}, more
    # numbers of the run's end
    more: Callable = lambda folder, policies: {}
    by_seed: tuple = ()  # numbers of the end that are printed run by run, too
    # (x, y): numbers of the end that the figure sets against each other, a point for each run
    scatters: tuple = ()


@dataclass(frozen=True)
class Job:
    """One run of train.py."""

    words: tuple  # its command line
    patch: str = ""  # as module:function
    experiment: str = ""  # the command of the experiment that it belongs to
    threads: int = 0  # that it may use; 0: as many as a run by hand

    @property
    def folder(self):
        """The value of its --out, which every job has"""
        for word in self.words:
            if word.startswith("--out="):
                return Path(word.removeprefix("--out="))

    def record(self):
        """What finished.jsonl keeps of this run, {} if it has not run to its end in the folder: the
        commit that it was made at, and the digest of the evaluation that it left"""
        path, found = self.folder / "finished.jsonl", {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["run"] == [self.patch, *self.words]:
                found = entry
        return found

    def is_finished(self):
        """Has this very command, with this patch, run to its end in the folder? An evaluation by
        hand may have put another summary there since, whose numbers are not this run's."""
        found = self.record()
        return bool(found) and found["summary"] == self.digest_summary()

    def digest_summary(self):
        """Of the evaluation in the folder; "" where this run makes none"""
        path = self.folder / "summary.json"
        evaluates = not any(word.startswith("--stage=") for word in self.words)
        evaluates = evaluates or "--stage=eval" in self.words
        return digest_file(path) if evaluates and path.exists() else ""

    def note_finished(self):
        entry = {
            "run": [self.patch, *self.words],
            "commit": current_commit(),
            "summary": self.digest_summary(),
        }
        with open(self.folder / "finished.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")


# ---------------------------------------------------------------- in the process of an arm


def run_arm(name, argv):
    """Runs train.py with the patch `name`, written as module:function. The other processes that
    train.py starts do the same."""
    # The patch acts on the modules of this process.
    module, _, function = name.partition(":")
    try:
        patch = getattr(importlib.import_module(module), function)
        if not inspect.isfunction(patch):
            raise ValueError
    except (ImportError, AttributeError, ValueError):
        usage_error(
            f"--arm={name}: no such patch; one is named as experiments.objective:overlong_masked"
        )
    patch()

    # Its checkpoints are labelled with the patch, and what it starts or advises is this command.
    train.PATCH = name
    train.PROGRAM = [sys.executable, "-m", "experiments.runner", f"--arm={name}", "--"]
    failures.PROGRAM = f"python -m experiments.runner --arm={name} --"
    train.main(argv)


# ---------------------------------------------------------------- which runs there are


def plan_jobs(name, experiment, seed, out, steps, flags):
    """-> (the chains of jobs of one seed, {arm: the folder of its run}). The jobs of a chain run
    one after the other. The first chain is what all arms share; behind it all others may run."""
    # The flags of every job, and the arms with the number of steps that was asked for.
    common = [f"--seed={seed}", *flags]
    base = Path(out, f"base-{seed}")
    arms = {arm: with_steps(one, steps) for arm, one in experiment.arms.items()}

    # What comes before the arms, and the folder where they start: that of the default run, or that
    # of an SFT of the experiment's own, which starts from the default run's pretraining.
    jobs = plan_default_run(experiment, arms, base, common)
    start = base
    if experiment.sft:
        start = Path(out, name, f"base-{seed}")
        words = ("--stage=sft", f"--start_from={base}", f"--out={start}", *common)
        jobs.append(Job((*words, *experiment.sft.flags), experiment.sft.patch_name))

    # A chain for each arm, or the same one where an arm reads what another has made. An arm that is
    # the default run has been planned above.
    folders, chains = {}, {}
    for arm_name, arm in arms.items():
        folders[arm_name] = base
        if not arm.is_default_run:
            folder_name = arm_name.replace(", ", "-").replace(" ", "_")
            folders[arm_name] = Path(out, name, f"{folder_name}-{seed}")
            planned = plan_arm(experiment, arm, start, folders[arm_name], common)
            chains.setdefault(arm.after or arm_name, []).extend(planned)
    return [jobs, *chains.values()], folders


def plan_default_run(experiment, arms, base, common):
    """-> the jobs of what all experiments share: the whole default run where it is an arm, else as
    much of it as the arms need"""
    if any(arm.is_default_run for arm in arms.values()):
        return [Job((f"--out={base}", *common))]

    # Arms that begin with pretraining need nothing of it.
    if "rl" not in experiment.stages[:1]:
        return []
    stages = ["pretrain", "long"]
    if not experiment.sft:
        stages.append("sft")
    return [Job((f"--stage={stage}", f"--out={base}", *common)) for stage in stages]


def plan_arm(experiment, arm, start, folder, common):
    """-> the jobs of one arm, one for each stage. start: the folder of the SFT at which the arm
    begins, if it begins with RL; folder: of the arm"""
    if not experiment.stages:
        return [Job((f"--out={folder}", *common, *arm.flags), arm.patch_name)]
    begins_at_sft = experiment.stages[0] == "rl"

    jobs = []
    for stage in experiment.stages:
        words = [f"--stage={stage}"]
        if begins_at_sft:
            words.append(f"--start_from={start}")
        words += [f"--out={folder}", *common]

        # What the arm changes is its first stage; an evaluation of RL acts under the same rules.
        if stage == experiment.stages[0] or begins_at_sft:
            jobs.append(Job((*words, *arm.flags), arm.patch_name))
        else:
            jobs.append(Job(tuple(words)))
    return jobs


def with_steps(arm, steps):
    """The arm with another number of steps than its own; None: as it is"""
    if steps is None:
        return arm
    others = tuple(word for word in arm.flags if not word.startswith("--steps="))
    return replace(arm, flags=(*others, f"--steps={steps}"))


def check_flags(job):
    """What train.py would refuse is refused before anything runs."""
    given = train.FLAGS.parse(job.words)
    for stage in train.FLAGS.stages_of(given):
        train.FLAGS.configure({**given, "stage": stage}, stage)


# ---------------------------------------------------------------- running them


def run_job(job):
    """Runs train.py as the job says. A run that is finished is not started again, and one that was
    stopped goes on. The run ends when this process ends."""
    if job.is_finished():
        return

    # train.py itself, or this file with the patch.
    program = [str(HERE.parent / "train.py")]
    if job.patch:
        program = ["-m", "experiments.runner", f"--arm={job.patch}", "--"]

    # With this variable a run that is stopped, or that fills the disk, tells the command of the
    # experiment as the one that goes on.
    environment = {**os.environ, failures.EXPERIMENT_COMMAND: job.experiment}
    if job.threads:
        environment["OMP_NUM_THREADS"] = str(job.threads)
    done = subprocess.run(
        [sys.executable, *program, *job.words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=launch.tied_to_parent(signal.SIGTERM),
    )

    # The last line of its errors says why a run failed. A run that did not is noted as finished.
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        # subprocess gives a signal as its negative number, a shell as 128 more than it.
        code = done.returncode if done.returncode > 0 else 128 - done.returncode
        raise ChildProcessError(code, last or f"train.py ended with code {code}")
    job.note_finished()


# Runs at once, and the memory that is kept for each
AT_ONCE = 4
BYTES_OF_RUN = 4 << 30


def runs_at_once(cores):
    """As many as there are cores for, and memory where the system says how much it has"""
    most = min(cores, AT_ONCE)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = min(most, memory // BYTES_OF_RUN)
    return max(1, most)


def run_plans(name, plans):
    """Runs all jobs. plans: for each seed its chains, see plan_jobs. -> seconds"""
    # On a GPU one run at a time. Else a run has a core of its own, or more where there are.
    cores = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    at_once = runs_at_once(cores)
    shared = [chains[0] for chains in plans]
    others = [chain for chains in plans for chain in chains[1:]]
    bar = tqdm(total=sum(map(len, shared + others)), desc=name, leave=False)

    def begin_no_more():
        for jobs in shared + others:
            jobs.clear()

    def work(jobs, side_by_side):
        threads = cores // min(at_once, side_by_side) if cores > 1 else 0
        try:
            while jobs:
                run_job(replace(jobs.pop(0), threads=threads))
                bar.update()
        # If a run has failed, those that are begun go on to their ends.
        except ChildProcessError:
            begin_no_more()
            raise

    # A thread for each chain waits for its runs. The first failure ends the command with the run's
    # own last line and exit code.
    with bar, ThreadPoolExecutor(at_once) as pool:
        try:
            # What the arms share, and behind it the arms
            pending = {pool.submit(work, chains[0], len(shared)): chains[1:] for chains in plans}
            while pending:
                ended, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                    for chain in pending.pop(future):
                        pending[pool.submit(work, chain, len(others))] = []
        except ChildProcessError as failure:
            tqdm.write(failure.strerror, file=sys.stderr)
            raise SystemExit(failure.errno) from None
        except KeyboardInterrupt:  # Ctrl-C reached the runs, too: they save and end
            tqdm.write("experiments: stopped; the same command goes on", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            begin_no_more()
    return bar.format_dict["elapsed"]


# ---------------------------------------------------------------- the command


def main_or(module, argv, others):
    """The command of an experiment that can also be asked without training. others: {option: a
    function of its value}, in the place of the runs"""
    option, _, value = argv[0].partition("=") if argv else ("", "", "")
    if option not in others:
        return main(module, argv)
    if len(argv) > 1:
        command_flags.usage_error(f"{option} stands alone: leave {argv[1]} away", module)
    try:
        others[option](value)
    except (ValueError, OSError) as error:
        command_flags.usage_error(str(error), module)


def main(module, argv):
    """The command of an experiment. module: its name, such as experiments.feedback"""
    name = module.rpartition(".")[2]
    experiment = importlib.import_module(module).EXPERIMENT
    seeds, steps, out, keep, flags = read_experiment_flags(name, experiment, argv)

    # Everything that can be refused is refused before the first run.
    plans = [plan_jobs(name, experiment, seed, out, steps, flags) for seed in seeds]
    for chains, _ in plans:
        for job in itertools.chain(*chains):
            check_flags(job)

    # So is a folder that cannot be written.
    folder = Path(out, name)
    try:
        check_writable(folder)
    except OSError as error:
        usage_error(f"{error.filename or folder}: {error.strerror or error}")

    # All runs of all seeds. Each knows the command of the experiment.
    command = shlex.join(["python", "-m", module, *argv])
    runs = []
    for chains, _ in plans:
        runs.append([[replace(job, experiment=command) for job in chain] for chain in chains])
    seconds = run_plans(name, runs)

    # The numbers of every run, and how they were made: the commits are the runs' own, which may be
    # older than this command's.
    runs = {arm: [folders[arm] for _, folders in plans] for arm in experiment.arms}
    jobs = [job for chains, _ in plans for chain in chains for job in chain]
    record = {
        "commit": ", ".join(sorted({job.record().get("commit", "") for job in jobs})),
        "seeds": seeds,
        "steps": steps,
        "flags": flags,
        "results": tables.read_results(experiment, runs),
    }
    if keep:
        record = with_kept_seeds(record, HERE / "results" / f"{name}.json")
    seeds, results = record["seeds"], record["results"]

    # What they say: table, figure, numbers.
    text = tables.compare(experiment.question, results)
    if experiment.by_seed:
        text += f"\n\n{tables.list_runs(results, seeds, experiment.by_seed)}"
    problem = drawing.draw_safely(tables.draw_curves, experiment, results, folder / f"{name}.png")
    if problem:
        text += f"\n{problem}"

    record = {**record, "table": text}
    (folder / f"{name}.json").write_text(to_json(record, indent=1))
    if keep:
        shutil.copy(folder / f"{name}.json", HERE / "results")
        shutil.copy(folder / f"{name}.png", HERE / "figures")
    print(f"{text}\n\nseeds {', '.join(map(str, seeds))}; commit {record['commit']}")
    print(f"{folder}/{name}.json, {name}.png, in {seconds / 60:.0f} minutes")


def with_kept_seeds(record, path):
    """The record with the seeds that the file `path` keeps of runs like these (the same arms, steps
    and flags), first those. So an experiment can be run one seed after the other, on any machine.
    Whoever has changed the recipe meanwhile deletes the file first."""
    # A file that does not say how it was made (the oldest have no commit) is replaced, and so is
    # one of other arms, steps or flags.
    kept = json.loads(path.read_text()) if path.exists() else {}
    alike = list(kept.get("results", ())) == list(record["results"])
    alike = alike and all(kept.get(key) == record[key] for key in ("steps", "flags"))
    if "commit" not in kept or not alike:
        if kept:
            print(f"{path}: held other arms, steps or flags, and is replaced")
        return record

    # The outcomes of an arm stand in the order of the seeds. A seed that was run again counts once.
    places = [i for i, seed in enumerate(kept["seeds"]) if seed not in record["seeds"]]
    results = {}
    for arm, outcomes in record["results"].items():
        before = nan_for_null(kept["results"][arm])
        results[arm] = [before[i] for i in places] + outcomes
    commits = {*kept["commit"].split(", "), *record["commit"].split(", ")}
    seeds = [kept["seeds"][i] for i in places] + record["seeds"]
    return {**record, "commit": ", ".join(sorted(commits)), "seeds": seeds, "results": results}


def read_experiment_flags(name, experiment, argv):
    """The command line -> seeds, steps, out, keep, and the flags that go to train.py"""
    # What is set where no flag says otherwise. steps None: each arm has its own number.
    seeds, steps, out, keep, flags = [1337, 1, 2], None, "out", False, []
    own = flags_of_arms(experiment)

    for word in argv:
        flag, equals, value = word.partition("=")
        if flag in ("-h", "--help"):
            print(importlib.import_module(f"experiments.{name}").__doc__ + __doc__)
            raise SystemExit(0)

        # Flags of the runner.
        if flag == "--keep" and not equals:
            keep = True
        elif flag == "--out" and value:
            out = os.path.expanduser(value)
        elif flag == "--seeds":
            if not all(part.isdecimal() for part in value.split(",")):
                usage_error(f"{word}: numbers with commas, as --seeds=1337,1,2")
            seeds = [int(part) for part in value.split(",")]
        elif flag == "--steps":
            if not value.isdecimal() or int(value) < 1:
                usage_error(f"{word}: a whole number from 1 on, as --steps=20")
            steps = int(value)
        # Flags that are refused. Whatever remains is train.py's, which checks it (check_flags).
        elif flag in own:
            near = " (--seeds=...)" if flag == "--seed" else ""
            usage_error(f"{word}: the experiment sets it itself{near}")
        elif not word.startswith("--"):
            usage_error(f"{word!r}: flags are written as --name=value")
        else:
            flags.append(word)

    if len(set(seeds)) < len(seeds):
        usage_error("--seeds: each seed once, or its run would be counted twice")
    return seeds, steps, out, keep, flags


def flags_of_arms(experiment):
    """The names of flags that a user cannot give: the runner sets them, or an arm or its SFT sets
    them, since they are what the experiment is about."""
    arms = list(experiment.arms.values())
    if experiment.sft:
        arms.append(experiment.sft)
    own = set(OWN_FLAGS)
    for arm in arms:
        own |= {word.partition("=")[0] for word in arm.flags}
    return own


if __name__ == "__main__":
    words = sys.argv[1:]
    if not words or not words[0].startswith("--arm="):
        usage_error("which patch? --arm=experiments.objective:overlong_masked -- FLAGS OF TRAIN.PY")
    patch_name, flags_of_train = words[0].removeprefix("--arm="), words[1:]
    if flags_of_train[:1] == ["--"]:
        flags_of_train = flags_of_train[1:]
    run_arm(patch_name, flags_of_train)
