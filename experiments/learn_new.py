"""learn_new.py: Learn something new, forget less: from demonstrations, hints, or another policy?

Two words that no policy has seen and that say nothing: the docs of a task ask for `mirror 7` and
mean `max(x, 7)`, for `fold 7` and mean `x * 7`. 20 steps on tasks of level 0, of which half need
them. Measured are such tasks with other seeds, and what is forgotten of all other levels.

    reward alone            RL, whose rollouts have to hit upon it
    plain SFT               imitates the expert: demonstrations in the place of rollouts; also
                            "slower", at a fifth of RL's rate, and that for 100 steps
    hints                   RL, and what the words mean above each edit that got it wrong
    self-distillation       the policy's own rollouts; the teacher reads what the words mean above
                            each turn. Forward KL, no reward, a fifth of the rate (SDFT, 2601.19897)
    another policy          the policy's own rollouts; the teacher is what plain SFT has become
                            (on-policy distillation), all that was sampled, no reward. A fifth of
                            the rate

    python -m experiments.learn_new

Found (seeds 2, 1, 1337): hints teach .93, .98 and .80 of what is new, plain SFT .69, .95 and .75,
the reward alone .64, .90 and .51. Of the other levels, .38, .45 and .43 before, they leave .34, .27
and .59; .24, .17 and .21; .46, .26 and .40. SFT slower teaches .44, .66 and .49 and leaves .38, .45
and .46, longer .76, .97 and .88, and .31, .18 and .24; self-distillation .20, .34 and .29, and .21,
.23 and .36; another policy .54, .53 and .46, and .30, .34 and .41. Where the words mean code that
the policy has never written (`7 - x`), no arm learns anything. Figure: figures/learn_new.png.
"""

import itertools
import random
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import eval
import feedback_distill
import rollout
import synth_tasks
import train
from command import checkpoints
from command.flags import usage_error
from experiments import contexts, runner
from experiments.runner import Arm, Experiment
from world import micro

# 1. What is new: a word, and the known operation that it means. The operation is known because the
#    policy must be able to write its code: it never samples a token that SFT has not shown (`abs`
#    has a log-probability of -20), so no reward finds it, and no hint raises it far enough.
NEW = {"mirror": "raise", "fold": "multiply"}
NEW_WORDS = micro.Words(list(NEW), list(micro.REDUCTIONS))


def is_new(function):
    return any(op in NEW for op, _ in function.steps)


# What the docs say of all other functions: the code's own words
plain_phrase = micro.Function.phrase


def phrase_by_name(function):
    """What the docs say of such a function: the word, and not what it means."""
    steps = [f"{op} {k}" for op, k in function.steps]
    return ", ".join([*steps, f"return {micro.ALL_REDUCTIONS[function.reduction]}"])


@contextmanager
def new_operations():
    """Within it half of the training tasks whose targets have one step need one of them. Held-out
    tasks stay what they are: they tell what is forgotten."""
    plain_draw = synth_tasks.draw_function

    def draw(rng, module, noun, steps, held_out, words):
        # Of a training task of level 0 the target alone has one step at most. Where all of them are
        # new, whoever writes them everywhere has learned enough, and forgets all else.
        if steps == (1, 1) and not held_out and rng.random() < 0.5:
            words = NEW_WORDS
        return plain_draw(rng, module, noun, steps, held_out, words)

    def phrase(function):
        return phrase_by_name(function) if is_new(function) else plain_phrase(function)

    for word, op in NEW.items():
        micro.ALL_OPS[word], micro.MEANING[word] = micro.ALL_OPS[op], micro.MEANING[op]
    synth_tasks.draw_function, micro.Function.phrase = draw, phrase
    try:
        yield
    finally:
        synth_tasks.draw_function, micro.Function.phrase = plain_draw, plain_phrase
        for word in NEW:
            del micro.ALL_OPS[word], micro.MEANING[word]


# 2. Who acts? RL hands tasks to `workers` and collects groups of rollouts from them. Whatever has
#    these methods can stand there: here an expert that plays its demonstrations.
class ScriptedExpert:
    """Stands where Reinforcement has its workers and its publisher: tasks go in, demonstrations
    come out. Nothing is sampled, so no weights are published."""

    restarts = 0

    def __init__(self, run):
        self.run = run

    # The publisher's part: new weights are for policies that sample.
    def publish(self, version, weights):
        return {}

    # The workers' part: a job goes in, its rollouts come out.
    def submit(self, tasks, numbers, seed):
        return tasks, numbers, seed

    def collect(self, job):
        """-> groups of demonstrations, each from random numbers of its own"""
        tasks, numbers, seed = job
        group = range(self.run.config.group_size)
        return [
            [self.play(task, random.Random(f"{seed}/{number}/{j}")) for j in group]
            for task, number in zip(tasks, numbers)
        ]

    def play(self, task, rng):
        """-> the rollout of one demonstration, judged without running its tests"""
        run, config = self.run, self.run.config
        limits = train.agent_limits(config)
        played = rollout.demonstrate(task, run.tokenizer, rng, limits, train.SLOPPY, run.compact)
        # The judge is not asked: the tests pass if every line that was deleted is there again.
        played.passed = True
        for path, deleted in task.solution.items():
            there = {"", *played.files[path].split("\n")}
            if not set(deleted.split("\n")) <= there:
                played.passed = False
        return played

    def close(self):
        pass


