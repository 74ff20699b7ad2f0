"""The layers: ``ABN`` (batch norm and activation as torch has them), ``InPlaceABN``, ``InPlaceABNSync``."""

from __future__ import annotations

import copy
import operator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import guard
from .activations import SLOPE, named, resolve, warn
from .context import is_traced
from .functions import in_place, in_steps, synchronised
from .settings import WEIGHT_FLOOR, Settings, Vectors, check_fixed, settled

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync", "convert_sync", "set_active_group"]


class ABN(nn.Module):
    r"""Batch normalisation followed by an activation, as two ordinary steps.

    .. math::
        z = \varphi\Big(\gamma\,\frac{x-\mu}{\sqrt{\sigma^2+\epsilon}} + \beta\Big)

    The plain twin of :class:`InPlaceABN`: same arguments, same state dict, two feature maps kept where that keeps one. Use it
    for activations that cannot be inverted, for second derivatives, and to compare.

    Args:
        num_features: channels C of an input of shape (N, C) or (N, C, …).
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for the plain average over all batches.
        affine: learn γ and β; "bias" learns β alone and fixes γ to 1, for activations with φ(s·y) = s·φ(y) before a
            convolution, which can take γ over.
        track_running_stats: keep running statistics; without them evaluation uses the batch's own.
        activation: a key of :data:`inplace_abn.ACTIVATIONS`, or "none".
        activation_param: slope of leaky ReLU, α of ELU and CELU (0.01 for these too, unless given); others ignore it.
        slope: an earlier name of ``activation_param``.
        device: of the parameters and buffers.
        dtype: of the parameters and running statistics.

    ``eps``, ``momentum``, ``activation`` and ``activation_param`` may be assigned after construction.

    Example:
        >>> ABN(8, activation="relu")(torch.randn(2, 8, 5, 5)).min() >= 0
        tensor(True)
    """

    _version = 2
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool | Literal["bias"] = True,
        track_running_stats: bool = True,
        activation: str | None = "leaky_relu",
        activation_param: float = SLOPE,
        *,
        slope: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(track_running_stats, str):
            warn(
                f"{type(self).__name__}: the fifth argument {track_running_stats!r} is taken for the activation, as in "
                "inplace_abn 1.0; since 1.1 it is track_running_stats, so pass activation= by name",
                DeprecationWarning,
            )
            if activation is not None and not isinstance(activation, str):
                activation_param = activation
            activation, track_running_stats = track_running_stats, True
        if slope is not None:
            warn(f"{type(self).__name__}: slope= is now activation_param=", DeprecationWarning)
            activation_param = slope
        try:
            num_features = operator.index(num_features)
        except TypeError as error:
            raise TypeError(f"num_features is {num_features!r}; it must be a whole number") from error
        if num_features < 1:
            raise ValueError(f"num_features is {num_features}; it must be at least 1")
        if isinstance(affine, str) and affine != "bias":
            raise ValueError(f"affine is {affine!r}; it is True, False or 'bias'")
        affine = affine if affine == "bias" else bool(affine)
        how = settled(True, momentum, eps, activation, activation_param)
        if affine == "bias":
            check_fixed(how.phi)
        self.num_features = num_features
        # Plain numbers: compilers know no others.
        self.eps = how.eps
        self.momentum = how.momentum
        self.affine = affine
        self.track_running_stats = track_running_stats
        self.activation = activation
        self.activation_param = how.a
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_features, **like)) if affine is True else None
        self.bias = nn.Parameter(torch.empty(num_features, **like)) if affine else None
        counter = torch.tensor(0, dtype=torch.long, device=device) if track_running_stats else None
        self.register_buffer("running_mean", torch.empty(num_features, **like) if track_running_stats else None)
        self.register_buffer("running_var", torch.empty(num_features, **like) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", counter)
        self.reset_parameters()

    def reset_running_stats(self) -> None:
        """Forget the running statistics: mean 0, variance 1, no batches."""
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Set γ to 1, β to 0, and forget the running statistics."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _vectors(self) -> Vectors:
        """What the functions take beside x; batch statistics serve where there are no running ones."""
        # A module's attributes are slow to find, so straight from where they are; a parametrized weight is a property.
        parameters, buffers = self._parameters, self._buffers
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        mean, var, counter = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        if self.training and not self.track_running_stats:
            mean = var = None
        return weight, bias, mean, var, counter

    def _settings(self, *inverting: Any) -> Settings:
        """What the functions are asked to do; with what only those know that invert."""
        by_batch = self.training or self._buffers["running_mean"] is None
        return settled(by_batch, self.momentum, self.eps, self.activation, self.activation_param, *inverting)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, overwrite: bool = True) -> Tensor:
        """Z = φ(BN(x)), or φ(BN(x) + residual): a new tensor, whatever ``overwrite`` says."""
        return in_steps(x, self._vectors(), self._settings(), residual)

    def extra_repr(self) -> str:
        """What the layer was built with."""
        phi = named(self.activation)
        name = phi.name if phi else self.activation
        shown = f"{name}[{self.activation_param}]" if phi and phi.parameter else name
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}, "
            f"track_running_stats={self.track_running_stats}, activation={shown}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Files of the original library up to 1.0, and of old torch, have no counter.
        key = prefix + "num_batches_tracked"
        if self.num_batches_tracked is not None and key not in state_dict:
            counter = self.num_batches_tracked
            beside = state_dict.get(prefix + "running_mean", counter)
            fresh = torch.zeros((), dtype=torch.long, device="cpu" if beside.is_meta else beside.device)
            state_dict[key] = fresh if counter.is_meta else counter
        super()._load_from_state_dict(state_dict, prefix, *args)
        # New parameters: whether they can be inverted is to be found out.
        self.__dict__.pop("_guard", None)


