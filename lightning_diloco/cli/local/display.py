"""Shows the state of a run as a live table on a terminal or as plain lines, and the summary at the end.

The input is the syncer's status and `summary.json`. Unknown values are shown as "-". Texts may come from
learners, so each passes through `printable`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_diloco.cli.local.feed import Status
from lightning_diloco.cli.text.printable import printable
from lightning_diloco.live.history import sentence
from lightning_diloco.plots.style import quantity

if TYPE_CHECKING:
    from lightning_diloco.live.watch import Watch

_BEFORE = {
    "waiting": "waiting for learners",
    "seeding": "the first learner's parameters become the anchors",
}
_WORDS = {"open": "training", "idle": "waiting for learners"}  # same words as on the live page
_STYLES = {
    "stepping": "green",
    "evaluating": "cyan",
    "draining": "cyan",
    "joining": "cyan",
    "stalled": "yellow",
    "lapsed": "red",
    "left": "dim",
}
_NUM_WAITS_LIVE, _NUM_EVENTS = 4, 8
_REDRAW_S = 0.25
_SILENT_S = 3.0
_LARGE_NATS = 20.0


class Screen:
    """Display of a run in progress.

    Args:
        console: console to write to.
        live: whether to redraw one table instead of printing lines.
        period_s: pause between two sets of lines.
        clock: seconds, monotonic.
        watch: the live page's `Watch`, which receives everything shown here; None if there is no page.
    """

    def __init__(
        self,
        console: Console,
        *,
        live: bool,
        period_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        watch: Watch | None = None,
    ) -> None:
        self._console = console
        self._watch = watch
        self._live = Live(console=console, auto_refresh=False) if live else None
        self._period_s = _REDRAW_S if live else period_s
        self._clock = clock
        self._began_s = self._next_s = clock()

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print lines that stay."""
        if self._watch is not None:
            self._watch.said(text)
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    def show(self, status: Status | None, problem: str | None = None) -> None:
        """Show the state, at most once per period; without a state, show the problem."""
        if self._watch is not None:
            self._watch.saw(status, problem)
        if self._clock() < self._next_s or (status is None and problem is None):
            return
        self._next_s = self._clock() + self._period_s
        silence = f"no answer from the syncer: {problem}"
        if self._live:
            view = status_view(status, num_waits=_NUM_WAITS_LIVE) if status else Text(silence)
            self._live.update(view, refresh=True)
        else:
            self._print("\n".join(status_lines(status, self._clock() - self._began_s)) if status else silence)


def status_view(status: Status, *, num_waits: int | None = None) -> Group:
    """Return the state as a table of learners, a line about the run, and one line per wait (at most num_waits)."""
    status = printable(status)
    waits = list(wait_lines(status))
    left_out = [] if num_waits is None or len(waits) <= num_waits else [f"and {len(waits) - num_waits} more waits"]
    below = Table.grid(padding=(0, 2))
    below.add_column(style="bold")
    below.add_column(overflow="fold")
    for name, lines in {**_parts(status), "waits": [*waits[:num_waits], *left_out]}.items():
        for k, line in enumerate(lines):
            below.add_row("" if k else name, Text(line))
    return Group(_learners(status), below)


def _learners(status: Status) -> Table:
    """Return the table of learners; those of a site stand below its name."""
    table = Table("learner", "phase", title=Text(f"run {status['run']}"), title_justify="left")
    for heading in ("step", "loss", "tokens/s", "staleness", "last contribution"):
        table.add_column(heading, justify="right")
    has_sites = any(learner["site"] for learner in status["learners"])
    for site, learners in itertools.groupby(sorted(status["learners"], key=_by_site), lambda learner: learner["site"]):
        if has_sites:
            table.add_row(Text(site or "no site given", style="bold"))
        for learner in learners:
            table.add_row(
                Text(learner["id"]),
                _phase(learner),
                str(learner["trainer_step"]),
                _number(learner["metrics"].get("loss"), ".4f"),
                _count(learner["tokens_per_s"]),
                str(learner["staleness_versions"]),
                _number(learner["last_contribution_s_ago"], ".1f", " s ago"),
            )
        table.add_section()
    return table


def _by_site(learner: Mapping[str, Any]) -> tuple[bool, str, str]:
    return not learner["site"], learner["site"], learner["id"]


def _phase(learner: Mapping[str, Any]) -> Text:
    phase = Text(learner["phase"], style=_STYLES.get(learner["phase"], ""))
    return phase.append(", in quarantine", style="red") if learner["quarantined"] else phase


def status_lines(status: Status, age_s: float) -> list[str]:
    """Return the state as plain lines, the run first, then each learner; age_s continues after a syncer restart."""
    stamp = f"{age_s:7.1f} s  "
    return [stamp + run_line(status)] + [
        f"{stamp}{learner['id']} {_phase(learner)}: step {learner['trainer_step']}, "
        f"loss {_number(learner['metrics'].get('loss'), '.4f')}, {_count(learner['tokens_per_s'])} tokens/s, "
        f"staleness {learner['staleness_versions']}, last contribution "
        f"{_number(learner['last_contribution_s_ago'], '.1f', ' s ago')}"
        for learner in status["learners"]
    ]


def run_line(status: Status) -> str:
    """Return the state of the run in one line."""
    return ", ".join(line for lines in _parts(status).values() for line in lines)


