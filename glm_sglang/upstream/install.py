"""Puts every declared change in place in this process, then looks whether it really is there.

SGLang logs a hook that failed to apply and serves on; it also skips a hook that is registered after its
target was patched. So nothing here trusts `HookRegistry`'s own account: each target is resolved again and
must lead, through the wrappers, to our function, and nothing that was imported earlier may still hold the
original.
"""

import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_sglang import settings
from glm_sglang.errors import ContractError
from glm_sglang.platform_choice import PlatformName
from glm_sglang.upstream import check, pins, rooms, source
from glm_sglang.upstream.hooks import Hook, Registration, Scope


@dataclass(slots=True)
class Installed:
    """What this process carries.

    hooks, registrations  the changes in place, in order of installation.
    untested              symbols whose source differs from the record, let through by
                          GLM_SGLANG_ALLOW_UNTESTED=1.
    """

    hooks: tuple[Hook, ...] = ()
    registrations: tuple[Registration, ...] = ()
    untested: tuple[str, ...] = ()
    targets: frozenset[str] = field(default_factory=frozenset)


def install(platform: PlatformName, scope: Scope) -> Installed:
    """Check, register, apply and verify every change for this platform and scope.

    Raises ContractError for the first thing that is not as it must be.
    """
    hooks = rooms.active(rooms.hooks(), platform, scope)
    registrations = rooms.active(rooms.registrations(), platform, scope)
    if not hooks and not registrations:
        return Installed()
    pins.check_versions(platform)
    untested = check.check_symbols(rooms.symbols((*hooks, *registrations)), settings.allow_untested())

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    refuse_conflicts(hooks, HookRegistry._hooks)
    originals = {hook.target: _original(hook, tested=hook.target not in untested) for hook in hooks}
    functions = [(hook, load(hook.function, hook.why)) for hook in hooks]
    for hook, function in functions:
        HookRegistry.register(hook.target, function, HookType(hook.kind))
    HookRegistry.apply_hooks()
    for hook, function in functions:
        _verify(hook, function)
    _verify_no_stale_binding(originals)
    for registration in registrations:
        _register(registration)
    return Installed(hooks, registrations, untested, frozenset(originals))


def load(path: str, why: str) -> Callable[..., Any]:
    """Import "module:qualname" of ours. Raises ContractError where that fails or names nothing callable."""
    try:
        found = pkgutil.resolve_name(path)
    except Exception as error:
        raise ContractError(
            what=f"{path} can't be imported ({why})",
            expected="a function or class of this fork",
            found=describe(error),
            mend="python -m glm_sglang.doctor; if the environment is whole, report this message",
        ) from error
    if not callable(found):
        raise ContractError(
            what=f"{path} is not callable ({why})",
            expected="a function or class of this fork",
            found=repr(found),
            mend="correct the declaration in the room's hooks.py",
        )
    return found  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """An exception in one line: type, text, and the innermost place it came from."""
    frames = inspect.getinnerframes(error.__traceback__) if error.__traceback__ else []
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


def overlap(mine: str, other: str) -> bool:
    """Whether changing `other` touches `mine`: the same symbol, or a class and something in it."""
    return mine == other or mine.startswith(f"{other}.") or other.startswith(f"{mine}.")


def refuse_conflicts(hooks: Sequence[Hook], registered: dict[str, list[tuple[Any, Any, Any]]]) -> None:
    """Raise ContractError where another plugin has hooked what one of our changes rests on."""
    for other, entries in registered.items():
        for _, _, plugin in entries:
            if plugin is not None and plugin.dist_name == pins.DISTRIBUTION:
                continue
            for hook in hooks:
                for symbol in hook.symbols:
                    if overlap(symbol, other):
                        raise conflict(symbol, other, plugin)


def conflict(symbol: str, other: str, plugin: Any) -> ContractError:
    """The error for another plugin's hook on `other`, which touches our `symbol`."""
    owner = "an unnamed plugin" if plugin is None else f"plugin {plugin.plugin_name} of {plugin.dist_name}"
    return ContractError(
        what=f"another SGLang plugin changes {other}, on which this fork's change of {symbol} rests",
        expected=f"{symbol} as SGLang ships it",
        found=f"a hook by {owner}",
        mend="leave that plugin out: SGLANG_PLUGINS=glm_sglang (comma-separated list of the plugins to load)",
    )


