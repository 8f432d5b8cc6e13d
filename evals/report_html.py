"""The report for a browser: one file without a script, in light and dark and on paper.

Everything comes from the document that the certificate holds and from the examples; whatever text of a model
or a prompt stands in it is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from qinfer.evals import plots
from qinfer.evals.offer import MEAN_KL
from qinfer.evals.words import HEADLINE, number, percent
from qinfer.webpage import page, table

_MARK = {"PASS": "✓", "FAIL": "✗", "UNDECIDED": "?", "reported": ""}


def report_page(document: Mapping[str, Any], examples: Mapping[str, Any]) -> str:
    """The report of a document made by `GateResult.to_dict` and of its examples."""
    verdict, settings = document["verdict"], document["settings"]
    parts = [
        f'<h1><span class="verdict {verdict}">{_MARK[verdict]} {verdict}</span> '
        f"{escape(str(settings.get('model', '')))}</h1>",
        f"<p>{escape(HEADLINE[verdict])}. Compared with {escape(str(settings.get('against', '')))}.</p>",
        "<h2>Why</h2>",
        _list(document["reasons"]),
        _blame(document.get("blame")),
        _offer(document.get("offer")),
        _measures(document),
        _tasks(document.get("evidence", {})),
        _regressions(examples.get("regressions", [])),
        _moved(examples),
        _spent(document.get("evidence", {})),
        _settings(settings),
    ]
    return page(f"{verdict}: {settings.get('model', '')}", "\n".join(part for part in parts if part))


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def measures_table(document: Mapping[str, Any]) -> str:
    """All measures with their intervals drawn."""
    rows = []
    for measure in document["measures"]:
        verdict = measure["verdict"] or "reported"
        required = f"{measure['bound']} {number(measure['limit'])}" if measure["verdict"] else ""
        power = measure.get("power")
        told = f"passes {number(power['passes_at'])}, fails {number(power['fails_at'])}" if power else ""
        rows.append(
            (
                escape(measure["name"]),
                f"{number(measure['value'])} <span class='quiet'>{escape(measure['unit'])}</span>",
                f"{number(measure['low'])} to {number(measure['high'])}",
                required,
                f'<span class="{verdict}">{_MARK[verdict]} {verdict}</span>',
                f'<span class="{verdict}">{plots.interval(measure)}</span>',
                f'<span class="quiet">{told}</span>',
            )
        )
    levels = sorted({percent(measure["confidence"]) for measure in document["measures"]})
    header = ("measure", "value", f"interval ({', '.join(levels)})", "required", "", "", "power")
    return table(header, rows, numeric=(2,)) if rows else ""


def _measures(document: Mapping[str, Any]) -> str:
    if not document["measures"]:
        return ""
    return (
        f"<h2>Measures</h2>{measures_table(document)}"
        '<p class="quiet">Intervals: bootstrap over windows of text, over questions or the passages they '
        "share. A measure passes when its whole interval does; the dashed line is the limit. Power: true "
        f"values that would be found to pass, or to fail, four times in five "
        f"({percent(document.get('power', 0.8))}) with as much evidence.</p>"
    )


def _tasks(evidence: Mapping[str, Any]) -> str:
    results = evidence.get("tasks", [])
    if not results:
        return ""
    rows = []
    for result in results:
        d = result["difference"]
        share = "no better than chance" if result["recovery"] is None else percent(result["recovery"])
        rows.append(
            (
                escape(f"{result['task']} ({result['metric']})"),
                str(result["items"]),
                percent(result["source"]),
                percent(result["candidate"]),
                f"{percent(d['value'])} [{percent(d['low'])}, {percent(d['high'])}]",
                f"{result['lost']} / {result['won']}",
                number(result["p_value"]),
                share,
            )
        )
    header = ("task", "questions", "source", "candidate", "difference", "lost / won", "McNemar p", "recovery")
    note = (
        "Lost: only the source got it right; won: only the candidate. Recovery: the candidate's accuracy "
        "above chance as a share of the source's; tasks on which the source is no better than chance are not "
        "pooled."
    )
    return f'<h2>Tasks</h2>{table(header, rows, range(1, 8))}<p class="quiet">{note}</p>'


def _regressions(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return ""
    cards = []
    for one in found:
        choices = [
            (
                escape(choice["text"]) + (" ✓" if choice["text"] == one["target"] else ""),
                number(choice["source"]),
                number(choice["candidate"]),
            )
            for choice in one["choices"]
        ]
        shown = table(("choice", "source, nats", "candidate, nats"), choices, (1, 2)) if choices else ""
        other = one["prompt_of_candidate"]
        prompt = "" if other is None else f"<p>The candidate was shown:</p><pre>{escape(other)}</pre>"
        cards.append(
            f'<div class="card"><h3>{escape(one["task"])}, question {one["question"]}</h3>'
            f"<pre>{escape(one['prompt'])}</pre>{prompt}"
            f"<p>Right: <code>{escape(one['target'])}</code></p>"
            f'<div class="two"><div><h3>Source</h3><pre class="good">{escape(one["source"])}</pre></div>'
            f'<div><h3>Candidate</h3><pre class="bad">{escape(one["candidate"])}</pre></div></div>'
            f"{shown}</div>"
        )
    return "<h2>Worst regressions</h2>" + "".join(cards)


def _moved(examples: Mapping[str, Any]) -> str:
    curve = plots.quantiles(examples.get("kl_quantiles", []), "KL by share of positions")
    found = examples.get("moved", [])
    if not found:
        return ""
    figure = (
        f"<figure>{curve}<figcaption>KL in nats (logarithmic): the share of positions to the left lies "
        "below.</figcaption></figure>"
    )
    cards = []
    for one in found:
        said = [
            table(
                (who, "probability"),
                [
                    (f"<code>{escape(repr(t['token']))}</code>", percent(t["probability"]))
                    for t in one[who.lower()]
                ],
                (1,),
            )
            for who in ("Source", "Candidate")
        ]
        following = (
            "" if one["next"] is None else f" The text goes on with <code>{escape(repr(one['next']))}</code>."
        )
        cards.append(
            f'<div class="card"><pre>… {escape(one["context"])}▮</pre><p class="quiet">KL '
            f"{number(one['kl'])} nats, window {one['window']}, position {one['position']}.{following}</p>"
            f'<div class="two"><div>{said[0]}</div><div>{said[1]}</div></div></div>'
        )
    heading = "<h2>Where the text moved most</h2><p>What each model held likeliest to come next.</p>"
    return heading + (figure if curve else "") + "".join(cards)


def _blame(blame: Mapping[str, Any] | None) -> str:
    if not blame:
        return ""
    parts = blame["parts"]
    culprit = blame["culprit"]
    names = [one if (one := part["name"]) == culprit else one.removeprefix("layer ") for part in parts]
    chart = plots.bars(names, [part["error"] for part in parts], culprit, "Relative error of each part")
    suspects = [
        (escape(part["name"]), number(part["error"]), number(part["kl_alone"]))
        for part in parts
        if part["kl_alone"] is not None or part["name"] == blame["culprit"]
    ]
    return (
        f"<h2>Where it comes from</h2><p>{escape(blame['line'])}.</p><figure>{chart}<figcaption>Relative "
        "error of what each layer adds, for the source's own input.</figcaption></figure>"
        + table(("part", "relative error", "mean KL when it alone stands in the source"), suspects, (1, 2))
    )


def _offer(offer: Mapping[str, Any] | None) -> str:
    if not offer:
        return ""
    rows = []
    for trial in offer["trials"]:
        kl = next(measure for measure in trial["measures"] if measure["name"] == MEAN_KL)
        said = [f"{number(kl['value'])}, {number(kl['low'])} to {number(kl['high'])}", number(kl["limit"])]
        rows.append([escape(trial["name"]), *said, "passes" if trial["passes"] else "fails"])
    header = ("tried", "mean KL", "limit", "")
    return f"<h2>What would pass</h2><p>{escape(offer['line'])}.</p>{table(header, rows, (1, 2))}"


def _spent(evidence: Mapping[str, Any]) -> str:
    rows = [
        (
            escape(one["name"]),
            f"{one['done']} of {one['size']} {escape(one['unit'])}",
            f"{one['seconds']:.1f} s",
            percent(one["confidence"]),
            "" if one["needed"] is None else f"about {one['needed']}",
        )
        for one in evidence.get("spent", [])
    ]
    header = ("evidence", "measured", "time", "confidence", "would decide it")
    return f"<h2>What was measured</h2>{table(header, rows, (1, 2, 3, 4))}" if rows else ""


def _settings(settings: Mapping[str, Any]) -> str:
    rows = [
        (escape(name.replace("_", " ")), escape(value if isinstance(value, str) else json.dumps(value)))
        for name, value in settings.items()
        if name != "command"
    ]
    command = f"<pre>{escape(settings['command'])}</pre>" if "command" in settings else ""
    return f"<h2>To get the same numbers</h2>{command}{table(('setting', ''), rows)}"
