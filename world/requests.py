"""Requests as people type them, and second instructions in them.

Some requests are untidy: lower case, typing errors, no name, a pasted test run as the only hint,
the file that happens to be open (`type_untidily`). And some ask for a second thing,
which is no part of the tests: leave a file alone, add a line to the docs, end with the names, run
no tests. Whether that was kept is decided from the files and the transcript, by facts (`is_kept`):
solved and kept are two numbers.

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


def is_kept(task, files, calls, message):
    """Whether the second instruction of a task was kept; None where it has none. files: what was
    submitted; calls: [(tool, arguments)] of the transcript; message: the final one, "" where a
    limit cut it off."""
    instruction = task.meta.get("asked", {}).get("also")
    if not instruction:
        return None
    name, path = instruction
    if name == "leave":
        return files.get(path) == task.files[path]
    if name == "note":
        return files.get("docs.md", "").count("\n") > task.files["docs.md"].count("\n")
    if name == "names":
        return all(target["name"] in message for target in task.meta["targets"])
    commands = [arguments[0] for tool, arguments in calls if tool == "run_command" and arguments]
    return not any("tests" in command for command in commands)


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
