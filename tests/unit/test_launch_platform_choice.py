"""Which platform serves: a pure rule over setting, hardware and scope."""

import itertools
from pathlib import Path

import pynvml
import pytest

from glm_sglang import platform_choice
from glm_sglang.checks import machine
from glm_sglang.errors import UsageError
from glm_sglang.platform_choice import SUPPORTED, Choice, Device, Hardware, choose, detect, select_visible

H200 = Device("H200", (9, 0))
B200 = Device("B200", (10, 0))
B300 = Device("B300", (10, 3))
A100 = Device("A100", (8, 0))
RTX = Device("RTX PRO 6000", (12, 0))


def hardware(*devices: Device, torch_cuda: str = "13.0", accelerator: str = "") -> Hardware:
    return Hardware(devices, torch_cuda, accelerator)


@pytest.mark.parametrize("device", [H200, B200, B300])
def test_a_supported_device_serves_under_our_launcher(device: Device) -> None:
    assert choose("auto", hardware(device), "launcher").platform == "cuda"


@pytest.mark.parametrize("devices", [(), (A100,), (RTX,), (A100, RTX)])
def test_without_a_supported_device_the_reference_serves(devices: tuple[Device, ...]) -> None:
    assert choose("auto", hardware(*devices), "launcher").platform == "reference"


def test_one_supported_device_among_others_is_enough() -> None:
    assert choose("auto", hardware(A100, H200), "launcher").platform == "cuda"


def test_a_cpu_build_of_torch_leaves_the_gpu_unused_and_says_so() -> None:
    chosen = choose("auto", hardware(H200, torch_cuda=""), "launcher")
    assert chosen.platform == "reference"
    assert "CPU build" in chosen.reason
    assert "make setup-gpu" in chosen.reason


@pytest.mark.parametrize("device", [H200, A100])
def test_a_stock_launcher_on_a_gpu_machine_is_left_alone(device: Device) -> None:
    assert choose("auto", hardware(device), "installed").platform == "stock"


def test_a_stock_launcher_on_another_accelerator_is_left_alone() -> None:
    assert choose("auto", hardware(accelerator="xpu"), "installed").platform == "stock"


def test_a_stock_launcher_without_an_accelerator_gets_the_reference() -> None:
    assert choose("auto", hardware(), "installed").platform == "reference"


@pytest.mark.parametrize(
    ("devices", "where"), list(itertools.product([(), (H200,), (A100,)], ["launcher", "installed"]))
)
def test_reference_can_be_forced_anywhere(devices: tuple[Device, ...], where: str) -> None:
    assert choose("reference", hardware(*devices), where) == Choice(
        "reference", "GLM_SGLANG_PLATFORM=reference"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [(), (A100,)])
def test_cuda_where_there_is_none_is_an_error_that_names_what_is_allowed(devices: tuple[Device, ...]) -> None:
    with pytest.raises(
        UsageError,
        match=r"GLM_SGLANG_PLATFORM=cuda needs .*SM90, SM100, SM103.*allowed here: auto, reference",
    ):
        choose("cuda", hardware(*devices), "launcher")


def test_cuda_with_a_cpu_build_of_torch_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"CPU build.*make setup-gpu"):
        choose("cuda", hardware(H200, torch_cuda=""), "launcher")


def test_supported_are_the_three_architectures_of_the_kernels() -> None:
    assert set(SUPPORTED.values()) == {"SM90", "SM100", "SM103"}


MACHINE = {"GPU-aaaa-1": H200, "GPU-aabb-2": A100, "GPU-cccc-3": B200}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (H200, A100, B200)),
        ("", ()),
        ("-1", ()),
        ("0", (H200,)),
        ("2,0", (B200, H200)),
        ("0,7,1", (H200,)),  # CUDA stops at the first entry that names nothing
        ("GPU-cccc", (B200,)),
        ("GPU-aa", ()),  # two devices begin so
        ("GPU-aabb-2, GPU-aaaa-1", (A100, H200)),
        ("MIG-whatever", (H200,)),
    ],
)
def test_visible_devices_follow_cudas_rule(visible: str | None, expected: tuple[Device, ...]) -> None:
    assert select_visible(MACHINE, visible) == expected


@pytest.fixture(params=["stack", "driver", ""])
def evidence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A machine whose NVML does not answer; what else speaks for a GPU: the installed stack, the driver, nothing."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(platform_choice, "_installed", lambda distribution: request.param == "stack")
    monkeypatch.setattr(
        platform_choice, "_DRIVER", tmp_path if request.param == "driver" else tmp_path / "none"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GLM_SGLANG_PLATFORM", raising=False)
    return str(request.param)


def test_a_gpu_node_whose_nvml_fails_is_not_served_on_its_cpu(evidence: str) -> None:
    hardware = detect({})
    (found,) = machine.platform()[1]
    if not evidence:
        assert choose("auto", hardware, "launcher").platform == "reference"
        assert found.state == "right"
        return
    with pytest.raises(UsageError, match=r"Driver Not Loaded.*nvidia-smi.*GLM_SGLANG_PLATFORM=reference"):
        choose("auto", hardware, "launcher")
    assert choose("auto", hardware, "installed").platform == "stock"
    assert choose("reference", hardware, "launcher").platform == "reference"
    assert found.state == "wrong"
    assert machine.platform()[0] == "cuda"
    assert [finding.state for finding in machine.devices("cuda")] == ["wrong"]


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_devices_that_the_user_hides_are_not_missed(evidence: str, visible: str) -> None:
    assert choose("auto", detect({"CUDA_VISIBLE_DEVICES": visible}), "launcher").platform == "reference"


def test_an_index_that_names_no_device_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform_choice, "_ask_nvml", lambda: (MACHINE, ""))
    assert detect({"CUDA_VISIBLE_DEVICES": "1"}).devices == (A100,)
    with pytest.raises(UsageError, match=r"NVML sees 3 \(CUDA_VISIBLE_DEVICES is '3'\)"):
        choose("auto", detect({"CUDA_VISIBLE_DEVICES": "3"}), "launcher")
