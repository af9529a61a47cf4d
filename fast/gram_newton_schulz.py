"""fast/gram_newton_schulz.py: muon.newton_schulz, sooner.

The twin of muon.newton_schulz, since most of an optimizer step is this iteration. A whole step with
it takes .77 of the time of torch.optim.Muon in fp32, .90 in bf16 (67.2M parameters, one core;
benchmarks/README.md).

The plain form multiplies the whole matrix by a polynomial at every step. The Gram form does not:
the polynomials commute, so it is enough to iterate on the small A = X X^T, to collect the product
of the polynomials, and to multiply X by it at the end. For a matrix of m rows and n >= m columns
that is 28 m^3 + 8 m^2 n FLOPs instead of 10 m^3 + 20 m^2 n: they cross at n = 1.5 m.

That loses small singular values, which A holds squared, and bf16 would lose too many: so the Gram
form is for fp32 only, and starts again from X now and then. In bf16 the plain iteration runs, with
two things that save time: intermediate matrices use the same memory again (fresh memory costs a CPU
15 % of the products), and a X is added inside the product.

train.py takes it while the plain form reads as it did (fast/twins.py); by hand,
Muon(newton_schulz=gram_newton_schulz) or orthogonalize(..., iterate=gram_newton_schulz) take it.
The two agree up to rounding (tests/test_fast_gram_newton_schulz.py). Left out: fused kernels, and
products that use that A is symmetric (a third of the work on a GPU).

Letters: N matrices in a batch, R rows, C columns, m <= n the same, sorted.
"""

from functools import lru_cache

import torch

from muon import COEFFICIENTS

GRAM_ASPECT = 1.5


@lru_cache(maxsize=16)
def scratch(shape, dtype, device):
    """Memory for intermediate matrices, which the next call with this shape uses again"""
    # What is made in inference mode could not be used outside of it later.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def gram_newton_schulz(X, steps=5):
    """The twin of muon.newton_schulz for X (N, R, C), of norm 1 at most -> (N, R, C). It is
    quicker because it iterates on the small Gram matrix A (N, m, m) and multiplies X itself only
    now and then. Where that does not pay it runs the plain iteration, in memory that is used again
    and with one pass over X less per step. A tall X is multiplied from the right, with A = X^T X,
    and never transposed."""
    a, b, c = COEFFICIENTS
    N, R, C = X.shape
    m, n, tall = min(R, C), max(R, C), R > C

    # The Gram form pays for matrices that are far from square, and in the dtype that holds the
    # squares of small singular values.
    gram = n > GRAM_ASPECT * m and X.dtype == torch.float32

    # A is the Gram matrix, Q the polynomial of one step, P the product of the polynomials that X
    # has not been multiplied by yet: (N, m, m) each. X alternates between two buffers, since a
    # product cannot be written over its own operand.
    A, Q, P, next_P, QA = scratch((5, N, m, m), X.dtype, X.device)
    buffers = scratch((2, N, R, C), X.dtype, X.device)

    pending = False  # is there a P that X has not been multiplied by?
    for step in range(steps):
        # Q = a I + b A + c A^2, where A belongs to X after all steps so far. While a P is pending,
        # A has been brought up to date below.
        if not pending:
            torch.bmm(X.mT, X, out=A) if tall else torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=Q)

        # a on the diagonal: a X is added inside the product, one pass over X less than a X + Q X.
        Q.diagonal(dim1=-2, dim2=-1).add_(a)
        product = torch.bmm(Q, P, out=next_P) if pending else Q

        last = step == steps - 1
        if last or not gram or step % 3 == 1:
            # Multiply X itself, and compute A anew from it in the next step. Every third step does
            # so in the Gram form: A alone would lose small singular values. The last result leaves
            # this function, so it needs memory of its own.
            target = torch.empty_like(buffers[0]) if last else buffers[step % 2]
            X = torch.bmm(X, product, out=target) if tall else torch.bmm(product, X, out=target)
            pending = False
        else:
            # Multiply A alone: the next X is Q X, so the next A is Q A Q. P keeps the product of
            # the polynomials for X. The old P, or Q, becomes memory for the next step.
            torch.bmm(torch.bmm(Q, A, out=QA), Q, out=A)
            if pending:
                P, next_P = next_P, P
            else:
                P, Q = Q, P
            pending = True
    return X
