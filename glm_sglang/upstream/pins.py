"""The exact versions that this fork is built on, read from its own installed metadata (`pyproject.toml` is
the one list).
"""

import functools
import importlib.metadata
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from glm_sglang.errors import ContractError

DISTRIBUTION = "glm-sglang"

# Distributions whose code the fork hooks or calls beyond its public interface: a server does not start beside
# another version of these. The rest of the closure is the lock's business.
EVERYWHERE = ("sglang", "torch", "transformers", "lmcache", "nixl", "sglang-router")
ON_CUDA = ("sgl-deep-gemm", "sglang-kernel", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned distribution: its name, the version that must be there, and the extra that brings it ("" for
    none).
    """

    name: str
    version: str
    extra: str = ""

    def mend(self, found: str | None) -> str:
        """The command that installs it, where `found` is there instead.

        `--no-deps`: the lock, not pip's resolver, decides about the others. A part of the GPU stack that is missing was
        never installed, and neither were the rest.
        """
        if self.extra and found is None:
            return (
                "make setup-gpu in the checkout (or GLM_SGLANG_PLATFORM=reference, which serves on the CPU)"
            )
        return f"pip install --no-deps '{self.name}=={self.version}'"


@functools.cache
def declared() -> dict[str, Pin]:
    """Every exact pin of this distribution, by canonical name.

    Raises ContractError where the distribution is not installed: then SGLang can't find its entry points
    either.
    """
    try:
        requires = importlib.metadata.requires(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        requires = None
    if not requires:
        raise ContractError(
            what=f"the distribution {DISTRIBUTION} is not installed in this environment",
            expected="its metadata, with the pins and SGLang's entry points",
            found="the package on the path, without metadata",
            mend="pip install --no-deps -e . in the checkout",
        )
    pins: dict[str, Pin] = {}
    for line in requires:
        requirement = Requirement(line)
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        extra = "gpu" if requirement.marker and "gpu" in str(requirement.marker) else ""
        if exact:
            name = canonicalize_name(requirement.name)
            pins[name] = Pin(name, exact[0], extra)
    return pins


def contract(platform: str) -> tuple[Pin, ...]:
    """The pins that must hold for a server on `platform` to start.

    Raises ContractError for a pin that is not declared.
    """
    names = EVERYWHERE + (ON_CUDA if platform == "cuda" else ())
    missing = [name for name in names if name not in declared()]
    if missing:
        raise ContractError(
            what=f"{DISTRIBUTION} declares no exact version of {', '.join(missing)}",
            expected="a pin for each distribution of the upstream contract",
            found="metadata of another build",
            mend="pip install --no-deps -e . in the checkout, so that its metadata is written again",
        )
    return tuple(declared()[name] for name in names)


def installed(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfied(pin: Pin, found: str | None) -> bool:
    """Whether an installed version is the pinned one; a local part such as +cpu or +cu130 does not count."""
    if found is None:
        return False
    try:
        return Version(Version(found).public) == Version(pin.version)
    except InvalidVersion:
        return False


def check_versions(platform: str) -> None:
    """Raise ContractError for the first distribution that is not the pinned one."""
    for pin in contract(platform):
        found = installed(pin.name)
        if not satisfied(pin, found):
            raise ContractError(
                what=f"distribution {pin.name} is not the version that {DISTRIBUTION} was built on",
                expected=f"{pin.name} {pin.version}",
                found="not installed" if found is None else f"{pin.name} {found}",
                mend=pin.mend(found),
            )
