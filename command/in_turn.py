"""command/in_turn.py: the rollouts of a run whose one process samples and learns in turn.

The plain form of fast/workers.py, where other processes sample while this one learns: the same
tasks, seeds and limits, and so the same tokens.

It stands apart from rollout.py because it only hands over weights and tasks. Left out: everything
that makes rollouts stale. The policy that sampled is the policy that learns.
"""

from world.sandbox import Sandbox


class InTurn:
    """Where the rollouts of training come from when one process samples and updates in turn. The
    trainer hands over its weights (publish), asks for rollouts of its tasks (submit), and takes the
    groups of rollouts (collect), which are sampled then."""

    restarts = 0  # of workers that died: there are none here

    def __init__(self, play, sampler, group, limits, compact=None):
        """play: rollout.sample_groups; sampler: with a model of its own, since publish() writes
        into it; group: rollouts per task; compact: see rollout.agent"""
        self.play = play
        self.sampler = sampler
        self.group = group
        self.limits = limits
        self.compact = compact
        self.sandbox = Sandbox()

    def publish(self, version, weights):
        """Takes the weights {name: tensor} of this version. -> entries for the log: none, since
        nothing is sent"""
        self.sampler.model.load_state_dict(weights)
        self.sampler.version = version
        return {}

    def submit(self, tasks, numbers, seed):
        """-> what collect() takes. Nothing is sampled yet."""
        return tasks, numbers, seed

    def collect(self, submitted):
        """Samples what submit() returned. -> a group of rollouts per task"""
        tasks, numbers, seed = submitted
        return self.play(
            self.sampler, tasks, self.group, seed, self.limits, self.sandbox, self.compact, numbers
        )

    def close(self):
        pass
