"""fast/cpu_kernels.py: the parts of a training step that moe.py writes plainly, sooner.

Each class or function here is the twin of one in moe.py with the same parameters and the same
result (tests/test_fast_cpu_kernels.py): fast.accelerate(model) puts the twin into its place.

    FastRMSNorm            RMSNorm with a backward by hand: on a CPU, where PyTorch makes it of many
                           steps, each over all of x, it takes a third of the time; on a GPU torch's
                           own fused norm
    attend_in_blocks       dot_product_attention: on a CPU 128 queries at a time with the keys that
                           they may see, .4 to .8 of the time of torch's kernel
    FastExperts            Experts: one grouped product per matrix, or in bf16 on a CPU, from 64
                           rows an expert on, a loop whose operands stay in the cache
    FastMoE                MoE: rows are permuted and put back by functions whose backward is a
                           gather too. Plain indexing would scatter-add the gradient, which on
                           several threads sums in an order of its own: a resumed run would not end
                           with the same bits. No wait for a GPU
    EmbedTokens            embed_tokens without a copy of the table in fp32
    TargetLogprobs         logprobs without the (N, V) scores, the largest tensor of a small model

Together, in bf16 on a CPU core, they give a training step of the laptop's model 1.3 times the
tokens/s of the plain form (8 x 256 tokens, `python -m benchmarks.train_step`, a busy machine); in
fp32 they gain nothing there, and a forward alone is no quicker in either.

Left out: a kernel of our own. All is made of torch's operators.

Letters: as in moe.py; N places whose log-prob is wanted, Q query width, V vocabulary or value
width.
"""

import torch
import torch.nn.functional as F

from moe import COLDEST, Experts, MoE, RMSNorm, dot_product_attention, divide_by_temperature


def round_up(number, multiple=64):
    """The next multiple. On a CPU, oneDNN compiles a kernel for every shape it meets and keeps a
    thousand of them: ragged numbers of rows cost this small model half of its time and
    gigabytes."""
    return -(-number // multiple) * multiple


def to_device(numbers, device):
    """A list of numbers -> a tensor there. Not torch.tensor(numbers, device=...): that waits until
    the GPU has done all it was asked before. From ordinary memory a copy that does not wait is
    safe, since CUDA takes the numbers before it returns."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def slice_rows(number, size):
    return [slice(i, i + size) for i in range(0, number, size)]


# ---------------------------------------------------------------- norm


def inverse_rms(x, eps):
    """x (..., D) -> 1 / sqrt(mean(x^2) + eps), (..., 1)"""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(norm).div_(x.shape[-1]).add_(eps).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * w with its backward by hand, x (..., D), w (D,)"""

    @staticmethod
    def forward(ctx, x, w, eps):
        r = inverse_rms(x, eps)
        ctx.save_for_backward(x, w, r)
        return (x * r).mul_(w)

    @staticmethod
    def backward(ctx, grad):
        x, w, r = ctx.saved_tensors
        product = grad * x
        # what changes the norm itself
        along = (product @ w)[..., None] * r**3 / -x.shape[-1]
        dx = (grad * w).mul_(r).addcmul_(x, along)
        return dx, product.flatten(0, -2).T @ r.flatten(), None


class FastRMSNorm(RMSNorm):
    def forward(self, x):
        x, w = x.float(), self.weight.float()
        if x.device.type != "cpu":
            y = F.rms_norm(x, w.shape, w, self.eps)
        elif torch.is_inference_mode_enabled():
            # in the sampler the same bits, without autograd's own time
            y = (x * inverse_rms(x, self.eps)).mul_(w)
        else:
            y = RMSNormFunction.apply(x, w, self.eps)
        return y.to(self.dtype)


# ---------------------------------------------------------------- attention


def attend_in_blocks(q, k, v, mask, scale, coarse=True):
    """moe.dot_product_attention. mask: None = causal; True = may look; or 0 and -inf in the dtype
    of q, which the kernel would make of it in every layer again. q (B, H, T, Q), k (B, H, S, Q),
    v (B, H, S, V). coarse: scores may be rounded to the dtype of q, as products on a CPU are."""
    S = k.shape[2]
    narrow = q.dtype == torch.bfloat16
    # Of fp32 a few queries with many keys, as in decoding, are the kernel's.
    few_keys = S <= 512 if mask is None else narrow and mask.dtype == torch.bfloat16
    exact = q.dtype == torch.float32 or coarse and narrow
    if few_keys and q.device.type == "cpu" and exact:
        return attend_by_products(q, k, v, mask, scale)
    # flash attention wants equal widths
    Q, V = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, Q - V)) if Q > V else v
    return dot_product_attention(q, k, v, mask, scale)[..., :V]


