"""fast/cpu_kernels.py: the parts of a training step that moe.py writes plainly, sooner.

Each class overrides one method of a class of moe.py, with the same arguments and the same result
(tests/test_fast_cpu_kernels.py):

    FastRMSNorm    RMSNorm.forward with a backward by hand: on a CPU, where PyTorch makes it of many
                   steps, each over all of x, it takes a third of the time; on a GPU torch's own
                   fused norm
    FastExperts    Experts.forward: one grouped product per matrix, or in bf16 on a CPU, from 64
                   rows an expert on, a loop whose operands stay in the cache
    FastMoE        MoE.forward: rows are permuted and put back by functions whose backward is a
                   gather too. Plain indexing would scatter-add the gradient, which on several
                   threads sums in an order of its own: a resumed run would not end with the same
                   bits. No wait for a GPU
    FastModel      Model.logprobs without the (N, V) scores, the largest tensor of a small model

attend_in_blocks is what fast/decode.py's FastAttention takes for moe.dot_product_attention: on a
CPU 128 queries at a time with the keys that they may see, .4 to .8 of the time of torch's kernel.

Left out: a kernel of our own. All is made of torch's operators.

Letters: as in moe.py; N places whose log-prob is wanted, Q query width, V vocabulary or value
width.
"""

import torch
import torch.nn.functional as F

from moe import COLDEST, Experts, Model, MoE, RMSNorm, divide_by_temperature, dot_product_attention


