"""The catalogue of devices: what comes with Pooch, what a user adds, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pooch.devices import DeviceModel, LinkModel, find_device, known_devices, read_catalogue, write_device
from pooch.errors import FileFormatError, UsageError

PLAIN = DeviceModel("plain", "a plain device", "cuda", 2**30, {"float32": 10.0}, 100.0, LinkModel("wire", 10.0, 5.0))


@pytest.fixture(autouse=True)
def own_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "pooch" / "devices.toml"


def test_it_has_the_devices_of_the_published_evaluations_and_of_today() -> None:
    known = known_devices()
    wanted = {"M40", "P100-PCIe", "V100-PCIe", "V100-NVLink", "A100-40", "A100-80", "H100", "H200", "B200"}
    assert wanted | {"RTX-3090", "RTX-4090", "RTX-5090"} <= set(known)
    for name, model in known.items():
        assert model.name == name
        assert model.source, name
        assert 12 * 2**30 <= model.memory_bytes < 200 * 2**30
        assert model.as_device({}).modelled
        assert model.as_link().tier.endswith("modelled")


def test_newer_devices_are_faster_and_nvlink_is_wider() -> None:
    step = {name: find_device(name).op_ms(1e12, 1e9, "float32", "matmul") for name in ("M40", "P100-PCIe", "V100-PCIe")}
    assert step["M40"] > step["P100-PCIe"] > step["V100-PCIe"]
    pcie, nvlink = find_device("v100-pcie").as_link(), find_device("V100-NVLINK").as_link()
    assert nvlink.out_ms(2**30) < pcie.out_ms(2**30) / 4


def test_an_op_lasts_as_long_as_its_arithmetic_or_its_traffic() -> None:
    launch_ms = PLAIN.launch_us / 1000
    assert PLAIN.op_ms(1e10, 1e6, "float32", "matmul") == pytest.approx(1.0 + launch_ms)  # 10^10 at 10 TFLOP/s
    assert PLAIN.op_ms(1e10, 1e9, "float32", "matmul") == pytest.approx(10.0 + launch_ms)  # 10^9 bytes at 100 GB/s
    assert PLAIN.op_ms(0, 0, "float32", "matmul") == pytest.approx(launch_ms)


def test_convolutions_take_the_faster_of_plain_units_and_tensor_cores() -> None:
    both = replace(PLAIN, tflops={"float32": 10.0, "tf32": 100.0})
    assert both.op_ms(1e12, 0, "float32", "convolution") < both.op_ms(1e12, 0, "float32", "matmul")
    slow = replace(both, efficiency=replace(both.efficiency, tensor_convolution=0.05))
    assert slow.flops_per_ms("float32", "convolution") == PLAIN.flops_per_ms("float32", "convolution")
    assert both.flops_per_ms("bfloat16", "matmul") == both.flops_per_ms("float32", "matmul")  # no rate of its own


def test_the_users_own_devices_are_found_and_go_before(own_catalogue: Path, tmp_path: Path) -> None:
    write_device(PLAIN, own_catalogue)
    write_device(replace(PLAIN, name="H100"), own_catalogue)
    assert find_device("Plain") == PLAIN
    assert find_device("H100").title == "a plain device"
    assert set(read_catalogue(own_catalogue)) == {"plain", "H100"}
    write_device(PLAIN, tmp_path / "one.toml")
    assert find_device(str(tmp_path / "one.toml")) == PLAIN
    assert find_device(f"{own_catalogue}:plain") == PLAIN
    with pytest.raises(UsageError, match="has several devices"):
        find_device(str(own_catalogue))


def test_an_unknown_device_is_told_with_what_is_near() -> None:
    with pytest.raises(UsageError, match=r"no device 'V100': did you mean .*V100-PCIe.*devices --all"):
        find_device("V100")


HUGE = (
    "[x]\ntitle = 'x'\nkind = 'cpu'\nmemory_gib = {}\ntflops = {{{{ float32 = 1 }}}}\nmemory_gb_per_s = 3\n"
    "link = {{{{ name = 'wire', out_gb_per_s = 1, in_gb_per_s = 1 }}}}\n"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[x\n", "is not TOML"),
        ("", "has no device"),
        ("x = 1\n", "x is not a table"),
        ("[x]\ntitle = 'x'\n", r"\[x\] kind: field required"),
        ("{valid}memory_gb_per_s = -3\n", "memory_gb_per_s is -3.0: give a positive number"),
        ("{valid}memory_gb_per_s = nan\n", "memory_gb_per_s is nan"),
        ("{valid}memory_gb_per_s = 3\nefficiency = {{ memory = 1.5 }}\n", "efficiency.memory is 1.5: give at most 1"),
        ("defaults = 3\n{valid}", "defaults is not a table"),
        ("{valid}memory_gb_per_s = 3\nrecalled = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("{valid}memory_gb_per_s = " + "9" * 5000, "a number that is too large"),
        ("{valid}memory_gb_per_s = 1e-320\n", "give 1e-06 to 1e.12"),
        (HUGE.format("1e20"), "give at most 8 PiB"),
        (HUGE.format("inf"), "memory_gib: input should be a finite number"),
        (HUGE.format("1e308"), "memory_gib: unable to parse input|memory_gib: input should be"),
        (HUGE.format("nan"), "memory_gib: input should be a finite number"),
    ],
)
def test_a_bad_catalogue_is_told_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    valid = "[x]\ntitle = 'x'\nkind = 'cpu'\nmemory_gib = 1\ntflops = { float32 = 1 }\n"
    valid += "link = { name = 'wire', out_gb_per_s = 1, in_gb_per_s = 1 }\n"
    path = tmp_path / "devices.toml"
    path.write_text(text.replace("{valid}", valid).replace("{{", "{").replace("}}", "}"))
    with pytest.raises(FileFormatError, match=told) as caught:
        read_catalogue(path)
    assert "\n" not in str(caught.value)
    assert "devices.toml" in str(caught.value)


def test_a_missing_catalogue_is_told() -> None:
    with pytest.raises(FileFormatError, match=r"cannot read nowhere\.toml"):
        find_device("nowhere.toml")
