# ruff: noqa: E501 - sentences and small makers read best on one line
"""Two small operators of the chunked gated delta rule, as Triton kernels with plain fallbacks.

tri_inv inverts unit lower triangular 64 x 64 blocks; scan runs the state from chunk to chunk. Both are differentiable custom
operators, so compiled layers keep them whole. `check` compares kernels with the plain paths on the machine at hand.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # machines without a GPU train on the plain paths
    triton = None

USE = {"inverse": True, "scan": True}  # cleared by check() where a kernel disagrees

if triton:

    @triton.jit
    def _row(a_ptr, base, o, i, t, r):
        """Row i of the inverse of the unit lower 16 x 16 block at (o, o)."""
        a = tl.where(r < i, tl.load(a_ptr + base + (o + i) * 64 + o + r), 0.0)
        return tl.where(r[:, None] == i, t - tl.sum(a[:, None] * t, 0)[None, :], t)

    @triton.jit
    def _dot(a, b):
        return tl.dot(a, b, input_precision="ieee")

    @triton.jit
    def _inverse_kernel(a_ptr, out):
        """Invert the four diagonal 16 x 16 blocks, then the blocks below them from these."""
        base = tl.program_id(0).to(tl.int64) * 4096
        r = tl.arange(0, 16)
        at = r[:, None] * 64 + r[None, :]
        t0 = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
        t1 = t0
        t2 = t0
        t3 = t0
        z = t0 * 0.0
        for i in range(1, 16):
            t0 = _row(a_ptr, base, 0, i, t0, r)
            t1 = _row(a_ptr, base, 16, i, t1, r)
            t2 = _row(a_ptr, base, 32, i, t2, r)
            t3 = _row(a_ptr, base, 48, i, t3, r)
        a_ptr += base
        out += base
        a10 = tl.load(a_ptr + 1024 + at)
        a20 = tl.load(a_ptr + 2048 + at)
        a21 = tl.load(a_ptr + 2064 + at)
        a30 = tl.load(a_ptr + 3072 + at)
        a31 = tl.load(a_ptr + 3088 + at)
        a32 = tl.load(a_ptr + 3104 + at)
        t10 = -_dot(t1, _dot(a10, t0))
        t21 = -_dot(t2, _dot(a21, t1))
        t32 = -_dot(t3, _dot(a32, t2))
        t20 = -_dot(t2, _dot(a20, t0) + _dot(a21, t10))
        t31 = -_dot(t3, _dot(a31, t1) + _dot(a32, t21))
        t30 = -_dot(t3, _dot(a30, t0) + _dot(a31, t10) + _dot(a32, t20))
        tl.store(out + at, t0)
        tl.store(out + 16 + at, z)
        tl.store(out + 32 + at, z)
        tl.store(out + 48 + at, z)
        tl.store(out + 1024 + at, t10)
        tl.store(out + 1040 + at, t1)
        tl.store(out + 1056 + at, z)
        tl.store(out + 1072 + at, z)
        tl.store(out + 2048 + at, t20)
        tl.store(out + 2064 + at, t21)
        tl.store(out + 2080 + at, t2)
        tl.store(out + 2096 + at, z)
        tl.store(out + 3072 + at, t30)
        tl.store(out + 3088 + at, t31)
        tl.store(out + 3104 + at, t32)
        tl.store(out + 3120 + at, t3)

    @triton.jit
    def _scan_kernel(
        p_ptr,
        r_ptr,
        s_ptr,
        heads,
        n_chunks: tl.constexpr,
        back: tl.constexpr,
        dim: tl.constexpr,
        cols: tl.constexpr,
    ):
        """S[n + 1] = P[n] S[n] + R[n] from S[0] = 0; backwards: S[n - 1] = P[n]^T S[n] + R[n] from S[N - 1] = 0."""
        b = tl.program_id(0)
        i = tl.arange(0, dim)
        c = tl.arange(0, cols) + tl.program_id(1) * cols
        s = tl.zeros([dim, cols], tl.float32)
        n = n_chunks - 1 if back else 0
        tl.store(s_ptr + (n * heads + b) * dim * dim + i[:, None] * dim + c[None, :], s)
        for _ in range(n_chunks - 1):
            o = (n * heads + b) * dim * dim
            if back:
                p = tl.load(p_ptr + o + i[None, :] * dim + i[:, None])
            else:
                p = tl.load(p_ptr + o + i[:, None] * dim + i[None, :])
            s = tl.dot(p, s, input_precision="tf32") + tl.load(r_ptr + o + i[:, None] * dim + c[None, :])
            n = n - 1 if back else n + 1
            tl.store(s_ptr + (n * heads + b) * dim * dim + i[:, None] * dim + c[None, :], s)


@torch.library.custom_op("demo::tri_inv", mutates_args=())
def tri_inv(a: torch.Tensor) -> torch.Tensor:
    """(I + strictly lower part of a)^-1 for float32 [n, 64, 64]."""
    a = a.contiguous()
    if a.is_cuda and USE["inverse"]:
        out = torch.empty_like(a)
        _inverse_kernel[(a.shape[0],)](a, out, num_warps=1)
        return out
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_triangular(eye + a.tril(-1), eye.expand_as(a), upper=False, unitriangular=True)


@tri_inv.register_fake
def _(a):
    return torch.empty_like(a)


def _tri_inv_backward(ctx, grad):
    (t,) = ctx.saved_tensors
    return -torch.bmm(torch.bmm(t.mT, grad), t.mT).tril(-1)


tri_inv.register_autograd(
    _tri_inv_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output)
)


def _launch_scan(p: torch.Tensor, r: torch.Tensor, back: bool) -> torch.Tensor:
    p, r = p.contiguous(), r.contiguous()
    s = torch.empty_like(r)
    n, heads, dim, _ = p.shape
    _scan_kernel[(heads, dim // 32)](p, r, s, heads, n, back, dim, 32, num_warps=4)
    return s


@torch.library.custom_op("demo::scan", mutates_args=())
def scan(p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """S[0] = 0, S[n + 1] = p[n] S[n] + r[n]; float32 [chunks, heads, 64, 64]."""
    if p.is_cuda and USE["scan"]:
        return _launch_scan(p, r, False)
    s = torch.zeros_like(r)
    for n in range(p.shape[0] - 1):
        torch.baddbmm(r[n], p[n], s[n], out=s[n + 1])
    return s


@scan.register_fake
def _(p, r):
    return torch.empty_like(r)


@torch.library.custom_op("demo::scan_backward", mutates_args=())
def scan_backward(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient of r: dr[n] = grad[n + 1] + p[n + 1]^T dr[n + 1]."""
    if p.is_cuda and USE["scan"]:
        return _launch_scan(p, grad, True)
    dr = torch.zeros_like(grad)
    for n in range(p.shape[0] - 2, -1, -1):
        torch.baddbmm(grad[n + 1], p[n + 1].mT, dr[n + 1], out=dr[n])
    return dr


