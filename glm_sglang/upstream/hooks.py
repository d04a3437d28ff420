"""How a room of the fork declares what it changes in SGLang.

A room is a package of `glm_sglang` with a module `hooks.py` that holds `HOOKS: tuple[Hook, ...]` and, where a
change goes through one of SGLang's own registration functions, `REGISTRATIONS: tuple[Registration, ...]`.
Declaring is all it does: nothing is imported from SGLang here, and the functions named are imported only when
the plugin installs them.

`glm_sglang.upstream.rooms.ROOMS` names the rooms; `python -m glm_sglang.upstream.record` takes the
fingerprints of every symbol named in `target` and `also`.
"""

from dataclasses import dataclass
from typing import Literal

HookKind = Literal["before", "after", "around", "replace"]
Platform = Literal["any", "reference", "cuda"]
Scope = Literal["launcher", "installed"]

_KINDS: tuple[HookKind, ...] = ("before", "after", "around", "replace")
_PLATFORMS: tuple[Platform, ...] = ("any", "reference", "cuda")
_SCOPES: tuple[Scope, ...] = ("launcher", "installed")


def _check_where(name: str, platform: str, scope: str) -> None:
    if platform not in _PLATFORMS:
        raise ValueError(f"{name}: platform is {platform!r}, allowed: {', '.join(_PLATFORMS)}")
    if scope not in _SCOPES:
        raise ValueError(f"{name}: scope is {scope!r}, allowed: {', '.join(_SCOPES)}")
    if scope == "installed" and platform == "cuda":
        raise ValueError(
            f"{name}: scope 'installed' with platform 'cuda': a stock server on a GPU stays untouched"
        )


def _check_function(name: str, function: str) -> None:
    module, colon, qualname = function.partition(":")
    if not (module and colon and qualname):
        raise ValueError(f"{name}: function is {function!r}, expected 'module:qualname'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One change of one SGLang symbol, applied through SGLang's own `HookRegistry`.

    target       dotted path of a module function, method, class method, static method or class.
    kind         what `function` is given, as in `sglang.srt.plugins.hook_registry`: before   f(*args,
                 **kwargs) -> (args, kwargs) | None after    f(result, *args, **kwargs) -> new result | None
                 (None keeps the result) around   f(original, *args, **kwargs) -> result replace  f(*args,
                 **kwargs) -> result, or a class for a class target On a method, `args[0]` is self; on a class
                 method it is the class.
    function     "module:qualname" of our function, imported when the hook is installed.
    why          the reason, one sentence; shown when the hook can't be installed.
    remove_when  what must be true upstream for this hook to go.
    upstream     issue or PR, "" where there is none.
    also         other upstream symbols that the hook's correctness rests on; fingerprinted as `target` is.
    platform     "any", or only where that platform is active.
    scope        "launcher": only under `python -m glm_sglang.launch_server`. "installed": under a stock
                 launcher too, and there only where the reference platform is active.

    Raises ValueError for a value outside these.
    """

    target: str
    kind: HookKind
    function: str
    why: str
    remove_when: str
    upstream: str = ""
    also: tuple[str, ...] = ()
    platform: Platform = "any"
    scope: Scope = "launcher"

    def __post_init__(self) -> None:
        name = f"hook on {self.target!r}"
        if self.target.count(".") < 1 or not all(part.isidentifier() for part in self.target.split(".")):
            raise ValueError(f"{name}: target must be a dotted path, module and attribute")
        if self.kind not in _KINDS:
            raise ValueError(f"{name}: kind is {self.kind!r}, allowed: {', '.join(_KINDS)}")
        if not self.why or not self.remove_when:
            raise ValueError(f"{name}: 'why' and 'remove_when' must say something")
        _check_function(name, self.function)
        _check_where(name, self.platform, self.scope)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every upstream symbol that must be as recorded for this hook to be right."""
        return (self.target, *self.also)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A change made through one of SGLang's registration functions (attention backends, resolution hooks, …).

    function  "module:qualname" of our `() -> None` that registers; called once a process, after the hooks are
              in place.
    verify    "module:qualname" of our `() -> bool` that says whether the registration really is in place.
    The other fields are as in `Hook`.
    """

    function: str
    verify: str
    why: str
    also: tuple[str, ...] = ()
    platform: Platform = "any"
    scope: Scope = "launcher"

    def __post_init__(self) -> None:
        name = f"registration {self.function!r}"
        if not self.why:
            raise ValueError(f"{name}: 'why' must say something")
        _check_function(name, self.function)
        _check_function(name, self.verify)
        _check_where(name, self.platform, self.scope)

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every upstream symbol that this registration rests on."""
        return self.also