# 3. What is learned? With an advantage of one for all, the policy gradient is the gradient of the
#    demonstrations' likelihood: this is SFT in the loop of RL.
class Imitation(train.Reinforcement):
    def __init__(self, run):
        super().__init__(run)
        self.workers.close()
        self.workers = self.publisher = ScriptedExpert(run)

    def group_advantages(self, group):
        return np.ones(len(group))

    def group_losses(self, groups, log):
        yield from super().group_losses(groups, log)
        # These say how far the policy is from the one that sampled. Here no policy did.
        log.update(mismatch=0.0, stale=0.0, stalest=0)


# 4. The arms of distillation: rollouts as in RL, but the reward has weight zero. Left is what the
#    teacher says.
class HintsAlone(train.Reinforcement):
    def policy_objective(self, logp, batch, normaliser, reference):
        return 0.0 * super().policy_objective(logp, batch, normaliser, reference)


def tell_meaning(target):
    """What the docs of a task say where they do not use the new words. The policy heeds it: read
    above a wrong edit it makes the right text 4 nats likelier."""
    return f"{target.name}: {plain_phrase(target)}"


def meaning_at_wrong_edits(played, group):
    return contexts.above_wrong_edits(played, lambda e, i, target: tell_meaning(target))


def meaning_at_every_turn(played, group):
    """As the paper's demonstration: above each turn of each rollout"""
    text = "; ".join(map(tell_meaning, contexts.targets_of(played)))
    return contexts.above_every_turn(played, text)


class SelfDistillation(contexts.WithContext, HintsAlone):
    context = staticmethod(meaning_at_every_turn)


class AnotherPolicy(HintsAlone):
    """The teacher reads what the student reads. It has the weights with which the arm of plain SFT,
    whose folder stands beside this one's, has ended."""

    def __init__(self, run):
        super().__init__(run)
        out = Path(run.config.out)
        path = out.with_name(out.name.replace("another_policy", "plain_SFT")) / "rl"
        try:
            learned, _ = checkpoints.load_model(path)
        except (OSError, ValueError):
            usage_error(f"{path}: the arm of plain SFT comes first", "experiments.learn_new")
        weights = dict(itertools.chain(learned.named_parameters(), learned.named_buffers()))
        for name, held in self.teacher.weights.items():
            held.copy_(weights[name].detach())
        self.teacher.kind = "frozen"

    def find_hints(self, played):
        return contexts.above_every_turn(played, "")


# 5. The patches.
until_the_end = ExitStack()  # of the arm's process


def new_tasks():
    until_the_end.enter_context(new_operations())


def imitate():
    train.STAGE["rl"] = Imitation


def hints_alone():
    train.STAGE["rl"] = HintsAlone


def plain_sft():
    new_tasks()
    imitate()


def self_distillation():
    new_tasks()
    train.STAGE["rl"] = SelfDistillation
    feedback_distill.DIVERGENCE = "forward"


def hints():
    new_tasks()
    train.STAGE["rl"] = contexts.stage_with(meaning_at_wrong_edits)


def another_policy():
    new_tasks()
    train.STAGE["rl"] = AnotherPolicy


# 6. What is measured. The evaluation itself is of tasks that all know.
def learned_and_forgotten(folder, policies):
    """What is solved of tasks that need what is new, with seeds that no training has; and of the
    levels of the default run that no arm has trained on, before and after."""
    with new_operations():
        tasks = eval.held_out(96, (0,), split="train")
        tasks = [task for task in tasks if is_new(*contexts.targets_of(SimpleNamespace(task=task)))]
        groups = eval.play_tasks(*eval.load_policy(folder), tasks, passes=1)
    solved = [rollout.grade(played) or played.solved for group in groups for played in group]
    numbers = {"new": float(np.mean(solved))}
    for when, policy in (("before", "before RL"), ("after", "after RL")):
        levels = list(policies[policy]["levels"].values())
        numbers[f"other levels {when}"] = float(np.mean([level["solved"] for level in levels[1:]]))
    return numbers


# 7. The arms.
NARROW = ("--levels=0", "--curriculum=0", "--steps=20")
# A demonstration has no record of routed experts that could be replayed.
SFT = (*NARROW, "--feedback=0", "--router_replay=0")
# A fifth of RL's rate, at which plain SFT forgets less
SLOWER = "--adam_lr=1e-4"
EXPERIMENT = Experiment(
    question="Learn something new, forget less",
    curves=(),
    arms={
        "reward alone": Arm((*NARROW, "--feedback=0"), new_tasks),
        "plain SFT": Arm(SFT, plain_sft),
        "plain SFT, slower": Arm((*SFT, SLOWER), plain_sft),
        # It samples nothing: in the time of 20 steps of RL it can have these.
        "plain SFT, slower, 100 steps": runner.with_steps(Arm((*SFT, SLOWER), plain_sft), 100),
        "hints": Arm(NARROW, hints),
        "self-distillation": Arm((*NARROW, SLOWER), self_distillation),
        "another policy": Arm((*NARROW, SLOWER), another_policy, after="plain SFT"),
    },
    more=learned_and_forgotten,
    by_seed=("new", "other levels before", "other levels after"),
    scatters=(("other levels after", "new"),),
)

if __name__ == "__main__":
    runner.main("experiments.learn_new", sys.argv[1:])
