"""What the user asked for, read before anything heavy is imported: SGLang's flags, ours, and a --config file.

The parser here is built from `upstream.flags`, so it knows every flag's spelling and arity, abbreviations
included, and nothing about values; SGLang's own parser judges those later.
"""

import argparse
import difflib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from glm_sglang import own_flags
from glm_sglang.errors import UsageError
from glm_sglang.upstream import flags as upstream_flags
from glm_sglang.upstream import pins

PROGRAM = "python -m glm_sglang.launch_server"
CONFIG = "--config"
_PLUGINS_GROUP = "sglang.srt.plugins"


@dataclass(slots=True)
class Request:
    """A parsed command line.

    given    what was set, by ServerArgs field or our flag's dest, on the command line or in --config (the
             first wins).
    argv     the command line for SGLang: without our flags; --config still in it, as two words.
    own_in_config  whether the --config file sets flags of ours, which SGLang's reader would refuse.
    """

    argv: list[str]
    given: dict[str, Any] = field(default_factory=dict)
    config: Path | None = None
    own_in_config: bool = False

    def get(self, name: str, default: Any) -> Any:
        """The value given for a field, or the default."""
        return self.given.get(name, default)

    def has(self, flag: own_flags.OwnFlag) -> bool:
        """Whether a switch of ours is on."""
        return bool(self.given.get(flag.dest, False))


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, raised as UsageError, instead of a usage of 500 flags
    and an exit.
    """

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message."""
        raise UsageError(message)


