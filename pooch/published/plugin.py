"""What the published methods and experiments add to Pooch."""

from __future__ import annotations

from ..ground.plugins import Plugin, Provided

_POLICIES = {  # by module; in the order of tables
    "pooch_baselines": ("recompute_all", "swap_all", "swap_all_no_scheduling"),
    "pooch_classification": ("swap_opt", "pooch_2018"),
    "pooch_exhaustive": ("pooch_exhaustive",),
    "layers": ("superneurons", "vdnn"),
    "tflms": ("tflms",),
    "tflms_auto": ("tflms_auto",),
    "tflms_tuned": ("tflms_tuned",),
    "meng_lifetime": ("meng_lifetime",),
    "tensorflow_loops": ("tf_latest_first", "tf_earliest_first"),
    "capuchin": ("capuchin",),
    "chen_sqrt": ("chen_sqrt",),
    "dtr": ("dtr", "dtr_eq"),
}

PLUGIN = Plugin(
    policies={
        name: Provided(f"{__package__}.policies.{module}", name)
        for module, names in _POLICIES.items()
        for name in names
    },
    workloads={"published": Provided(f"{__package__}.models", "WORKLOADS")},
    commands={
        "reproduce": Provided(f"{__package__}.command", "command", "Compare published experiments with Pooch."),
    },
)
