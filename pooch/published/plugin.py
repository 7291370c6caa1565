"""What the published methods and experiments add to Pooch."""

from __future__ import annotations

from ..plugins import Plugin, Provided


def _policy(module: str, attribute: str = "") -> Provided:
    return Provided(f"{__package__}.policies.{module}", attribute or module)


PLUGIN = Plugin(
    policies={
        "recompute_all": _policy("recompute_all"),
        "swap_all": _policy("swap_all"),
        "swap_all_no_scheduling": _policy("swap_all_no_scheduling"),
        "swap_opt": _policy("swap_opt"),
        "pooch_2018": _policy("pooch_2018"),
        "pooch_exhaustive": _policy("pooch_exhaustive"),
        "superneurons": _policy("superneurons"),
        "vdnn": _policy("vdnn"),
        "tflms": _policy("tflms"),
        "tflms_auto": _policy("tflms_auto"),
        "tflms_tuned": _policy("tflms_tuned"),
        "meng_lifetime": _policy("meng_lifetime"),
        "tf_latest_first": _policy("tensorflow_loops", "tf_latest_first"),
        "tf_earliest_first": _policy("tensorflow_loops", "tf_earliest_first"),
        "capuchin": _policy("capuchin"),
        "chen_sqrt": _policy("chen_sqrt"),
        "dtr": _policy("dtr"),
        "dtr_eq": _policy("dtr", "dtr_eq"),
    },
    workloads={"published": Provided(f"{__package__}.models", "WORKLOADS")},
    commands={
        "reproduce": Provided(f"{__package__}.command", "command", "Compare published experiments with Pooch."),
    },
)
