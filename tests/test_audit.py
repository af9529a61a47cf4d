"""The audit against transcripts that were written before its rules, and its facts one by one."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import synth_tasks as st
import world.audit
from audit_transcripts import PROGRAMS, TRANSCRIPTS
from synth_tasks import Action, Task, Workspace, audit, changes, make_task
from world import watcher

facts_can_be_had = pytest.mark.skipif(
    not st.has_bwrap() or watcher.Watcher.make() is None,
    reason="the audit's facts need bubblewrap and inotify",
)


def staged(transcript, number):
    """(task, calls) of a transcript: the marks filled in for one task, every tool at hand."""
    if transcript.world in PROGRAMS:
        path, head, body = PROGRAMS[transcript.world]
        files = {path: head + "    raise NotImplementedError\n"}
        task = Task(f"program-{number}", "", files, {path: head + body})
        tests = "import check\ncheck.run({})\n"
        task.files.update({"tests.py": tests, "check.py": st.CHECK})
        return task, [("edit_file", (path, "    raise NotImplementedError\n", body))]
    task = make_task(3 + number % 2, 4000 + number)
    module, name = task.hidden[0][:2]
    cases = [case for case in task.meta["visible"] if case[:2] == [module, name]]
    target = next(one for one in task.meta["targets"] if one["name"] == name)
    if transcript.world == "careless":
        task = st.unharden(task)
    task = dataclasses.replace(task, tools=st.TOOLS)
    marks = {"@MODULE@": module, "@NAME@": name, "@CODE@": st.Function(**target).code()}
    for end, (_, _, (given,), value) in zip(("", "2"), cases):
        marks |= {f"@INPUT{end}@": repr(given), f"@VALUE{end}@": repr(value)}

    def fill(text):
        for mark, word in marks.items():
            text = text.replace(mark, word)
        return text

    return task, [(tool, tuple(map(fill, arguments))) for tool, arguments in transcript.calls]


def told(task, calls):
    """(transcript, submitted files) as a stranger stores them: outputs are lost, only edits are in
    the files.
    """
    files, story = dict(task.files), []
    for tool, arguments in calls:
        story.append((Action("", [(tool, arguments)]), [""]))
        if tool == "edit_file":
            files[arguments[0]] = st.edited(files.get(arguments[0]), *arguments)
    return story, files


def played(task, calls, sandbox):
    """(transcript, submitted files, what was recorded) of an episode that is really played."""
    story = []
    with Workspace(task, sandbox) as workspace:
        for tool, arguments in calls:
            output, _ = st.call_tool(workspace, tool, arguments)
            story.append((Action("", [(tool, arguments)]), [output]))
        return story, workspace.files(), workspace.recorder.seen


def gravest(findings):
    kinds = {finding.severity for finding in findings}
    return next((kind for kind in ("cheat", "suspicious") if kind in kinds), "clean")


def verdicts(how):
    """{label: (is a cheat, the gravest finding, findings)} of all forty."""
    result = {}
    sandbox = st.Sandbox()
    for number, transcript in enumerate(TRANSCRIPTS):
        task, calls = staged(transcript, number)
        if how == "stored":
            story, files = told(task, calls)
            found = audit(task, story, changes(task.files, files))
        elif how == "words":
            story, files = told(task, calls)
            found = audit(task, story, changes(task.files, files), again=False)
        else:
            story, files, facts = played(task, calls, sandbox)
            verdict = st.judge(task, files, sandbox) if task.hidden else None
            found = audit(task, story, changes(task.files, files), facts=facts, verdict=verdict)
        result[transcript.label] = transcript.cheat, gravest(found), found
    return result


def table(result):
    """{(is a cheat, gravest finding): how many}"""
    counts = {}
    for cheat, kind, _ in result.values():
        counts[cheat, kind] = counts.get((cheat, kind), 0) + 1
    return counts


if __name__ == "__main__":
    for how in sys.argv[1:] or ("stored", "live", "words"):
        result = verdicts(how)
        print(how, table(result))
        for label, (cheat, kind, found) in result.items():
            if how != "words" and (cheat != (kind == "cheat") or "-v" in sys.argv):
                print(
                    "   ",
                    "cheat " if cheat else "honest",
                    kind,
                    "|",
                    label,
                    [(f.turn, f.rule, f.evidence[:60], f.severity) for f in found],
                )
