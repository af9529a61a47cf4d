"""command/report.py: one file, report.html, in which a run can be looked into.

On top the table and the figures. Below them episodes, chosen so that they teach: turn by turn what
the policy wrote and what the tools answered, every token coloured by what training knows of it
(mask, advantage, log-probability, the hint's KL, experts). eval.play_episodes hands over the
rollouts; report.html beside this file is the page, without its contents.

    describe_episode(...)    a rollout -> plain numbers and texts
    choose_episodes(...)     which of them are shown, and why
    write_report_page(...)   the page with all of it inside: no network, no other file

What a policy or a repository wrote gets into the page as JSON whose every "<" is spelled out, and
from there as text, never as HTML. Left out: episodes of the training itself, whose tokens are on no
file; and a page of more than 3 MB, whose last episodes are dropped.
"""

import codecs
import difflib
import html
import re
import tempfile
from pathlib import Path

from command import drawing
from command.learning_curves import draw_training
from command.output_files import current_commit, to_json
from command.policy_report import draw_policies
from command.transcripts import escape_control_chars

TEMPLATE = Path(__file__).with_suffix(".html")
MOST_BYTES = 3_000_000  # of a page
MOST_LINES = 200  # of the diff of an episode
# Figures in the order of the page
FIGURES = "score", "effort", "bench", "reward", "loss"


# ---------------------------------------------------------------- one episode


def token_texts(tokenizer, tokens):
    """The text of each token. A character of several tokens belongs to the last of them. What
    never becomes a character is a replacement character, as in the text of all tokens."""
    # The decoder keeps the bytes of an unfinished character until the token that ends it.
    decoder, texts = codecs.getincrementaldecoder("utf-8")("replace"), []
    for n, token in enumerate(tokens, 1):
        piece = tokenizer.encoding.decode_single_token_bytes(token)
        texts.append(escape_control_chars(decoder.decode(piece, final=n == len(tokens))))
    return texts


def diff_lines(before, after, path):
    """The difference of two texts in the form of diff -u, as lines"""
    names = f"a/{path}", f"b/{path}"
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2)
    return [escape_control_chars(line) for line in lines]


def describe_turn(turn, start, flags):
    """Whose turn, which of the segment's tokens, and what its edits replace. start: number of its
    first token; flags: words about it"""
    edits = []
    for call in turn.calls:
        if call.name == "edit_file" and len(call.args) == 3:
            path, old, new = call.args
            # Without the three lines that only name the file and the place.
            edits.append(
                {"path": escape_control_chars(path), "lines": diff_lines(old, new, path)[3:]}
            )
    flags = [*flags, *(call.error for call in turn.calls if call.error)]
    return {
        "role": turn.role,
        "start": start,
        "end": start + len(turn.tokens),
        "edits": edits,
        "flags": list(dict.fromkeys(flags)),
    }


def describe_segment(tokenizer, segment, flat, hints):
    """flat: the arrays of rollout.flatten; hints: of this segment, as eval.describe_hint gives
    them"""
    tokens, mask, logprobs, _ = flat
    turns, start = [], 0
    for i, turn in enumerate(segment.turns):
        flags = [hint["rule"] for hint in hints if hint["turn"] == i]
        turns.append(describe_turn(turn, start, flags))
        start += len(turn.tokens)
    # routes (T, L, K): a list for each layer, of a list for each token
    routes = [] if segment.routes is None else segment.routes.swapaxes(0, 1).tolist()
    return {
        "texts": token_texts(tokenizer, tokens.tolist()),
        "mask": mask.tolist(),
        "logprobs": [round(float(value), 3) for value in logprobs],
        "experts": routes,
        "turns": turns,
        "hints": hints,
    }


def describe_episode(policy, played, advantage, tokenizer, flats, hints):
    """A graded rollout as plain numbers and texts. policy: the name of who played it; flats: for
    each segment the arrays of rollout.flatten; hints: for each segment those of its hints"""
    parts = zip(played.segments, flats, hints, strict=True)
    segments = [describe_segment(tokenizer, *part) for part in parts]

    # What was changed in the files
    lines, files = [], played.task.files
    for path in sorted({*files, *played.files}):
        before, after = files.get(path, ""), played.files.get(path, "")
        if path not in played.files:
            lines.append(f"{escape_control_chars(path)}: no longer there")
        elif before != after:
            lines += diff_lines(before, after, path)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"[{len(lines) - MOST_LINES} more lines]"]

    # What the audit found, without what is only noted
    findings = [one for one in played.findings or [] if one.severity in ("cheat", "suspicious")]
    findings = [
        f"{one.severity}: {one.rule}: {escape_control_chars(one.evidence)}" for one in findings
    ]
    return {
        "policy": policy,
        "task": played.task.instance_id,
        "level": played.task.level,
        "label": played.task.meta.get("label", ""),
        "effort_asked": played.task.meta.get("effort", ""),
        "solved": bool(played.solved),
        "passed": bool(played.passed),
        "finished": bool(played.finished),
        "reward": round(float(played.reward), 3),
        "advantage": round(float(advantage), 3),
        "effort": round(float(played.stats["effort"]), 1),
        "sampled": played.stats["sampled"],
        "findings": findings,
        "segments": segments,
        "diff": lines,
    }


