"""SGLang's command line, read from its source without importing it.

Importing `sglang.srt.server_args` takes ten seconds or more, most of it torch and transformers; `--help` and
the refusal of a misspelt flag must not. The fields of SGLang's configuration are declarations (`name: A[type,
"help"] = default`, `arg_groups/fields/`), and the rest are plain `parser.add_argument` calls
(`ServerArgs.add_cli_args`), so their syntax trees say all that matters here. A contract test holds this
reading against the real parser.

UPSTREAM: arg_utils.add_cli_args_from_dataclass, whose rules `_from_field` follows.
"""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm_sglang.upstream import source

FIELDS = "sglang.srt.arg_groups.fields.serving.Serving"
PARSER = "sglang.srt.server_args.ServerArgs"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    options  its spellings, the first one preferred.
    dest     the field of ServerArgs it sets.
    nargs    0 for a switch, None for one value, or argparse's "+", "*", "?".
    group    SGLang's name for the group ("serving", "disagg", …); "" for flags outside the fields.
    text     SGLang's help text, "" where it is computed.
    choices  the allowed values where they are written out; others may come from plugins.
    default  the default as written, "" where there is none.
    """

    options: tuple[str, ...]
    dest: str
    nargs: int | str | None
    group: str
    text: str
    choices: tuple[str, ...] = ()
    default: str = ""

    @property
    def option(self) -> str:
        """The preferred spelling."""
        return self.options[0]


@functools.cache
def flags() -> tuple[Flag, ...]:
    """Every flag that SGLang itself declares, in the order of its files. Other plugins may add more.

    Raises source.SymbolMissingError where SGLang is not installed.
    """
    folder = source.locate(FIELDS).file.parent
    found: list[Flag] = []
    for file in sorted(folder.glob("*.py")):
        found.extend(_from_fields(ast.parse(file.read_text(encoding="utf-8"))))
    found.extend(_from_parser(ast.parse(source.locate(PARSER).file.read_text(encoding="utf-8"))))
    return tuple(found)


def other_plugin_flag(option: str, files: Iterator[Path]) -> bool:
    """Whether one of these source files mentions `option` as a quoted literal."""
    literals = (f'"{option}"', f"'{option}'")
    return any(
        literal in text
        for file in files
        for text in [file.read_text(errors="replace")]
        for literal in literals
    )


def _from_fields(module: ast.Module) -> Iterator[Flag]:
    for cls in module.body:
        if not isinstance(cls, ast.ClassDef):
            continue
        group = ""
        for node in cls.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="_NS_PATH")], value=ast.Constant(value=str(path))):
                    group = path
                case ast.AnnAssign(
                    target=ast.Name(id=name),
                    annotation=ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, *extra])),
                    value=default,
                ):
                    flag = _from_field(name, kind, extra, default, group)
                    if flag is not None:
                        yield flag


def _from_field(
    name: str, kind: ast.expr, extra: list[ast.expr], default: ast.expr | None, group: str
) -> Flag | None:
    meta: dict[str, ast.expr] = {}
    for node in extra:
        match node:
            case ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp():
                meta = {"help": node}
            case ast.Call(func=ast.Name(id="Arg"), keywords=keywords):
                meta = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
            case _:
                continue
        break
    if not meta or _literal(meta.get("no_cli")) is True:
        return None
    first = _literal(meta.get("cli_name")) or "--" + name.replace("_", "-")
    options = [first, *(_literal(meta.get("aliases")) or [])]
    choices = _literal(meta.get("choices")) or _literal_type(kind)
    return _build(
        options, name, _nargs(kind, meta), group, meta.get("help"), choices, default, meta.get("action")
    )


def _from_parser(module: ast.Module) -> Iterator[Flag]:
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[*names], keywords=keywords):
                options = [_literal(name) for name in names]
                if not all(isinstance(option, str) and option.startswith("--") for option in options):
                    continue
                meta = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
                dest = _literal(meta.get("dest")) or options[0].lstrip("-").replace("-", "_")
                nargs = _nargs(ast.Name(id="str"), meta)
                choices = _literal(meta.get("choices"))
                yield _build(
                    options,
                    dest,
                    nargs,
                    "",
                    meta.get("help"),
                    choices,
                    meta.get("default"),
                    meta.get("action"),
                )


def _build(
    options: list[str],
    dest: str,
    nargs: int | str | None,
    group: str,
    text: ast.expr | None,
    choices: Any,
    default: ast.expr | None,
    action: ast.expr | None,
) -> Flag:
    if _name(action) == "BooleanOptionalAction":
        options = [*options, *(f"--no-{option[2:]}" for option in options)]
    written = "" if default is None or _literal(default) is None else ast.unparse(default)
    help_text = _literal(text) if text is not None else ""
    if not isinstance(help_text, str):
        help_text = ""
    return Flag(tuple(options), dest, nargs, group, help_text, tuple(map(str, choices or ())), written)


def _nargs(kind: ast.expr, meta: dict[str, ast.expr]) -> int | str | None:
    action = _name(meta.get("action"))
    if action:
        settings = {**meta, **_dict_items(meta.get("action_kwargs"))}
        if action in ("store_true", "BooleanOptionalAction"):
            return 0
        if "nargs" in settings:
            return _literal(settings["nargs"])  # type: ignore[no-any-return]
        return None if action in ("store", "LoRAPathAction", "DeprecatedAliasStoreAction") else 0
    inner = _unwrap_optional(kind)
    name = _name(inner.value) if isinstance(inner, ast.Subscript) else _name(inner)
    if name in ("List", "list") and "type_parser" not in meta:
        return str(_literal(meta.get("nargs")) or "+")
    if name == "bool":
        return 0
    return None if name == "Literal" else _literal(meta.get("nargs"))


def _unwrap_optional(kind: ast.expr) -> ast.expr:
    match kind:
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return inner
        case ast.BinOp(left=inner, op=ast.BitOr(), right=ast.Constant(value=None)):
            return inner
    return kind


def _literal_type(kind: ast.expr) -> Any:
    match _unwrap_optional(kind):
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple() | ast.Constant() as values):
            found = _literal(values)
            return found if isinstance(found, tuple) else (found,)
    return None


def _dict_items(node: ast.expr | None) -> dict[str, ast.expr]:
    match node:
        case ast.Dict(keys=keys, values=values):
            return {
                str(_literal(key)): value for key, value in zip(keys, values, strict=True) if key is not None
            }
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
    return {}


def _name(node: ast.expr | None) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(value=str(name)):
            return name
    return ""


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal expression, or None where it is computed."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
