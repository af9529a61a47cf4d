"""fast/gram_newton_schulz.py: muon.newton_schulz, sooner.

The plain form multiplies the whole matrix by a polynomial at every step. The Gram form does not: the
polynomials commute, so it is enough to iterate on the small A = X X^T, to collect the product of the
polynomials, and to multiply X by it at the end. For a matrix of m rows and n >= m columns that is
34 m^3 + 4 m^2 n multiply-adds instead of 10 m^3 + 20 m^2 n: they cross at n = 1.5 m.

That loses small singular values, which A holds squared, and bf16 would lose too many: so the Gram
form is for fp32 (and fp16 on a GPU) only, and starts again from X now and then. In bf16 the plain
iteration runs, with two things that save time: intermediate matrices use the same memory again (fresh
memory costs a CPU 15 % of the products), and a X is added inside the product.

Muon(newton_schulz=gram_newton_schulz) takes it, or orthogonalize(..., iterate=gram_newton_schulz).
The two agree up to rounding (tests/test_fast_gram_newton_schulz.py). Left out: fused kernels, and
products that use that A is symmetric (a third of the work on a GPU).

Letters: N matrices in a batch, R rows, C columns, m <= n the same, sorted.
"""

from functools import lru_cache

import torch

GRAM_ASPECT = 1.5


@lru_cache(maxsize=16)
def scratch(shape, dtype, device):
    """Room for intermediate matrices, used again"""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def gram_newton_schulz(X, table, out):
    """out <- p_k(...p_1(X)) for X (N, R, C), p_i(X) = (a I + b A + c A^2) X with A = X X^T (N, m,
    m), on the small side: a tall X is multiplied from the right, A = X^T X, and never
    transposed."""
    N, R, C = X.shape
    m, n, tall = min(R, C), max(R, C), R > C
    A, Q, P, S, T = scratch((5, N, m, m), X.dtype, X.device)
    Y = scratch((2, N, R, C), X.dtype, X.device)
    narrow = X.dtype == torch.float16 and X.is_cuda
    gram = n > GRAM_ASPECT * m and (X.dtype == torch.float32 or narrow)

    def times(Q, X, out):
        return torch.bmm(X, Q, out=out) if tall else torch.bmm(Q, X, out=out)

    fresh = True  # no polynomial is waiting to be multiplied onto X
    for i, (a, b, c) in enumerate(table):
        if fresh:
            torch.bmm(X.mT, X, out=A) if tall else torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=Q)
        # a X inside the product: one pass over X less than a X + Q X
        Q.diagonal(dim1=-2, dim2=-1).add_(a)
        product = Q if fresh else torch.bmm(Q, P, out=S)
        last = i == len(table) - 1
        if last or not gram or i % 3 == 1:
            # On to X itself; the next step begins from it.
            X, fresh = times(product, X, out if last else Y[i % 2]), True
        else:
            # On to A alone: the polynomials so far are in P.
            torch.bmm(torch.bmm(Q, A, out=T), Q, out=A)
            Q, P = (P, Q) if fresh else (Q, P)
            S, P = (S, P) if fresh else (P, S)
            fresh = False
    return out if table else out.copy_(X)
