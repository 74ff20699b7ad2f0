"""In-place activated batch normalisation: half the activation memory of training convolutional networks."""

from . import checkpoints
from .activations import ACTIVATIONS
from .conversion import Report, convert, fuse, revert
from .doctor import doctor, guard_state, load_guard_state
from .functions import active_group, inplace_abn, inplace_abn_sync
from .memory import SavedBytes, saved_bytes
from .modules import ABN, InPlaceABN, InPlaceABNSync, convert_sync, set_active_group
from .planning import Plan, plan
from .recompute import recompute
from .training import param_groups, update_bn

__version__ = "2.0.0.dev0"

__all__ = [
    "ABN",
    "ACTIVATIONS",
    "InPlaceABN",
    "InPlaceABNSync",
    "Plan",
    "Report",
    "SavedBytes",
    "active_group",
    "checkpoints",
    "convert",
    "convert_sync",
    "doctor",
    "fuse",
    "guard_state",
    "inplace_abn",
    "inplace_abn_sync",
    "load_guard_state",
    "param_groups",
    "plan",
    "recompute",
    "revert",
    "saved_bytes",
    "set_active_group",
    "update_bn",
]