def _parts(status: Status) -> dict[str, list[str]]:
    """Return the lines about the run, by topic."""
    if status["state"] in _BEFORE:
        return {"run": [_BEFORE[status["state"]]]}
    versions: Sequence[int] = status["versions"]
    span = f"versions {min(versions)}..{max(versions)} of {len(versions)} fragments" if versions else "no versions"
    why = f" ({status['reason']})" if status["reason"] else ""
    word = _WORDS.get(status["state"], status["state"])
    fleet = (
        f"{_count(status['fleet_tokens'])} tokens, participation {percent(status['participation'])}, "
        f"goodput {_goodput(status)}"
    )
    standby = status.get("standby")
    return {
        "run": [f"{word}{why}: {status['num_commits']} commits, {span}, quorum {status['effective_quorum']}"],
        "fleet": [fleet],
        "syncer": [f"{_bytes(status['bytes_up'])} received, {_bytes(status['bytes_down'])} sent"],
        **({"shards": [_shards(shards)]} if (shards := status.get("shards")) else {}),
        **({} if standby is None else {"standby": [f"standby {standby['address']} {_standing(standby)}"]}),
    }


def _shards(shards: Sequence[Mapping[str, Any]]) -> str:
    away = [str(shard["shard"]) for shard in shards if shard["away_s"] is not None]
    said = f"{1 + len(shards)} processes hold the fragments"
    return f"{said}; away: shard {', '.join(away)}, whose fragments wait" if away else said


def _standing(standby: Mapping[str, Any]) -> str:
    if standby["silent_s"] > _SILENT_S:
        return f"silent for {standby['silent_s']:.0f} s"
    behind = standby["records_behind"]
    return f"{behind} decisions behind" if behind else "has all decisions"


def wait_lines(status: Status) -> Iterator[str]:
    """Yield a line for each wait: the awaited learners, since when, until when, and the action that follows."""
    if not status["waits"]:
        yield "waiting for nobody"
    for wait in status["waits"]:
        since = "" if wait["since_s"] is None else f" for {wait['since_s']:.1f} s"
        until = "" if wait["until_s"] is None else f", at most {wait['until_s']:.1f} s more"
        yield f"{wait['what']}: waiting for {', '.join(wait['for']) or 'nobody'}{since}{until}; then: {wait['then']}"


def event_lines(status: Status) -> Iterator[str]:
    """Yield a line for each of the latest events, with its time."""
    shown = [(event["t"], told[1]) for event in printable(status)["recent"] if (told := sentence(event)) is not None]
    for t, text in shown[-_NUM_EVENTS:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(t))} {text}"


def summary_view(summary: Mapping[str, Any], run_dir: Path) -> Table:
    """Return the contents of `summary.json` and the path of the run directory as a table."""
    summary = printable(summary)
    merged, seen, paused_s = summary["tokens_merged"], summary["tokens_seen"], summary.get("paused_s")
    discarded = ", ".join(
        f"{cause} {_count(tokens)}" for cause, tokens in summary["tokens_discarded"].items() if tokens
    )
    rows = {
        "status": str(summary["status"]),
        "wall time": f"{summary['wall_s']:.1f} s" + (f", of which {paused_s:.1f} s stopped" if paused_s else ""),
        "tokens": f"{_count(summary['fleet_tokens'])} seen by the fleet",
        "merged / seen": f"{merged:,} / {seen:,} token-fragments ({percent(merged / seen if seen else None)})",
        "discarded": discarded or "nothing",
        **_repeated(summary),
        "pending": f"{summary['tokens_pending']:,}",
        "participation": percent(summary["participation"]),
        "goodput": _goodput(summary),
        "received / sent": f"{_bytes(summary['bytes_up'])} / {_bytes(summary['bytes_down'])}",
        "joins / lapses": f"{summary['joins']} / {summary['lapses']}",
        **{f"stall of {name}": _number(stall_s, ".3f", " s") for name, stall_s in (summary["stall_s"] or {}).items()},
        **_evaluated(summary),
        "files": str(run_dir),
    }
    return named_values("summary", rows)


def _repeated(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the row of tokens on samples that were trained more than once in an epoch, if there are any."""
    repeated, merged = summary.get("tokens_repeated", 0), summary["tokens_merged"]
    return {"repeated": f"{repeated:,} ({percent(repeated / merged)} of merged)"} if repeated and merged else {}


def _evaluated(summary: Mapping[str, Any]) -> dict[str, str]:
    loss = summary["eval_loss"]
    if loss is None:
        return {"eval_loss of the anchor": f"- ({summary.get('eval_reason') or 'no learner validated it'})"}
    # A run that counts samples has no language model, and a larger loss is not in nats per token.
    is_per_token = summary.get("token_unit") == "tokens" and loss < _LARGE_NATS
    perplexity = {"perplexity, if per token": f"{math.exp(loss):.2f}"} if is_per_token else {}
    return {"eval_loss of the anchor": f"{loss:.4f}", **perplexity}


def _goodput(told: Mapping[str, Any]) -> str:
    """Format the goodput; for a run that was stopped for a while, with and without that time."""
    whole, unpaused = told["goodput"], told.get("goodput_unpaused", told["goodput"])
    return percent(whole) + (f" ({percent(unpaused)} without the time it was stopped)" if unpaused != whole else "")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _count(value: float | None) -> str:
    return "-" if value is None else quantity(value, digits=4)


def _bytes(value: float) -> str:
    number = _count(value)
    return f"{number[:-1]} {number[-1]}B" if number[-1].isalpha() else f"{number} B"


def percent(share: float | None, *, digits: int = 1) -> str:
    """Format a share."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def named_values(title: str, rows: Mapping[str, str]) -> Table:
    """Return a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
