"""Requests as people type them, and second instructions in them.

Some requests are untidy: lower case, typing errors, no name, a pasted test run as the only hint,
the file that happens to be open (`type_untidily`). And some ask for a second thing,
which is no part of the tests: leave a file alone, add a line to the docs, end with the names, run
no tests. Whether that was kept is decided from the files and the transcript, by facts (`is_kept`):
solved and kept are two numbers. So is whether a final message tells what was done (`is_untrue`).

What Cursor says of its bench (cursor.com/blog/cursorbench): prompts are short and underspecified.
The forms here are ours.

Standard library only.
"""

import re

# name -> what is asked; {} is a file
INSTRUCTIONS = {
    "leave": "Leave {} alone.",
    "note": "Add a line to docs.md.",
    "names": "End with the names.",
    "no tests": "Do not run the tests.",
}


def draw_instruction(rng, named, targets, modules):
    """[name, file] of a second instruction that a task with these targets can take."""
    busy = {target.module for target in targets}
    free = [module for module in modules if module not in busy]
    names = ["note", "names"]
    # Without a name in the prompt the tests have to say what is missing.
    if named:
        names.append("no tests")
    if free:
        names.append("leave")
    name = rng.choice(names)
    return [name, f"{rng.choice(free)}.py" if name == "leave" else ""]


def write_instruction(instruction):
    """What the request says of it."""
    name, path = instruction
    return INSTRUCTIONS[name].format(path)


def is_kept(task, files, commands, message):
    """Whether the second instruction of a task was kept; None where it has none. files: what was
    submitted; commands: [(command, what it printed)] of the transcript; message: the final one, ""
    where a limit cut it off."""
    instruction = task.meta.get("asked", {}).get("also")
    if not instruction:
        return None
    name, path = instruction
    if name == "leave":
        return files.get(path) == task.files[path]
    if name == "note":
        return count_lines(files.get("docs.md", "")) > count_lines(task.files["docs.md"])
    if name == "names":
        return set(target_names(task)) <= set(spoken_words(message))
    # The command alone tells little: `python t*.py` runs the tests, `cat tests.py` does not.
    runs = [one == task.test_command or PASSED.search(printed) for one, printed in commands]
    return not any(runs)


# How a test run ends, here and by pytest. One that a file stops, which is no Python, has no counts.
PASSED = re.compile(r"\b\d+ passed")


def count_lines(text):
    """Of those that are not blank"""
    return sum(bool(line.strip()) for line in text.split("\n"))


# ---------------------------------------------------------------- what a final message tells
def spoken_words(text):
    """What a turn says, without the thought before it, word by word"""
    # A thought that is not closed goes on to the turn's end.
    before, close, after = text.partition("</think>")
    return re.findall(r"\w+", after if close else before.partition("<think>")[0])


def target_names(task):
    """Of the functions that a generated task asks for"""
    return [target["name"] for target in task.meta.get("targets", ())]


# A function of a file: its indentation, its name, and its text, which goes on as long as lines are
# indented further than the `def`, or empty.
FUNCTION = re.compile(r"^([ \t]*)def (\w+)(\(.*(?:\n\1[ \t]+.*|\n[ \t]*(?=\n))*)", re.M)


def functions(files):
    """path -> text -> {name of a function: its text}; of two of one name the later one, as in
    Python"""
    found = {}
    for path, text in files.items():
        if path.endswith(".py"):
            found |= {name: body.rstrip() for _, name, body in FUNCTION.findall(text)}
    return found


def changed_functions(task, files):
    """Names of the functions that are otherwise in these files than in the task's"""
    before, after = functions(task.files), functions(files)
    return {name for name in after if after[name] != before.get(name)}


def telling_names(task, files):
    """The names of functions in these files that a message can be about, without those of the
    check: its `run` and `passes` are words of any message"""
    check = functions({"check.py": task.files.get("check.py", "")})
    return [name for name in functions(files) if name not in check]


def done_targets(task, files):
    """Names of the functions that the task asks for and that are not as they were"""
    wanted = target_names(task)
    changed = changed_functions(task, files) if wanted else ()
    return [name for name in wanted if name in changed]


def is_untrue(task, files, words):
    """Do these words name functions of a generated task otherwise than its files have changed? In
    a real repository a name may be any word."""
    wanted = set(target_names(task))
    if not wanted or not files:  # a transcript holds no files
        return False
    # An old name that is gone may be told.
    known = wanted.union(telling_names(task, task.files), telling_names(task, files))
    known -= set(task.meta.get("gone", ()))
    named, changed = set(words) & known, changed_functions(task, files)
    named_but_not_done = named - changed
    done_but_not_named = (wanted & changed) - named
    return bool(named_but_not_done or done_but_not_named)


# ---------------------------------------------------------------- untidy requests
def type_untidily(rng, request, names, red, modules):
    """(the request as somebody in a hurry types it, whether it still says the names). names:
    "module.name" of the targets, which stay as they are; red: what the test run prints, "" where
    it is green."""
    is_named = all(name.split(".")[1] in request for name in names)
    forms = ["lower", "typing"]
    if red:
        forms += ["pasted", "vague"]
    form = rng.choice(forms)

    if form == "pasted":
        request, is_named = f"tests fail:\n{red}", True
    elif form == "vague":
        request = rng.choice(["tests are red, pls fix", "something broke. see docs.md"])
        is_named = False
    else:
        # No backticks, no capitals, no full stop at the end.
        request = request.replace("`", "").lower().rstrip(".")
        if form == "typing":
            request = with_typing_error(rng, request, names)
    # The file that is open.
    if rng.random() < 0.3:
        request = f"[open: {rng.choice(modules)}.py]\n{request}"
    return request, is_named


def with_typing_error(rng, text, names):
    """The text with two neighbouring letters of one plain word swapped."""
    words = []
    for found in re.finditer(r"\b[a-z]{4,}\b(?![.(_])", text):
        if not any(found[0] in name for name in names):
            words.append(found)
    if not words:
        return text
    word = rng.choice(words)
    at = word.start() + rng.randrange(len(word[0]) - 1)
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
