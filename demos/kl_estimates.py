"""demos/kl_estimates.py: why the KL penalty of rollout.policy_loss is k1.

Three estimates of KL(pi || ref) from samples x ~ pi, with r = ref / pi:

    k1 = -log r          k2 = (log r)^2 / 2          k3 = r - 1 - log r

k1 and k3 have the right mean, k2 nearly. Close to the reference k3 scatters least; far from it a
rare sample with a large r makes its variance explode (Technical Report, section 4.1).

It stands apart from rollout.py because training uses k1 alone. `python rollout.py` draws what is
computed here. Left out: the bias of their gradients. As a loss k1's is zero in expectation, which
is why it is part of the reward.
"""

import numpy as np
import torch


def kl_estimates(logp, reference):
    """-> k1, k2, k3 per token: estimates of KL(pi || ref) with r = ref / pi. logp, reference: the
    log-probs of samples x ~ pi under pi and ref, of one shape (Technical Report 4.1: k1 is kept,
    k3's variance explodes)."""
    log_r = reference - logp
    k1 = -log_r
    k2 = log_r**2 / 2
    k3 = log_r.exp() - 1 - log_r
    return k1, k2, k3


def kl_variances(n=200_000):
    """The variance of one sample's estimate of KL(pi || ref), where pi = N(0, 1) and ref = N(d, 1),
    whose KL is d^2 / 2 -> those divergences (N,), {estimate: its variances}"""
    # The same samples for every distance. The constants of the two log densities are equal: they
    # cancel in r, and are left out.
    kl = np.linspace(0.02, 2, 25)
    x = torch.randn(n, dtype=torch.float64)  # samples of pi
    variances = {"k1, kept": [], "k2, biased": [], "k3": []}
    for nats in kl:
        distance = (2 * nats) ** 0.5
        estimates = kl_estimates(-(x**2) / 2, -((x - distance) ** 2) / 2)
        for values, estimate in zip(variances.values(), estimates):
            values.append(float(estimate.var()))
    return kl, variances