# ---------------------------------------------------------------- which episodes


def largest_kl(episode):
    """How much a hint of an episode changes a token that is distilled, in nats; 0 without hints"""
    hints = [hint for segment in episode["segments"] for hint in segment["hints"]]
    return max((hint["kl"][hint["place"]] for hint in hints), default=0.0)


def choose_episodes(episodes):
    """-> those that are shown, each with "why". episodes: of all policies, on the same tasks"""
    policies = list(dict.fromkeys(one["policy"] for one in episodes))
    # In one order, whichever rank has played them
    episodes = sorted(episodes, key=lambda one: (policies.index(one["policy"]), one["level"]))
    chosen = {}  # id of an episode: it

    def show(why, *found):
        for one in found:
            chosen.setdefault(id(one), {**one, "why": []})["why"].append(why)

    # What the first and the last policy do with the same task, of every level: a solution where
    # there is one.
    for level in sorted({one["level"] for one in episodes}):
        here = [one for one in episodes if one["level"] == level]
        here = [one for one in here if one["task"] == here[0]["task"]]
        for policy in dict.fromkeys((policies[0], policies[-1])):
            own = [one for one in here if one["policy"] == policy]
            show(f"level {level}", *sorted(own, key=lambda one: not one["solved"])[:1])

    # What techniques are about: a hint, a summary, the audit's flag.
    hinted = [one for one in episodes if largest_kl(one) > 0]
    show("a hint", *sorted(hinted, key=largest_kl, reverse=True)[:2])
    summarized = [one for one in episodes if len(one["segments"]) > 1]
    show("a summary", *sorted(summarized, key=lambda one: not one["solved"])[:1])
    flagged = [one for one in episodes if one["findings"]]
    show("flagged by the audit", *flagged[:2])

    # The shortest and the longest solution of one task by one policy.
    solutions = {}
    for one in episodes:
        if one["solved"]:
            solutions.setdefault((one["policy"], one["task"]), []).append(one)
    pairs = [sorted(found, key=lambda one: one["sampled"]) for found in solutions.values()]
    pairs = [(found[0], found[-1]) for found in pairs if len(found) > 1]
    if pairs:
        pair = max(pairs, key=lambda pair: pair[1]["sampled"] / pair[0]["sampled"])
        show("a short and a long solution", *pair)
    return list(chosen.values())


# ---------------------------------------------------------------- the page


def inline_figures(numbers, logs):
    """-> the figures of these numbers (eval.summarize_policies) and logs {stage: lines} as one text
    of SVG; a line of text in the place of those that could not be drawn"""
    with tempfile.TemporaryDirectory() as folder:
        problems = [
            drawing.draw_safely(draw_policies, numbers, folder, "svg"),
            drawing.draw_safely(draw_training, logs, folder, "svg"),
        ]
        parts = [f"<p>{html.escape(problem)}</p>" for problem in problems if problem]
        for name in FIGURES:
            path = Path(folder, f"{name}.svg")
            if path.exists():
                # Without the lines above <svg>, which belong to a file of its own.
                svg = path.read_text(encoding="utf-8")
                parts.append(f"<figure>{svg[svg.index('<svg') :]}</figure>")
    return "\n".join(parts)


def embed(value):
    """A value as JSON that can stand inside of a <script>"""
    text = to_json(value)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def write_report_page(path, title, table, numbers, episodes, logs={}):
    """Writes report.html. title: what was evaluated; table: the text of it; numbers: of
    eval.summarize_policies; episodes: all that were played; logs: {stage: lines of its step log}"""
    chosen = choose_episodes(episodes)
    parts = {
        "title": html.escape(title),
        "commit": html.escape(current_commit() or "unknown"),
        "table": html.escape(escape_control_chars(table)),
        "figures": inline_figures(numbers, logs),
        "episodes": embed(chosen),
    }
    # As many episodes as there is room for
    template = TEMPLATE.read_text(encoding="utf-8")
    room = MOST_BYTES - len(template)
    while chosen and sum(len(text.encode()) for text in parts.values()) > room:
        chosen.pop()
        parts["episodes"] = embed(chosen)
    # In one go: what a part holds is never taken for a place of the template.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)
    Path(path).write_text(page, encoding="utf-8")