@scan_backward.register_fake
def _(p, grad):
    return torch.empty_like(grad)


def _scan_autograd(ctx, grad):
    p, s = ctx.saved_tensors
    dr = scan_backward(p, grad.contiguous())
    dp = torch.bmm(dr.flatten(0, 1), s.flatten(0, 1).mT).view_as(p)
    return dp, dr


scan.register_autograd(
    _scan_autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output)
)


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@torch.no_grad()
def check(device: str) -> dict[str, float]:
    """Relative errors of the kernels on random data; a kernel that errs or fails is switched off."""
    p = torch.randn(32, 64, 64, 64, device=device) * 0.05
    r = torch.randn_like(p)
    a = (torch.randn(512, 64, 64, device=device) * 0.3).tril(-1)
    errors = {"inverse": 9.0, "scan": 9.0}
    try:
        exact = torch.linalg.inv(torch.eye(64, device=device, dtype=torch.float64) + a.double())
        errors["inverse"] = _relative(tri_inv(a), exact)
        fast = [scan(p, r), scan_backward(p, r)]
        USE["scan"] = False
        errors["scan"] = max(
            _relative(x, y) for x, y in zip(fast, [scan(p, r), scan_backward(p, r)], strict=True)
        )
    except Exception as error:  # whatever the compiler says, training goes on without the kernel
        print("kernel failed:", str(error)[:300], flush=True)
    USE["inverse"], USE["scan"] = errors["inverse"] < 1e-3, errors["scan"] < 5e-3
    return errors