def attend_by_products(q, k, v, mask, scale):
    """Plain products of numbers that lie together, 128 queries at a time."""
    B, H, T, _ = q.shape
    S, V = v.shape[-2:]

    # All heads in one batch: (B * H, T or S, width), keys transposed.
    shared = k is v
    k = k.contiguous()
    v = k if shared else v.contiguous()
    q, v = q.flatten(0, 1), v.flatten(0, 1)
    k = k.flatten(0, 1).transpose(1, 2)

    out = []
    for rows in slice_rows(T, 128):
        # Under a causal mask these queries see the keys up to the last of them.
        end = min(rows.stop, S) if mask is None else S
        if mask is None:
            number = min(rows.stop, T) - rows.start
            bias = q.new_full((number, end), -torch.inf).triu(1 + rows.start)
        else:
            bias = mask[:, :, rows]
        bias = bias.expand(B, H, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(bias, q[:, rows], k[:, :, :end], alpha=scale)
        out.append(torch.bmm(scores.softmax(-1), v[:, :end]))
    attended = torch.cat(out, 1) if len(out) > 1 else out[0]
    return attended.view(B, H, T, V)


# ---------------------------------------------------------------- experts


def grouped_swiglu(x, counts, w_gate, w_up, w_down):
    """x (M, D) sorted by expert, counts (E,): rows per expert. One grouped GEMM per matrix instead
    of E small ones."""
    offsets = counts.cumsum(0).to(torch.int32)

    def multiply(rows, weights):
        return F.grouped_mm(rows, weights.to(rows.dtype).transpose(-2, -1), offs=offsets)

    return multiply(F.silu(multiply(x, w_gate)) * multiply(x, w_up), w_down)


class LoopedSwiGLU(torch.autograd.Function):
    """grouped_swiglu, one expert after the other. In bf16 on a CPU it wins from 64 rows an expert
    on: what one touches stays in the cache. Each product takes its expert's rows, filled up with
    those that follow. What it writes into these, their own experts overwrite later, and in the
    backward pass their gradient is zero: results land where they belong, and only the gradient's
    rows are copied."""

    @staticmethod
    def expert_rows(counts):
        """-> for each expert: its number, how many rows it has, and the slice that its products
        take"""
        numbers, ends = counts.tolist(), counts.cumsum(0).tolist()
        found = []
        for expert, (n, end) in enumerate(zip(numbers, ends)):
            found.append((expert, n, slice(end - n, end - n + round_up(n))))
        return found

    @staticmethod
    def forward(ctx, x, counts, w_gate, w_up, w_down):
        expert_rows, rows = LoopedSwiGLU.expert_rows(counts), len(x)
        x = F.pad(x, (0, 0, 0, 64))  # the last expert's too
        y, (gate, up) = torch.empty_like(x), x.new_empty(2, len(x), w_gate.shape[1])
        for i, _, r in expert_rows:
            torch.mm(x[r], w_gate[i].T, out=gate[r])
            torch.mm(x[r], w_up[i].T, out=up[r])
            hidden = F.silu(gate[r]).mul_(up[r])
            torch.mm(hidden, w_down[i].T, out=y[r])
        ctx.save_for_backward(x, gate, up, w_gate, w_up, w_down)
        ctx.expert_rows = expert_rows
        return y.resize_(rows, y.shape[1])  # no view: FSDP warns of those

    @staticmethod
    def backward(ctx, grad):
        x, gate, up, w_gate, w_up, w_down = ctx.saved_tensors
        d_gate, d_up, d_down = (torch.empty_like(w) for w in (w_gate, w_up, w_down))
        dx = torch.empty_like(x)
        for i, n, r in ctx.expert_rows:
            # The rows behind an expert's own are padding, or the next expert's.
            padding = r.stop - r.start - n
            dy = F.pad(grad[r.start : r.start + n], (0, 0, 0, padding))
            act = F.silu(gate[r])
            torch.mm(dy.T, act * up[r], out=d_down[i])
            dh = dy @ w_down[i]
            du = act.mul_(dh)
            dg = torch.ops.aten.silu_backward(dh.mul_(up[r]), gate[r])
            torch.mm(dg.T, x[r], out=d_gate[i])
            torch.mm(du.T, x[r], out=d_up[i])
            torch.addmm(dg @ w_gate[i], du, w_up[i], out=dx[r])
        return dx[: len(grad)], None, d_gate, d_up, d_down


def looped_swiglu(x, counts, w_gate, w_up, w_down):
    return LoopedSwiGLU.apply(x, counts, *(w.to(x.dtype) for w in (w_gate, w_up, w_down)))


class FastExperts(Experts):
    def forward(self, x, counts):
        many = len(x) >= 64 * len(counts)
        if x.device.type == "cpu" and x.dtype == torch.bfloat16 and many:
            return looped_swiglu(x, counts, *self.local_weights())
        return grouped_swiglu(x, counts, *self.local_weights())


# ---------------------------------------------------------------- to the experts and back


def sum_copies(rows, back, gates):
    """rows (M*K, D) by expert -> what came back to each token (M, K, D), and its sum weighted by
    gates (M, K): (M, D)"""
    copies = rows.index_select(0, back).view(*gates.shape, -1)
    # sums in fp32 whatever the dtype
    return copies, torch.bmm(gates[:, None], copies)[:, 0]


class Permute(torch.autograd.Function):
    """A copy of each token's row for each of its experts, sorted by expert. order (M*K,): which
    pair (token, expert) stands where; back (M*K,): where each pair stands."""

    @staticmethod
    def forward(ctx, x, order, back, k):
        ctx.save_for_backward(back)
        ctx.k = k
        return x.index_select(0, order // k)  # (M*K, D)

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        ones = grad.new_ones(len(grad) // ctx.k, ctx.k)
        return sum_copies(grad, back, ones)[1], None, None, None


class Unpermute(torch.autograd.Function):
    """The way back, Permute's transpose: the sum over a token's experts, each times its gate."""

    @staticmethod
    def forward(ctx, rows, order, back, gates):
        copies, y = sum_copies(rows, back, gates)
        ctx.save_for_backward(copies, order, gates)
        return y  # (M, D)

    @staticmethod
    def backward(ctx, grad):
        copies, order, gates = ctx.saved_tensors
        rows = grad.index_select(0, order // gates.shape[1]).mul_(gates.flatten()[order, None])
        return rows, None, None, torch.bmm(copies, grad[:, :, None])[:, :, 0]


class FastMoE(MoE):
    def route(self, x, replay, record):
        """x (B, T, D) -> tokens (M, D), choice and gates (M, K)"""
        B, T, D = x.shape
        tokens = x.reshape(B * T, D)
        if replay is not None:
            replay = replay.reshape(B * T, -1)
        choice, gates = self.router(tokens, replay, self.plausible)
        if record is not None:
            record.append(choice.view(B, T, -1))
        return tokens, choice, gates

    def forward(self, x, replay=None, record=None, real=None):
        """As MoE.forward; real (M*K,): 1.0 for each pair (token, expert) that counts as load, 0.0
        for padding."""
        tokens, choice, gates = self.route(x, replay, record)
        order = choice.flatten().argsort(stable=True)  # (M*K,)

        # Rows per expert. (bincount gives the same, but on a GPU Python waits until it has found
        # the largest number.)
        ones = torch.ones_like(order)
        counts = ones.new_zeros(len(self.router.bias))  # (E,)
        counts = counts.scatter_add_(0, choice.flatten(), ones)
        if self.training:
            # Padding is the same token over and over and lands on two or three experts: counted, it
            # would move the biases against the experts that real tokens need.
            counted = ones.float() if real is None else real
            self.router.load.scatter_add_(0, choice.flatten(), counted)

        back = torch.empty_like(order)
        back = back.scatter_(0, order, torch.arange(len(order), device=x.device))
        permuted = Permute.apply(tokens, order, back, self.router.k)
        outputs = self.dispatch(permuted, counts, self.experts)
        y = Unpermute.apply(outputs, order, back, gates.to(outputs.dtype)).view(x.shape)
        return y if self.shared is None else y + self.shared(x)


# ---------------------------------------------------------------- the first step and the last


class EmbedTokens(torch.autograd.Function):
    """Rows of W (V, D) for tokens (B, T) -> (B, T, D) in fp32. The gradient of a token's row is the
    sum over all its places: it is kept in fp32, whatever the dtype of W, and rounded once. In bf16
    the sum of a frequent token would soon stop growing."""

    @staticmethod
    def forward(ctx, tokens, W):
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = len(W), W.dtype
        return F.embedding(tokens, W).float()

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        dW = torch.ops.aten.embedding_dense_backward(grad, tokens, ctx.rows, -1, False)
        return None, dW.to(ctx.dtype)


class TargetLogprobs(torch.autograd.Function):
    """log softmax(h W^T / temperature)[target] for h (N, D), W (V, D), targets (N,) -> (N,) fp32, a
    stretch of rows at a time: the (N, V) scores, the largest tensor of a small model by far, never
    exist. The backward computes each stretch again."""

    @staticmethod
    def scores(h, W, temperature):
        return divide_by_temperature(F.linear(h, W.to(h.dtype)).float(), temperature)

    @staticmethod
    def stretches(h, W):
        return slice_rows(len(h), max(64, (1 << (26 if h.is_cuda else 18)) // len(W)))

    @staticmethod
    def forward(ctx, h, W, targets, temperature):
        ctx.save_for_backward(h, W, targets)
        ctx.temperature = temperature
        nll = []
        for r in TargetLogprobs.stretches(h, W):
            scores = TargetLogprobs.scores(h[r], W, temperature)
            nll.append(F.cross_entropy(scores, targets[r], reduction="none"))
        return -torch.cat(nll) if nll else h.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        h, W, targets = ctx.saved_tensors
        temperature, lower = ctx.temperature, W.to(h.dtype)
        # The sum over the stretches is kept in fp32, whatever the weights' dtype.
        dh = torch.empty_like(h)
        dW = torch.zeros_like(W, dtype=torch.promote_types(W.dtype, torch.float32))
        for r in TargetLogprobs.stretches(h, W):
            # grad * (one-hot - softmax)
            p = TargetLogprobs.scores(h[r], lower, temperature).softmax(-1).mul_(-grad[r, None])
            p.scatter_add_(1, targets[r, None], grad[r, None])
            if temperature != 1:
                p.div_(max(temperature, COLDEST))
            p = p.to(h.dtype)
            dh[r] = p @ lower
            dW += p.T @ h[r]
        return dh, dW.to(W.dtype), None, None