class InPlaceABN(ABN):
    r"""Batch normalisation and an activation in one step that overwrites its input.

    .. math::
        \hat x = \frac{x-\mu}{\sqrt{\sigma^2+\epsilon}}, \qquad y = \gamma\,\hat x + \beta, \qquad z = \varphi(y)

    Only :math:`z` is kept for the backward pass; :math:`y` and :math:`\hat x` are recovered from it, so a convolution
    followed by this layer stores one feature map where convolution, batch norm and activation store two.
    Parameters and buffers are named as in :class:`torch.nn.BatchNorm2d`, whose state dict loads and computes the same.

    γ keeps its sign and is held at least ``weight_floor`` away from zero, in training and evaluation alike, so that it can be
    divided by. A layer whose γ and β would not give x̂ back well enough in the dtype z is stored in keeps x instead, until they
    do (:func:`inplace_abn.doctor` shows which). So do activations that cannot be inverted; see :func:`inplace_abn.recompute`.

    Args:
        variant: the paper's backward pass I (on x̂) or II (on y); II does less work, both give the same gradients.
        weight_floor: least magnitude of γ.

    The other arguments are those of :class:`ABN`.

    Warning:
        The input is destroyed. It must have no other reader: after ``z = layer(h)``, ``h`` is ``z``. Code that changes z in
        place afterwards (``z += r``, ``ReLU(inplace=True)``) makes the backward pass raise.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), InPlaceABN(8))
        >>> block(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 14, 14])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool | Literal["bias"] = True,
        track_running_stats: bool = True,
        activation: str | None = "leaky_relu",
        activation_param: float = SLOPE,
        *,
        variant: str = "II",
        weight_floor: float = WEIGHT_FLOOR,
        slope: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            slope=slope,
            device=device,
            dtype=dtype,
        )
        self.variant = variant
        # An error if there is anything wrong with these.
        self._settings(weight_floor, variant)
        self.weight_floor = float(weight_floor)

    def is_invertible(self) -> bool:
        """Whether φ has an inverse."""
        return resolve(self.activation, self.activation_param)[0].inverse is not None

    def _keeps_x(self, x: Tensor, residual: Tensor | None, how: Settings) -> bool:
        """Whether a forward pass keeps x because z would not give x̂ back well enough; see :mod:`inplace_abn.guard`."""
        if how.phi.inverse is None or not torch.is_grad_enabled():
            return False
        if is_traced():
            # Compiled and transformed code can neither look at numbers nor change the layer: what was decided before holds.
            own = self.__dict__.get("_guard")
            return own is not None and bool(own.keeps_x)
        return guard.of(self).decides(self, x, residual)

    def forward(self, x: Tensor, residual: Tensor | None = None, *, overwrite: bool = True) -> Tensor:
        """Z = φ(BN(x)), or φ(BN(x) + residual), in x's own memory where autograd allows it; the residual is only read.

        ``overwrite=False`` is for an x that has another reader: it stays as it is, and no more is kept.
        """
        how = self._settings(self.weight_floor, self.variant, overwrite)
        return in_place(x, self._vectors(), how, residual, self._keeps_x(x, residual, how))

    def extra_repr(self) -> str:
        """What the layer was built with."""
        floor = "" if self.weight_floor == WEIGHT_FLOOR else f", weight_floor={self.weight_floor}"
        return f"{super().extra_repr()}, variant={self.variant}{floor}"


class InPlaceABNSync(InPlaceABN):
    """:class:`InPlaceABN` with statistics over all ranks of a process group: as one process with all samples.

    In training, every rank of the group must call the layer equally often, be it with an empty batch; evaluation needs no other
    rank. Works on CPUs and GPUs, over gloo and nccl. :func:`convert_sync` makes these layers out of the others.

    Copies share the group; a pickle or saved module forgets it, and is over all ranks.

    Args:
        group: the process group; None for all ranks.

    The other arguments are those of :class:`InPlaceABN`.
    """

    def __init__(self, *args: Any, group: Any = None, **kwargs: Any) -> None:
        # The original takes group as its last positional argument: the eighth; the seventh in 1.0, whose fifth is a string.
        place = 6 if len(args) > 4 and isinstance(args[4], str) else 7
        if len(args) > place:
            args, group = args[:place], args[place]
        super().__init__(*args, **kwargs)
        self.group = group

    def set_group(self, group: Any) -> None:
        """Synchronise with the ranks of this group from now on."""
        self.group = group

    def forward(self, x: Tensor, residual: Tensor | None = None, *, overwrite: bool = True) -> Tensor:
        """Z = φ(BN(x)), or φ(BN(x) + residual), normalised by the statistics of the whole group."""
        if not self.training:
            # Without running statistics these are the batch's own, and still nobody else's business.
            return super().forward(x, residual, overwrite=overwrite)
        how = self._settings(self.weight_floor, self.variant, overwrite)
        return synchronised(x, self._vectors(), how, self.group, residual, self._keeps_x(x, residual, how))

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be stored.
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> InPlaceABNSync:
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(
            copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "group"}, memo), group=self.group
        )
        return new


def set_active_group(module: nn.Module, group: Any) -> None:
    """Hand the group to every layer inside that has ``set_group``."""
    for layer in module.modules():
        if callable(set_group := getattr(layer, "set_group", None)):
            set_group(group)


def convert_sync(model: nn.Module, group: Any = None, *, sync: bool = True) -> nn.Module:
    """Turn every :class:`InPlaceABN` in the model into :class:`InPlaceABNSync` over the group, or back with ``sync=False``.

    The layers stay the very same objects and change their class, so whoever holds one holds a converted one. Layers of a class
    derived from these, parametrized ones included, are left alone, with a warning. The model is returned.

    Example:
        >>> convert_sync(nn.Sequential(nn.Conv2d(3, 8, 3), InPlaceABN(8)))[1].group is None
        True
    """
    for layer in model.modules():
        if type(layer) in (InPlaceABN, InPlaceABNSync):
            layer.__class__ = InPlaceABNSync if sync else InPlaceABN
            layer.__dict__.pop("group", None)
            if sync:
                layer.__dict__["group"] = group
        elif isinstance(layer, InPlaceABN):
            warn(
                f"convert_sync leaves a {type(layer).__name__} as it is, being of a class of its own; derive it from "
                "InPlaceABNSync, or convert before parametrizing",
                UserWarning,
            )
    return model
