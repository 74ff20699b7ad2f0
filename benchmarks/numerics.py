"""How exactly x̂, dx and dγ come back from a stored z, over γ, β, the residual's size and the dtype; no GPU needed.

    python benchmarks/numerics.py [--out benchmarks/results]

One row per case: relative L2 errors against float64 on the same input, of this layer inverting z, of this layer keeping x, and of
torch's batch norm, sum and leaky ReLU in the same dtype; the guard's estimate for x̂, and what it decides. x̂ is standard normal,
2¹⁶ values of one channel, and dz likewise. Medians over five draws.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from inplace_abn import guard, inplace_abn, reference
from inplace_abn.activations import resolve

COLUMNS = [
    "dtype",
    "gamma",
    "beta",
    "sigma_r",
    "estimate",
    "decision",
    "xhat",
    "dx",
    "dgamma",
    "dx_kept",
    "dgamma_kept",
]
COLUMNS += ["dx_plain", "dgamma_plain", "torch"]
M, SLOPE = 1 << 16, 0.01
GAMMAS, BETAS, SIGMAS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001), (0.0, 0.5, 2.0), (0.0, 1.0, 4.0)


def far(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def gradients(how: str, x: Tensor, r: Tensor | None, dz: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Dx and dγ of one way to compute the layer, in x's dtype."""
    x, weight, bias = (t.clone().requires_grad_() for t in (x, weight, bias))
    if how == "plain":
        y = F.batch_norm(x, None, None, weight, bias, True)
        z = F.leaky_relu(y if r is None else y + r, SLOPE)
    else:
        options = {"activation_param": SLOPE, "residual": r, "keep_x": how == "kept"}
        z = inplace_abn(x * 1, weight, bias, None, None, **options)
    return list(torch.autograd.grad(z, [x, weight], dz))


def case(dtype: torch.dtype, gamma: float, beta: float, sigma: float, seed: int) -> list[float]:
    g = torch.Generator().manual_seed(seed)
    # A mean, as convolutions have one.
    x = (torch.randn(M, 1, generator=g, dtype=torch.float64) + 0.5).to(dtype)
    dz = torch.randn(M, 1, generator=g, dtype=torch.float64).to(dtype)
    r = (torch.randn(M, 1, generator=g, dtype=torch.float64) * sigma).to(dtype) if sigma else None
    weight, bias = torch.tensor([gamma]), torch.tensor([beta])
    wide = [x.double(), None if r is None else r.double(), dz.double(), weight.double(), bias.double()]
    truth = gradients("plain", *wide)
    phi, a = resolve("leaky_relu", SLOPE)
    z = x.clone()
    reference.normalize_batch_(z, weight, bias, None, None, None, 0.1, 1e-5, 0.0, phi, a, r)
    assert phi.inverse is not None
    recovered = (phi.inverse(z.double(), a) - (0 if r is None else r.double()) - beta) / gamma
    xhat = F.batch_norm(x.double(), None, None, None, None, True)
    errors = [far(recovered, xhat)]
    for how in ("inverted", "kept", "plain"):
        errors += [far(got, want) for got, want in zip(gradients(how, x, r, dz, weight, bias), truth, strict=True)]
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = given.out / f"numerics-cpu-torch{torch.__version__.split('+')[0]}.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        for dtype, gamma, beta, sigma in itertools.product(dtypes, GAMMAS, BETAS, SIGMAS):
            errors = [
                statistics.median(e) for e in zip(*(case(dtype, gamma, beta, sigma, s) for s in range(5)), strict=True)
            ]
            residual = torch.full((2, 1), sigma) if sigma else None
            e = guard.estimate(torch.tensor([gamma]), torch.tensor([beta]), residual, dtype, 0.0, 1)
            decision = "keeps x" if guard.is_too_large(e) else "inverts"
            xhat, dx, dgamma, dx_kept, dgamma_kept, dx_plain, dgamma_plain = (f"{v:.1e}" for v in errors)
            kind = [str(dtype).removeprefix("torch."), gamma, beta, sigma, f"{float(e):.1e}", decision]
            rows.writerow([*kind, xhat, dx, dgamma, dx_kept, dgamma_kept, dx_plain, dgamma_plain, torch.__version__])
    print(path)


if __name__ == "__main__":
    main()
