"""Who is asked what, and whose answers are held against whose: by kind of list, and by the attention that ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks._graph_asks import Ask, Case, Served
from benchmarks._graph_cases import Setting
from benchmarks._graph_steps import rows
from benchmarks._graph_tallies import TIE, Answer, Tally, other_token, verdict

KEPT = 60  # other tokens and unexpected steps of which the details are kept
# By name: whose answers are held against whose.
COMPARISONS = {
    "graph_against_eager_as_the_graph": ("graph", "same"),
    "eager_as_the_graph_against_itself": ("again", "same"),
    "graph_against_eager_alone": ("graph", "alone"),
    "eager_as_the_graph_against_eager_alone": ("same", "alone"),
    "eager_at_the_rows_against_eager_alone": ("rows", "alone"),
    "graph_arm_ran_eagerly_against_eager_alone": ("eager step", "alone"),
}
JUDGED, FLOOR = list(COMPARISONS)[:2]


@dataclass
class Comparison:
    """Everything that was found, by comparison, and in each by kind and by attention."""

    setting: Setting
    kinds: dict[str, dict[str, Tally]] = field(
        default_factory=lambda: {name: defaultdict(Tally) for name in COMPARISONS}
    )
    attention: dict[str, dict[str, Tally]] = field(
        default_factory=lambda: {name: defaultdict(Tally) for name in COMPARISONS}
    )
    apart: Counter[str] = field(default_factory=Counter)
    repeatable: int = 0
    identical: int = 0
    others: list[dict[str, Any]] = field(default_factory=list)
    unexpected: list[dict[str, Any]] = field(default_factory=list)

    def asks(self, case: Case, ours: Served, eager: Served, every_way: bool) -> dict[str, Ask]:
        """By role."""
        rules = self.setting.rules
        step = rules.steps(case.requests)[-1]
        found = {"graph": Ask(case, ours)}
        if rules.bucket(step) is None:
            self.apart["no bucket: the graph arm runs it eagerly"] += 1
            return found | {"alone": Ask(case, eager)} if every_way else found
        try:
            filler = rules.filler(step)
        except ValueError as why:
            self.apart[str(why)] += 1
            return found | {"alone": Ask(case, eager)}
        found["same"] = Ask(case, eager, filler)
        if every_way:
            found["again"] = Ask(case, eager, filler)
            if filler is not None:
                found["alone"] = Ask(case, eager)
            if filler is not None and filler.prefix:
                found["rows"] = Ask(case, eager, rules.filler(step, attention=False))
        return found

    def take(self, roles: dict[str, Ask]) -> bool:
        """Compare what one case was answered; whether its steps were those that were meant."""
        case, rules = roles["graph"].case, self.setting.rules
        step = rules.steps(case.requests)[-1]
        bucket = rules.bucket(step)
        unsure = [role for role, ask in roles.items() if not ask.sure]
        replays = bucket is not None and self.setting.graphs
        if unsure or roles["graph"].graph != replays:
            self.apart["steps not as meant"] += 1
            self._note(self.unexpected, case, unsure=unsure, replayed=roles["graph"].graph, bucket=bucket)
            return False
        answers = {role: ask.answers for role, ask in roles.items()}
        if bucket is None:
            answers["eager step"] = answers.pop("graph")
        elif roles.get("same") is not None and roles["same"].filler is None:
            answers.setdefault("alone", answers["same"])
        graph = "graph " + rules.graph_attention(step) if bucket is not None else "no graph"
        attention = f"{graph}, eager alone {rules.eager_attention(step)}"
        same: dict[str, list[bool]] = {}
        for name, (mine, yours) in COMPARISONS.items():
            if mine not in answers or yours not in answers or answers[mine] is answers[yours]:
                continue
            pairs = list(zip(answers[mine], answers[yours], strict=True))
            same[name] = [self.kinds[name][case.kind].add(*pair) for pair in pairs]
            for index, pair in enumerate(pairs):
                self.attention[name][attention].add(*pair)
                position = other_token(*pair)
                if position is not None and pair[1].gap(position) > TIE:
                    by_role = {role: found[index] for role, found in answers.items()}
                    self._note(
                        self.others,
                        case,
                        comparison=name,
                        bucket=bucket,
                        attention=attention,
                        **other(index, position, pair, by_role),
                    )
        for floor, judged in zip(same.get(FLOOR, ()), same.get(JUDGED, ()), strict=False):
            self.repeatable += floor
            self.identical += floor and judged
        return True

    def _note(self, where: list[dict[str, Any]], case: Case, **more: Any) -> None:
        if len(where) < KEPT:
            requests = case.requests
            lengths = {"new": [one.new for one in requests], "cached": [one.prefix for one in requests]}
            where.append({"list": case.number, "kind": case.kind, **lengths, "rows": rows(requests), **more})

    def report(self) -> dict[str, Any]:
        """As JSON, the verdict first."""
        bitwise = {"prompts": self.repeatable, "graph_identical_too": self.identical}
        return {
            **verdict(self.kinds[JUDGED].values()),
            "where_eager_repeats_to_the_bit": bitwise,
            "other_tokens_in_detail": self.others,
            "told_apart": dict(self.apart),
            "steps_not_as_meant": self.unexpected,
            "by_kind": _reports(self.kinds),
            "by_attention": _reports(self.attention),
        }


def other(index: int, position: int, pair: tuple[Answer, Answer], all_: dict[str, Answer]) -> dict[str, Any]:
    """What is known of a prompt that got another token; of the roles whose tokens agree before it."""
    mine, yours = pair
    return {
        "prompt": index,
        "position": position,
        "tokens": [mine.tokens[position], yours.tokens[position]],
        "gap": yours.gap(position),
        "leads": {
            role: found.leads[position]
            for role, found in all_.items()
            if found.tokens[:position] == yours.tokens[:position]
        },
    }


def _reports(tallies: dict[str, dict[str, Tally]]) -> dict[str, Any]:
    return {name: {key: tally.report() for key, tally in by.items()} for name, by in tallies.items() if by}