def round_up(number, multiple=64):
    """number -> the next multiple of `multiple`. On a CPU, oneDNN compiles a kernel for every shape
    it meets and keeps a thousand of them. Without rounding, the many different numbers of rows cost
    this small model half of its time, and gigabytes of memory."""
    return -(-number // multiple) * multiple


def to_device(numbers, device):
    """A list of numbers -> a tensor on `device`. torch.tensor(numbers, device=...) would wait until
    the GPU has done all that it was asked before; this copy does not wait. That is safe from
    ordinary (pageable) memory, since CUDA takes the numbers before the call returns."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def slice_rows(number, size):
    """Slices of `size` rows that cover `number` rows; the last one may reach beyond the end."""
    return [slice(i, i + size) for i in range(0, number, size)]


# ---------------------------------------------------------------- norm


def inverse_rms(x, eps):
    """x (..., D) -> 1 / sqrt(mean(x^2) + eps), (..., 1)"""
    # The norm is one pass over x. All that follows works on one number per row, in place.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
    return norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """moe.RMSNorm.forward with its backward by hand: x / sqrt(mean(x^2) + eps) * w, x (..., D),
    w (D,). Autograd would make the backward of many steps, each over all of x."""

    @staticmethod
    def forward(ctx, x, w, eps):
        r = inverse_rms(x, eps)  # (..., 1)
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w)

    @staticmethod
    def backward(ctx, grad):
        x, w, r = ctx.saved_tensors
        product = grad * x  # (..., D)

        # x changes the norm too: d r / d x = -r^3 x / D.
        along = (product @ w)[..., None] * r**3 / -x.shape[-1]  # (..., 1)
        dx = (grad * w).mul_(r).addcmul_(x, along)  # (..., D)

        # The gradient of w (D,) is a sum over all rows: one product of a matrix and a vector.
        return dx, product.reshape(-1, x.shape[-1]).T @ r.flatten(), None


class FastRMSNorm(RMSNorm):
    """The twin of moe.RMSNorm.forward. It is quicker by torch's fused norm on a GPU, and by fewer
    passes over x on a CPU."""

    def forward(self, x):
        x, w = x.float(), self.weight.float()  # (..., D), (D,)
        if x.device.type != "cpu":
            y = F.rms_norm(x, w.shape, w, self.eps)
        elif torch.is_inference_mode_enabled():
            # The sampler gets the same bits as training, without the time that autograd takes.
            y = (x * inverse_rms(x, self.eps)).mul_(w)
        else:
            y = RMSNormFunction.apply(x, w, self.eps)
        return y.to(self.dtype)


# ---------------------------------------------------------------- attention


def attend_in_blocks(q, k, v, mask, scale, coarse=True):
    """As moe.dot_product_attention: on a CPU it takes products of blocks where they are
    quicker than torch's kernel. q (B, H, T, Q), k (B, H, S, Q), v (B, H, S, V) -> (B, H, T, V).

    mask (B or 1, 1, T, S): None = causal; True = may look; or 0 and -inf in the dtype of q. torch's
    kernel makes the last form out of the second in every layer again, so callers make it once.
    coarse: scores may be rounded to the dtype of q, as the results of products on a CPU are."""
    S = k.shape[2]
    narrow = q.dtype == torch.bfloat16

    # Where do products win? Under a causal mask up to 512 keys. Under a mask that is given, in bf16
    # alone: in fp32 a few queries with many keys, as in decoding, are left to torch's kernel.
    few_keys = S <= 512 if mask is None else narrow and mask.dtype == torch.bfloat16
    # And are they exact enough? In bf16 they round the scores, which `coarse` has to allow.
    exact = q.dtype == torch.float32 or coarse and narrow
    if few_keys and q.device.type == "cpu" and exact:
        return attend_by_products(q, k, v, mask, scale)

    # Flash attention wants values as wide as keys: zeros fill them up and are cut off again.
    Q, V = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, Q - V)) if Q > V else v  # (B, H, S, max(Q, V))
    return dot_product_attention(q, k, v, mask, scale)[..., :V]


def attend_by_products(q, k, v, mask, scale):
    """Attention by batched products, 128 queries at a time: q (B, H, T, Q), k (B, H, S, Q), v (B,
    H, S, V) -> (B, H, T, V). Operands are copied to lie together in memory. Under a causal mask a
    block of queries leaves out the keys after its last one. mask: None = causal, or 0 and -inf."""
    B, H, T, _ = q.shape
    S, V = v.shape[-2:]

    # All heads in one batch. Where keys and values are one tensor (the latents of a cache), it is
    # copied once.
    shared = k is v
    k = k.contiguous()
    v = k if shared else v.contiguous()
    q, v = q.flatten(0, 1), v.flatten(0, 1)  # (B * H, T, Q), (B * H, S, V)
    k = k.flatten(0, 1).transpose(1, 2)  # (B * H, Q, S)

    out = []
    for rows in slice_rows(T, 128):
        # What these queries may look at, as numbers that are added to the scores. Under a causal
        # mask the keys end at the last of them.
        end = min(rows.stop, S) if mask is None else S
        if mask is None:
            number = min(rows.stop, T) - rows.start
            bias = q.new_full((number, end), -torch.inf).triu(1 + rows.start)
        else:
            bias = mask[:, :, rows]  # (B or 1, 1, rows, S)
        bias = bias.expand(B, H, -1, -1).flatten(0, 1)  # (B * H, rows, end)

        # Scale, product and mask in one call, so the scores are written once.
        scores = torch.baddbmm(bias, q[:, rows], k[:, :, :end], alpha=scale)  # (B * H, rows, end)
        out.append(torch.bmm(scores.softmax(-1), v[:, :end]))  # (B * H, rows, V)

    attended = torch.cat(out, 1) if len(out) > 1 else out[0]  # (B * H, T, V)
    return attended.view(B, H, T, V)


# ---------------------------------------------------------------- experts


def grouped_swiglu(x, counts, w_gate, w_up, w_down, round_rows=lambda rows: rows):
    """The twin of the loop in moe.Experts.forward: one grouped GEMM per matrix instead of E small
    ones. x (M, D) sorted by expert, counts (E,): rows per expert, w_gate and w_up (E, F, D), w_down
    (E, D, F) -> (M, D). round_rows: what becomes of the rows before a product (low precision)"""
    offsets = counts.cumsum(0).to(torch.int32)  # (E,): where each expert's rows end

    def multiply(rows, weights):  # (M, C) times (E, R, C) -> (M, R)
        return F.grouped_mm(rows, weights.to(rows.dtype).transpose(-2, -1), offs=offsets)

    # x is an operand of two products and is rounded once.
    x = round_rows(x)
    hidden = F.silu(multiply(x, w_gate)) * multiply(x, w_up)
    return multiply(round_rows(hidden), w_down)


class LoopedSwiGLU(torch.autograd.Function):
    """grouped_swiglu, one expert after the other. In bf16 on a CPU it is quicker from 64 rows an
    expert on: what one expert reads and writes stays in the cache, and few shapes come up. While
    the counts change from step to step, as they do in training, a training step with it takes .83
    to .97 of the time (median of 24, in turns, one core); where they repeat it takes the same.

    The number of rows of each product is rounded up (see round_up): a product takes its expert's
    rows and some of the rows behind them. Its results for those are wrong, and each is overwritten
    when its own expert comes. So results are written where they belong, without a copy. In the
    backward pass the rows behind must have no gradient: an expert's rows of the gradient are copied
    and filled up with zeros.

    Letters: n' rows of one product."""

    @staticmethod
    def expert_rows(counts):
        """counts (E,) -> for each expert: its number, how many rows it has, and the slice of rows
        that its products take, rounded up"""
        numbers, ends = counts.tolist(), counts.cumsum(0).tolist()
        found = []
        for expert, (n, end) in enumerate(zip(numbers, ends)):
            found.append((expert, n, slice(end - n, end - n + round_up(n))))
        return found

    @staticmethod
    def forward(ctx, x, counts, w_gate, w_up, w_down):
        expert_rows, rows = LoopedSwiGLU.expert_rows(counts), len(x)

        # The last expert's products need rows behind them as well.
        x = F.pad(x, (0, 0, 0, 64))  # (M + 64, D)
        # y (M + 64, D), gate and up (M + 64, F)
        y, (gate, up) = torch.empty_like(x), x.new_empty(2, len(x), w_gate.shape[1])

        # In the order of the rows: what an expert writes behind its own rows is overwritten next.
        for i, _, r in expert_rows:
            torch.mm(x[r], w_gate[i].T, out=gate[r])
            torch.mm(x[r], w_up[i].T, out=up[r])
            hidden = F.silu(gate[r]).mul_(up[r])  # (n', F)
            torch.mm(hidden, w_down[i].T, out=y[r])

        ctx.save_for_backward(x, gate, up, w_gate, w_up, w_down)
        ctx.expert_rows = expert_rows
        # Cut the padding off in place: FSDP warns where a result is a view.
        return y.resize_(rows, y.shape[1])  # (M, D)

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        d_gate, d_up, d_down = (torch.empty_like(w) for w in (w_gate, w_up, w_down))
        dx = torch.empty_like(x)  # (M + 64, D)
        for i, n, r in ctx.expert_rows:
            # The rows behind an expert's own are padding, or the next expert's: without gradient
            # they add nothing to the sums over rows that the weights' gradients are.
            padding = r.stop - r.start - n
            dy = F.pad(grad[r.start : r.start + n], (0, 0, 0, padding))  # (n', D)

            # y = hidden W_down^T with hidden = silu(gate) * up, which is computed again: kept, it
            # would be one more tensor of (M, F).
            act = F.silu(gate[r])  # (n', F)
            torch.mm(dy.T, act * up[r], out=d_down[i])
            dh = dy @ w_down[i]  # (n', F)

            # Through the product of silu(gate) and up; act and dh are not needed afterwards.
            du = act.mul_(dh)
            dg = torch.ops.aten.silu_backward(dh.mul_(up[r]), gate[r])

            # gate = x W_gate^T and up = x W_up^T. The zeros that dx gets behind this expert's rows
            # are overwritten by the next one.
            torch.mm(dg.T, x[r], out=d_gate[i])
            torch.mm(du.T, x[r], out=d_up[i])
            torch.addmm(dg @ w_gate[i], du, w_up[i], out=dx[r])
        return dx[: len(grad)], None, d_gate, d_up, d_down


def looped_swiglu(x, counts, w_gate, w_up, w_down):
    """As grouped_swiglu"""
    return LoopedSwiGLU.apply(x, counts, *(w.to(x.dtype) for w in (w_gate, w_up, w_down)))


class FastExperts(Experts):
    """The twin of moe.Experts.forward, which multiplies by one expert's matrices after the other's.
    It is quicker by a grouped GEMM, or by a loop whose operands stay in the cache."""

    def forward(self, x, counts):
        # From 64 rows an expert on the loop wins, see LoopedSwiGLU.
        many = len(x) >= 64 * len(counts)
        if x.device.type == "cpu" and x.dtype == torch.bfloat16 and many:
            return looped_swiglu(x, counts, *self.local_weights())
        return grouped_swiglu(x, counts, *self.local_weights())


# ---------------------------------------------------------------- to the experts and back


def sum_copies(rows, back, gates):
    """rows (M*K, D) sorted by expert, back (M*K,) -> each token's K rows (M, K, D), and their sum
    weighted by gates (M, K): (M, D)"""
    copies = rows.index_select(0, back).view(*gates.shape, -1)  # (M, K, D)
    # a product sums in fp32, whatever the dtype
    return copies, torch.bmm(gates[:, None], copies)[:, 0]


class Permute(torch.autograd.Function):
    """A copy of each token's row for each of its K experts, sorted by expert: x (M, D) -> (M*K, D).
    order (M*K,): the number of the pair (token, expert) that stands at each place; back (M*K,), its
    inverse: the place of each pair.

    The twin of moe's `tokens[order // top_k]`. The backward of indexing is a scatter-add; this
    one gathers each token's K gradients by `back`, and sums them in a fixed order."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, order // k)  # (M*K, D)

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        ones = grad.new_ones(len(grad) // ctx.k, ctx.k)  # (M, K)
        return sum_copies(grad, back, ones)[1], None, None, None


class Unpermute(torch.autograd.Function):
    """The way back, the transpose of Permute: rows (M*K, D) sorted by expert -> (M, D), the sum
    over a token's K experts, each times its gate (M, K). The twin of moe's index_add_: it gathers
    in both directions, so it sums in a fixed order."""

    @staticmethod
    def forward(ctx, rows, order, back, gates):
        copies, y = sum_copies(rows, back, gates)  # (M, K, D), (M, D)
        ctx.save_for_backward(copies, order, gates)
        return y  # (M, D)

    @staticmethod
    def backward(ctx, grad):
        copies, order, gates = ctx.saved_tensors
        # Each expert's row gets its token's gradient times the gate, sorted by expert: (M*K, D).
        rows = grad.index_select(0, order // gates.shape[1]).mul_(gates.flatten()[order, None])
        # Each gate gets the product of its expert's row and the token's gradient: (M, K).
        return rows, None, None, torch.bmm(copies, grad[:, :, None])[:, :, 0]


def route_tokens(layer, x, replay, record):
    """How every form of moe.MoE.forward begins: x (B, T, D) -> its tokens (M, D), the experts of
    each and their gates (M, K)"""
    tokens = x.flatten(0, 1)  # (M, D)
    if replay is not None:
        replay = replay.flatten(0, 1)  # (M, K)
    choice, gates = layer.router(tokens, replay)  # (M, K) each
    if record is not None:
        record.append(choice.view(*x.shape[:2], -1))
    return tokens, choice, gates


class FastMoE(MoE):
    """The twin of moe.MoE.forward. Python never waits for a GPU to tell it a size, and sums over a
    token's experts have a fixed order (see Permute)."""

    def forward(self, x, replay=None, record=None, real=None):
        tokens, choice, gates = route_tokens(self, x, replay, record)

        # Sort the M*K pairs by expert: each expert's rows become one contiguous block.
        order = choice.flatten().argsort(stable=True)  # (M*K,)

        # Rows per expert. bincount would give the same, but on a GPU it makes Python wait until it
        # has found the largest number.
        ones = torch.ones_like(order)
        counts = ones.new_zeros(len(self.router.bias))  # (E,)
        counts = counts.scatter_add_(0, choice.flatten(), ones)
        if self.training:
            # Padding is the same token over and over, and goes to two or three experts. If it were
            # counted, it would move the biases against experts that real tokens need.
            counted = ones if real is None else real.view(-1, 1).expand(-1, self.router.k).flatten()
            self.router.load.scatter_add_(0, choice.flatten(), counted.float())

        # The inverse of `order`: (M*K,). With both at hand, either direction is a gather.
        back = torch.empty_like(order)
        back = back.scatter_(0, order, torch.arange(len(order), device=x.device))

        # To the experts and back; the shared one sees every token.
        permuted = Permute.apply(tokens, order, back, self.router.k)  # (M*K, D)
        outputs = self.dispatch(permuted, counts, self.experts)  # (M*K, D)
        y = Unpermute.apply(outputs, order, back, gates.to(outputs.dtype)).view(x.shape)
        return y if self.shared is None else y + self.shared(x)


# ---------------------------------------------------------------- the last step


class TargetLogprobs(torch.autograd.Function):
    """The twin of what Model.logprobs computes: log softmax(h W^T / temperature)[target] for h (N,
    D), W (V, D), targets (N,) -> (N,) in fp32. It works on a stretch of rows at a time, so the (N,
    V) scores, by far the largest tensor of a small model, never exist. The backward computes each
    stretch again.

    Letters: n rows of one stretch."""

    @staticmethod
    def scores(h, W, temperature):
        """h (n, D), W (V, D) -> (n, V) in fp32"""
        return divide_by_temperature(F.linear(h, W.to(h.dtype)).float(), temperature)

    @staticmethod
    def stretches(h, W):
        """Slices of rows of h, of 2^26 scores on a GPU and 2^18 on a CPU (256 MB and 1 MB in fp32),
        but of at least 64 rows"""
        return slice_rows(len(h), max(64, (1 << (26 if h.is_cuda else 18)) // len(W)))

    @staticmethod
    def forward(ctx, h, W, targets, temperature):
        ctx.save_for_backward(h, W, targets)
        ctx.temperature = temperature
        nll = []
        for r in TargetLogprobs.stretches(h, W):
            scores = TargetLogprobs.scores(h[r], W, temperature)  # (n, V)
            nll.append(F.cross_entropy(scores, targets[r], reduction="none"))
        return -torch.cat(nll) if nll else h.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        h, W, targets = ctx.saved_tensors
        temperature, lower = ctx.temperature, W.to(h.dtype)

        # dW is a sum over the stretches: kept in fp32 at least, whatever the weights' dtype.
        dh = torch.empty_like(h)  # (N, D)
        dW = torch.zeros_like(W, dtype=torch.promote_types(W.dtype, torch.float32))  # (V, D)

        for r in TargetLogprobs.stretches(h, W):
            # The gradient of the scores is grad * (one-hot - softmax) / temperature: (n, V). As in
            # the forward pass, a temperature below COLDEST counts as COLDEST.
            p = TargetLogprobs.scores(h[r], lower, temperature).softmax(-1).mul_(-grad[r, None])
            p.scatter_add_(1, targets[r, None], grad[r, None])
            if temperature != 1:
                p.div_(max(temperature, COLDEST))

            # scores = h W^T
            p = p.to(h.dtype)
            dh[r] = p @ lower
            dW += p.T @ h[r]
        return dh, dW.to(W.dtype), None, None


class FastModel(Model):
    """The twin of moe.Model.logprobs, without scores of (B, T, vocab)"""

    def logprobs(self, hidden, targets, temperature=1.0, where=None):
        # Selecting by a mask makes Python wait for a GPU to count the rows, so it is left out where
        # all are wanted.
        h = hidden.flatten(0, 1) if where is None else hidden[where]  # (N, D)
        t = targets.flatten() if where is None else targets[where]  # (N,)

        # Few different numbers of rows, see round_up. Rows of zeros fill up and are cut off again.
        fill = round_up(len(t)) - len(t)
        h = F.pad(self.norm(h), (0, 0, 0, fill))
        found = TargetLogprobs.apply(h, self.head.weight, F.pad(t, (0, fill)), temperature)
        found = found[: len(t)]  # (N,)

        if where is None:
            return found.view(targets.shape)
        return torch.zeros(targets.shape, device=found.device).masked_scatter(where, found)
