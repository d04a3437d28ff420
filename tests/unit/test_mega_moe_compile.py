"""The pinned templates compile for GLM's shape, from the installed headers, with no GPU in sight."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from glm_kernels.mega_moe import instantiate

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs a CUDA toolkit's nvcc")


@needs_nvcc
@pytest.mark.parametrize(
    "case",
    [instantiate.sm90_case(instantiate.Shape()), instantiate.sm100_case(instantiate.Shape())],
    ids=lambda c: c.arch,
)
def test_kernel_assembles_for_its_architecture(case: instantiate.Case, tmp_path: Path) -> None:
    built = instantiate.build(case, tmp_path)
    cubin = (tmp_path / f"{case.name}.{case.arch}.cubin").read_bytes()
    assert instantiate.cubin_arch(cubin) == int(case.arch[:-1])
    assert (b"float_e4m3_t" in cubin) == (
        case.arch == "103a"
    )  # the weight type, in the kernel's mangled name
    assert built.spills == 0


@needs_nvcc
def test_a_shape_the_template_refuses_is_reported(tmp_path: Path) -> None:
    case = instantiate.sm90_case(instantiate.Shape(experts=255, ranks=8))
    with pytest.raises(RuntimeError, match="nvcc refused sm90_fp8_mega_moe for sm_90a"):
        instantiate.build(case, tmp_path)


def test_what_is_no_cubin_is_not_taken_for_one() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        instantiate.cubin_arch(b"\x7fELF" + bytes(60))
