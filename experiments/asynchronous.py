"""asynchronous.py: What does it cost to sample while the trainer learns?

Stated (Technical Report on Composer 2): workers generate rollouts beside the trainer, and take new
weights in the middle of a rollout, so that its later tokens are fresher. How old a policy may be is
bounded and not corrected.

    in turn                     one process samples, learns, and samples again: the default run
    staleness 1, 4              by so many updates the sampler may be older: two or five steps are
                                under way, a worker for each
    staleness 1, whole          a worker takes new weights only between two groups
    staleness 4, weighted       a token's advantage times p / q, at most 1: of the policy that
                                learns, over the older one that sampled it (IMPALA, 1802.01561)

    python -m experiments.asynchronous

Arms run side by side, so what a step takes is compared only where each has the machine to itself:
python -m experiments.runner --arm=experiments.asynchronous:weights_between_groups -- --stage=rl
--processes=1 --workers=2 --staleness=1 --start_from=out/run --out=out/whole

Found (seed 1337, two cores): one update of delay costs nothing (.803 solved; in turn .806), four
end the run after 22 steps (seed 2, too), and weighted they do not (.736). No time is saved: trainer
and workers want the same cores (9.1 s a step; in turn 6.8 s). Whole: not run. Figure:
figures/asynchronous.png.
"""

import sys

import numpy as np

import train
from command import step_log
from experiments import runner
from experiments.runner import Arm, Experiment
from fast import workers


# Before every decoding step a sampler calls `refresh`. What a worker does before a group stays.
def weights_between_groups():
    begin = workers.Generator.__init__

    def without_refresh(self, *given, **options):
        begin(self, *given, **options)
        self.sampler.refresh = lambda: None

    workers.Generator.__init__ = without_refresh


# A token that an older policy has sampled may be unlikely by now. If it did harm, it is pushed down
# further, and the less likely it is, the larger is the gradient of its log-probability.
class Weighted(train.Reinforcement):
    def policy_objective(self, logp, batch, normaliser, reference):
        weight = (logp.detach() - batch["logprobs"]).exp().clamp(max=1)  # (B, T)
        batch = {**batch, "advantage": weight * batch["advantage"]}
        return super().policy_objective(logp, batch, normaliser, reference)


def weighted():
    train.STAGE["rl"] = Weighted


def what_it_cost(folder, policies):
    """Means over the steps, from the step log"""
    lines = step_log.read_step_log(folder, "rl")
    found = {}
    for name in ("stale", "stalest", "mismatch", "sync_bytes", "rollout_s", "seconds"):
        found[name] = float(np.mean([line[name] for line in lines if name in line] or [np.nan]))
    return found


def flags_for(staleness):
    """The flags of train.py. A worker samples the tasks of one step. If there were fewer than steps
    under way, a step would wait for its worker, and begin with fresher weights."""
    return ("--processes=1", f"--workers={1 + staleness}", f"--staleness={staleness}")


EXPERIMENT = Experiment(
    question="What does it cost to sample while the trainer learns?",
    curves=("solved", "stale"),
    arms={
        "in turn": Arm(),
        "staleness 1": Arm(flags_for(1)),
        "staleness 1, whole": Arm(flags_for(1), weights_between_groups),
        "staleness 4": Arm(flags_for(4)),
        "staleness 4, weighted": Arm(flags_for(4), weighted),
    },
    more=what_it_cost,
)

if __name__ == "__main__":
    runner.main("experiments.asynchronous", sys.argv[1:])