def build_parser() -> OneLineParser:
    """A parser of every flag of SGLang and ours. Values stay text; absent flags leave no attribute."""
    parser = OneLineParser(prog=PROGRAM, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in upstream_flags.flags():
        if flag.nargs == 0:
            parser.add_argument(*flag.options, dest=flag.dest, nargs=0, action=_Switch)
        else:
            parser.add_argument(*flag.options, dest=flag.dest, nargs=flag.nargs)
    own_flags.add_to(parser)
    return parser


class _Switch(argparse.Action):
    """Stores False for a --no-… spelling, True else."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


def parse(argv: Sequence[str]) -> Request:
    """Read a command line and the --config file that it names.

    Raises UsageError for an unknown flag, a missing value or a --config file that can't be read.
    """
    parser = build_parser()
    namespace, rest = parser.parse_known_args(list(argv))
    _judge_unknown(rest, parser)
    given = vars(namespace)
    request = Request(
        argv=_without_own(argv), given={name: v for name, v in given.items() if name != "config"}
    )
    if "config" in given:
        request.config = Path(given["config"])
        for name, value in read_config(request.config, parser).items():
            request.given.setdefault(name, value)
            request.own_in_config |= name in {flag.dest for flag in own_flags.FLAGS}
    return request


def _without_own(argv: Sequence[str]) -> list[str]:
    """A command line that was parsed, without our flags and their values, `--config=FILE` and `--conf FILE` as
    `--config FILE`.

    UPSTREAM: prepare_server_args, which looks for the word "--config" alone and would ignore the other
    spellings.
    """
    # The parser took an abbreviation, so no other flag begins so; unless it is another flag's own spelling.
    others = {spelling for flag in upstream_flags.flags() for spelling in flag.options} - {CONFIG}
    config_spellings = {CONFIG[:end] for end in range(3, len(CONFIG) + 1)} - others
    kept: list[str] = []
    skip = False
    for token in argv:
        option, equals, value = token.partition("=")
        if skip:
            skip = False
        elif option.startswith(own_flags.PREFIX):
            flag = next((flag for flag in own_flags.FLAGS if flag.option.startswith(option)), None)
            skip = flag is not None and bool(flag.metavar) and not equals
        elif option in config_spellings:
            kept.extend([CONFIG, value] if equals else [CONFIG])
        else:
            kept.append(token)
    return kept


def _judge_unknown(rest: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raise UsageError for words that no flag took, unless another installed SGLang plugin may bring their
    flag.
    """
    foreign = False
    for token in rest:
        option = token.partition("=")[0]
        if not option.startswith("-"):
            if foreign:
                continue
            raise UsageError(
                f"unexpected argument {token!r}; values follow their flag, "
                "the checkpoint follows --model-path"
            )
        foreign = upstream_flags.other_plugin_flag(option, _plugin_sources())
        if not foreign:
            near = difflib.get_close_matches(
                option, [o for a in parser._actions for o in a.option_strings], n=1
            )
            hint = f"; did you mean {near[0]}?" if near else f"; {PROGRAM} --help lists them all"
            raise UsageError(f"unknown flag {option}{hint}")


def _plugin_sources() -> Iterator[Path]:
    for distribution in {entry.dist.name: entry.dist for entry in _other_plugins() if entry.dist}.values():
        for file in distribution.files or ():
            if file.suffix == ".py":
                path = Path(str(distribution.locate_file(file)))
                if path.is_file():
                    yield path


def _other_plugins() -> list[importlib.metadata.EntryPoint]:
    entries = importlib.metadata.entry_points(group=_PLUGINS_GROUP)
    return [entry for entry in entries if entry.dist and entry.dist.name != pins.DISTRIBUTION]


def read_config(file: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The settings of a --config file by field name.

    Raises UsageError where it is no YAML mapping of known flags.
    """
    import yaml

    try:
        content = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {file}: expected a mapping of flag to value, found {type(content).__name__}"
        )
    names = {
        spelling.lstrip("-").replace("-", "_"): action.dest
        for action in parser._actions
        for spelling in (*action.option_strings, action.dest)
    }
    own = {flag.dest: flag for flag in own_flags.FLAGS}
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            if not upstream_flags.other_plugin_flag(f"--{name.replace('_', '-')}", _plugin_sources()):
                raise UsageError(f"--config {file}: unknown key {key!r}{hint}")
            continue
        flag = own.get(names[name])
        if flag is not None and value is None:
            continue  # not given
        if flag is not None and not flag.metavar and value not in (0, 1):
            raise UsageError(f"--config {file}: {key} is {value!r}, allowed: true, false")
        found[names[name]] = value
    return found


def for_sglang(request: Request, folder: Path) -> list[str]:
    """The command line to give to SGLang, with a --config file that sets flags of ours replaced by a copy.

    The copy lies in `folder`, which the launcher owns and removes.
    """
    if request.config is None or not request.own_in_config:
        return request.argv
    import yaml

    own = {flag.dest for flag in own_flags.FLAGS}
    content = yaml.safe_load(request.config.read_text())
    kept = {key: value for key, value in content.items() if str(key).replace("-", "_") not in own}
    copy = folder / request.config.name
    copy.write_text(yaml.safe_dump(kept, sort_keys=False))
    argv = list(request.argv)
    argv[len(argv) - argv[::-1].index(CONFIG)] = str(copy)  # behind the last one
    return argv


def as_argv(settings: dict[str, Any]) -> list[str]:
    """Values by ServerArgs field as flags.

    False and None can't be said on SGLang's command line and are left out.
    """
    options = {flag.dest: flag for flag in reversed(upstream_flags.flags())}
    argv: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        option = options[name].option
        if value is True:
            argv.append(option)
        elif isinstance(value, list | tuple):
            argv.extend([option, *map(str, value)])
        else:
            argv.extend([option, str(value)])
    return argv


def wants_help(argv: Sequence[str]) -> bool:
    """Whether help is asked for anywhere on the command line."""
    return any(token in ("-h", "--help") for token in argv)


def print_help(out: Any = sys.stdout) -> None:
    """Our flags, then SGLang's by its own groups, with its own words."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        add_help=False,
        usage=f"{PROGRAM} --model-path DIR [--disaggregation-mode prefill] [flags]",
        description="Serve a GLM-5.x checkpoint with SGLang. Every flag of SGLang passes through unchanged.",
        epilog=_epilog(),
    )
    own = parser.add_argument_group("glm-sglang")
    own.add_argument("-h", "--help", action="store_true", help="show this and exit")
    for flag in own_flags.FLAGS:
        if flag.metavar:
            own.add_argument(flag.option, metavar=flag.metavar, help=_escape(flag.text))
        else:
            own.add_argument(flag.option, action="store_true", help=_escape(flag.text))
    groups: dict[str, argparse._ArgumentGroup] = {}
    for known in upstream_flags.flags():
        title = f"SGLang: {known.group or 'other'}"
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        text = known.text + (f" (default: {known.default})" if known.default else "")
        if known.nargs == 0:
            group.add_argument(*known.options, action="store_true", help=_escape(text))
        else:
            shown = "{" + ",".join(known.choices) + "}" if known.choices else known.dest.upper()
            group.add_argument(*known.options, nargs=known.nargs, metavar=shown, help=_escape(text))
    parser.print_help(out)


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _epilog() -> str | None:
    names = ", ".join(sorted(entry.name for entry in _other_plugins()))
    return f"Other SGLang plugins installed here may add flags: {names}." if names else None
