"""Parameters of policies by name."""

from __future__ import annotations

import pytest

from pooch.errors import UsageError
from pooch.ir import Link
from pooch.planner import find_policy, option_names
from pooch.planner.options import with_options
from tests.planner.support import case, make_plan
from tests.toys import chain

LINK = Link("toy tier", 0.0, 0.0, 16.0, 16.0)


def test_parameters_are_those_that_users_of_the_methods_have() -> None:
    assert option_names(find_policy("tflms")) == {
        "n_tensors": 0, "lb": 1, "ub": 10_000, "trigger": "chain_rule", "swap_branches": False, "branch_threshold": 0,
        "include_scopes": "", "exclude_scopes": "", "include_types": "", "exclude_types": "",
    }  # fmt: skip
    assert option_names(find_policy("pooch_exhaustive")) == {"block": 8, "most": 3000}
    assert option_names(find_policy("tf_latest_first")) == {"limit_fraction": 0.7, "least_bytes": 2048}
    assert option_names(find_policy("tflms_auto")) == {"memory_ratio": 0.9}
    assert option_names(find_policy("ilp")) == {}


def test_texts_are_read_as_the_type_of_the_default() -> None:
    assert option_names(with_options(find_policy("tflms"), "tflms", {"lb": "4"}))["lb"] == 4
    for text, switched in (("true", True), ("False", False), ("0", False)):
        changed = with_options(find_policy("tflms"), "tflms", {"swap_branches": text})
        assert option_names(changed)["swap_branches"] is switched
    changed = with_options(find_policy("tf_earliest_first"), "tf_earliest_first", {"limit_fraction": "0.5"})
    assert option_names(changed)["limit_fraction"] == 0.5
    assert option_names(find_policy("tf_earliest_first"))["limit_fraction"] == 0.7, "the registered one stays as it is"


def test_a_parameter_changes_the_plan() -> None:
    of = case(chain(10, size_bytes=16, link=LINK))
    few = make_plan(of.dataflow, of.profile.peak_bytes - 16, of.evaluator, policy="tflms")
    six = make_plan(
        of.dataflow, of.profile.peak_bytes - 16, of.evaluator, policy="tflms", policy_options={"n_tensors": 6}
    )
    assert few.schedule.swapped
    assert len(six.schedule.swapped) >= len(few.schedule.swapped)
    everything = make_plan(of.dataflow, of.share(0.5), of.evaluator, policy="tflms", policy_options={"n_tensors": "-1"})
    assert len(everything.schedule.swapped) > len(six.schedule.swapped)


@pytest.mark.parametrize(
    ("policy", "options", "told"),
    [
        ("tflms", {"sync_mode": 3}, "no option 'sync_mode': it has n_tensors, lb"),
        ("tflms", {"swap_branches": "maybe"}, "is 'maybe': give true or false"),
        ("tflms", {"trigger": "any"}, "no trigger 'any': choose chain_rule or direct_order"),
        ("ilp", {"lb": 3}, "no option 'lb': it has none"),
        ("tflms", {"lb": "soon"}, "is 'soon': give a whole number, such as 1"),
        ("tf_latest_first", {"order": "earliest"}, "no option 'order'"),
    ],
)
def test_parameters_that_make_no_sense(policy: str, options: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        with_options(find_policy(policy), policy, options)