def _resolve(target: str) -> tuple[Any, str, Any]:
    """(owner, name, attribute as it stands in the owner's namespace) of a dotted path."""
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    value = inspect.getattr_static(owner, name)
    return owner, name, value


def _plain(value: Any) -> Any:
    # By type(), not isinstance(): the latter asks an object for __class__, and some objects in modules answer
    # loudly.
    return value.__func__ if type(value) in (classmethod, staticmethod) else value


def _original(hook: Hook, tested: bool) -> Any:
    """The target before we touch it; it must come from the file whose text was checked.

    Raises ContractError.
    """
    try:
        _, _, value = _resolve(hook.target)
    except Exception as error:
        raise ContractError(
            what=f"the upstream symbol {hook.target} can't be reached ({hook.why})",
            expected="its module to import",
            found=describe(error),
            mend="python -m glm_sglang.doctor",
        ) from error
    value = _plain(value)
    if not isinstance(value, types.FunctionType | type) and not callable(value):
        raise ContractError(
            what=f"the upstream symbol {hook.target} is no function, method or class",
            expected="something that SGLang's HookRegistry can wrap",
            found=type(value).__name__,
            mend="correct the declaration in the room's hooks.py",
        )
    code = getattr(inspect.unwrap(value), "__code__", None)
    file = source.locate(hook.target).file
    if tested and code is not None and Path(code.co_filename).resolve() != file.resolve():
        raise ContractError(
            what=f"the upstream symbol {hook.target} was replaced before this fork was installed",
            expected=f"the definition in {file}",
            found=f"one from {code.co_filename}:{code.co_firstlineno}",
            mend="leave out the plugin or package that patches it (SGLANG_PLUGINS lists the plugins to load)",
        )
    return value


def carries(value: Any, function: Callable[..., Any]) -> bool:
    """Whether `value` is `function` or a chain of HookRegistry wrappers that ends up calling it.

    UPSTREAM: hook_registry._wrap_fn keeps the hook in the wrapper's closure and the wrapped function in
    __wrapped__.
    """
    value = _plain(value)
    while value is not None:
        if value is function:
            return True
        cells = getattr(value, "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in cells):
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _verify(hook: Hook, function: Callable[..., Any]) -> None:
    _, _, value = _resolve(hook.target)
    if not carries(value, function):
        raise ContractError(
            what=f"the hook on {hook.target} was registered and is not in place ({hook.why})",
            expected=f"a call of it to reach {hook.function}",
            found=f"{_plain(value)!r}",
            mend="see 'Failed to apply hooks' in the log; python -m glm_sglang.doctor repeats it",
        )


def _verify_no_stale_binding(originals: dict[str, Any]) -> None:
    """Raise ContractError where an imported module or class still holds an original function under some name.

    HookRegistry renews copies in modules' namespaces; copies in class bodies it does not see.
    """
    by_id = {id(original): target for target, original in originals.items() if not isinstance(original, type)}
    for place, name, value in _bindings({target.partition(".")[0] for target in originals}):
        target = by_id.get(id(_plain(value)))
        if target is not None:
            raise ContractError(
                what=f"{place}.{name} still holds {target} as it was before the hook",
                expected="every copy of a hooked function to be the hooked one",
                found="a copy taken at import",
                mend=f"hook {place}.{name} as well, in the room's hooks.py",
            )


def _bindings(packages: set[str]) -> Iterator[tuple[str, str, Any]]:
    """(module or class, name, value) of all that is bound in the imported modules of these packages."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in packages or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            yield module_name, name, value
            if issubclass(type(value), type) and value.__module__ == module_name:
                for attribute, inner in list(vars(value).items()):
                    yield f"{module_name}.{name}", attribute, inner


def _register(registration: Registration) -> None:
    function, verify = (load(path, registration.why) for path in (registration.function, registration.verify))
    try:
        function()
        in_place = verify()
    except Exception as error:
        raise ContractError(
            what=f"{registration.function} failed ({registration.why})",
            expected="the registration to succeed",
            found=describe(error),
            mend="python -m glm_sglang.doctor repeats it without a model; report it with this message",
        ) from error
    if in_place is not True:
        raise ContractError(
            what=f"{registration.function} ran and is not in place ({registration.why})",
            expected=f"{registration.verify} to be true",
            found=repr(in_place),
            mend="python -m glm_sglang.doctor repeats it without a model; report it with this message",
        )
