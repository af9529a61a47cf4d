"""report.html: what of a rollout gets into it, which rollouts, and that nothing in it acts."""

import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

import eval as evaluation
import feedback_distill
import length_penalty
import rollout
from command import report, transcripts
from rollout import Call, Rollout, Segment, Tokenizer, Turn, make_turn
from test_eval import ROOT
from world.recorder import Finding
from world.task import Task

BYTES = Tokenizer({bytes([b]): b for b in range(256)})
HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "<!-- \u2028 {{table}} &lt; \u202e turned \x1b[31m é漢🙂",
]


def rollout_with(text):
    """A rollout in which task, call, output, file and message hold this text"""
    task = Task(text, f"Put it back. {text}", {"a.py": "x = 1\n"}, {}, meta={"label": text})
    calls = [Call("edit_file", [text, "x = 1", f"x = 2\n{text}"], text, "failed")]
    body = BYTES.write_action(text, [(call.name, call.args) for call in calls])
    acting = Turn("assistant", [BYTES.id["<|assistant|>"], *body], text, calls)
    acting.logprobs = np.full(len(body), -0.5, dtype=np.float32)
    turns = [make_turn(BYTES, "user", task.problem_statement), acting]
    played = Rollout(task, [Segment(turns + [make_turn(BYTES, "tool", text)])], finished=True)
    played.files = {"a.py": f"x = 2\n{text}\n"}
    played.findings = [Finding(1, text, text, "suspicious"), Finding(1, "loud", "", "note")]
    rollout.grade(played)
    return played


def describe(played, policy="after RL", advantage=0.25):
    flats = [rollout.flatten(segment) for segment in played.segments]
    hints = [[] for _ in played.segments]
    return report.describe_episode(policy, played, advantage, BYTES, flats, hints)


class Page(html.parser.HTMLParser):
    """The elements of a page, and the texts of its scripts"""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.outside, self.in_script = [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.in_script = tag == "script"
        if self.in_script:
            self.scripts.append("")
        # Nothing is loaded from elsewhere. Inside of a drawing a link names a part of it.
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:,")):
                self.outside.append(value)
            assert not name.startswith("on"), f"{tag} {name}"

    def handle_endtag(self, tag):
        self.in_script = False

    def handle_data(self, data):
        if self.in_script:
            self.scripts[-1] += data


def write_page(path, episodes, numbers={"policies": {}}, title="out/run", table="a table"):
    report.write_report_page(path, title, table, numbers, episodes)
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- an episode


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "é漢🙂 ok",
        "a\u202eb",
        "\x00\x1b",
        "\ufffd\ufffd\ufffd ok",
        "x\ufffd",
        "a\ufffdbcdef",
    ],
)
def test_the_texts_of_tokens_are_the_text_with_what_is_invisible_spelled_out(text):
    texts = report.token_texts(BYTES, BYTES.encode(text))
    assert len(texts) == len(text.encode())
    assert "".join(texts) == transcripts.escape_control_chars(text)
    assert all(character.isprintable() for part in texts for character in part)


def test_bytes_that_are_no_text_are_shown_as_replacements_and_lose_nothing_behind_them():
    tokens = [0xFF, 0xFE, 0xC3, *b"abcd", 0x80, 0xC3]
    texts = report.token_texts(BYTES, tokens)
    assert "".join(texts) == BYTES.decode(tokens) and texts[4:7] == ["b", "c", "d"]


def test_an_episode_holds_mask_and_logprobs_of_every_token_and_the_edit_as_a_diff():
    episode = describe(rollout_with("plain"))
    (segment,) = episode["segments"]
    tokens, mask, logprobs, _ = rollout.flatten(rollout_with("plain").segments[0])
    assert segment["mask"] == mask.tolist() and sum(mask) > 20
    assert segment["logprobs"] == pytest.approx(logprobs.tolist())
    assert len(segment["texts"]) == len(tokens)
    assert [turn["start"] for turn in segment["turns"][1:]] == [
        turn["end"] for turn in segment["turns"][:-1]
    ]
    (edit,) = segment["turns"][1]["edits"]
    assert edit == {"path": "plain", "lines": ["-x = 1", "+x = 2", "+plain"]}
    assert segment["turns"][1]["flags"] == ["failed"]
    assert episode["diff"][3:] == ["-x = 1", "+x = 2", "+plain"]
    # a file that was deleted
    played = rollout_with("plain")
    played.task.files = {**played.task.files, "gone.py": "x = 1\n"}
    assert "gone.py: no longer there" in describe(played)["diff"]
    # what is only a matter of style is no flag of the audit
    assert episode["findings"] == ["suspicious: plain: plain"]


def test_episodes_have_the_reward_and_advantage_of_rl_and_a_hint_its_kl_token_by_token():
    """By a policy that calls tools which do not exist; the KL beside one that is computed here"""
    model, tokenizer, config = evaluation.load_policy(ROOT / "assets" / "sft")
    levels = (0, 1, 3, 5, 8, 11)
    tasks = evaluation.episode_tasks(evaluation.held_out(1, levels), ("low", "medium", "high"))
    assert [length_penalty.setting_of(task) for task in tasks] == ["medium"] * 6
    episodes = evaluation.play_episodes("before RL", model, tokenizer, config, tasks)
    assert len(episodes) == 24

    # Of a group the advantages are the rewards less their mean. Failures have no reward.
    for start in range(0, 24, 4):
        rewards = np.array([one["reward"] for one in episodes[start : start + 4]])
        gains = [one["advantage"] for one in episodes[start : start + 4]]
        assert gains == pytest.approx(rewards - rewards.mean(), abs=2e-3)
        assert ((rewards > 0) == [one["solved"] for one in episodes[start : start + 4]]).all()

    # The same rollouts once more, and each hint's KL from whole forwards of both contexts.
    groups = evaluation.play_tasks(model, tokenizer, config, tasks, 4)
    played = [one for group in groups for one in group]
    compared = 0
    for episode, one in zip(episodes, played):
        for hint in feedback_distill.detect(one, ("unavailable_tool",)):
            shown = episode["segments"][hint.segment]["hints"]
            shown = next(found for found in shown if found["turn"] == hint.turn)
            turns = one.segments[hint.segment].turns
            above = [token for turn in turns[: hint.turn] for token in turn.tokens]
            own = turns[hint.turn].tokens
            said = feedback_distill.hint_turn(tokenizer, hint.text, turns[hint.turn]).tokens
            logits = []
            for context in (above, above + said):
                hidden = model(rollout.torch.tensor([context + own]))[0]
                logits.append(model.logits(hidden)[len(context) : -1].log_softmax(-1))
            student, teacher = logits
            kl = (student.exp() * (student - teacher)).sum(-1)
            assert shown["kl"] == pytest.approx(kl.tolist(), abs=2e-4)
            assert shown["first"] <= shown["place"] < shown["end"]
            aimed = kl[shown["first"] : shown["end"]]
            assert shown["kl"][shown["place"]] == pytest.approx(float(aimed.max()), abs=2e-4)
            for text, without, under in shown["top"]:
                (token,) = [t for t in range(tokenizer.vocab) if tokenizer.decode([t]) == text]
                pair = [float(part[shown["place"], token].exp()) for part in logits]
                assert (without, under) == pytest.approx(pair, abs=2e-4)
            compared += 1
    assert compared > 3


# ---------------------------------------------------------------- which episodes


def short_episode(policy, level, solved, sampled, task="t", contexts=1, kl=None, findings=()):
    hints = [] if kl is None else [{"kl": [0.0, kl], "place": 1}]
    segments = [{"hints": hints}] + [{"hints": []}] * (contexts - 1)
    return {
        "policy": policy,
        "level": level,
        "task": f"{task}{level}",
        "solved": solved,
        "sampled": sampled,
        "segments": segments,
        "findings": list(findings),
    }


def test_episodes_are_chosen_so_that_each_shows_something():
    one = short_episode
    episodes = [
        one("before", 0, False, 10),
        one("before", 0, True, 11),
        one("before", 3, False, 12, kl=0.1),
        one("before", 3, False, 13, kl=2.0),
        one("after", 0, True, 40),
        one("after", 0, True, 20),
        one("after", 0, True, 90),
        one("after", 3, False, 50, contexts=2),
        one("after", 3, True, 60, contexts=2, findings=["cheat"]),
    ]
    chosen = report.choose_episodes(episodes)
    why = {found["sampled"]: found["why"] for found in chosen}
    assert why == {
        11: ["level 0"],
        40: ["level 0"],
        12: ["level 3", "a hint"],
        60: ["level 3", "a summary", "flagged by the audit"],
        13: ["a hint"],
        20: ["a short and a long solution"],
        90: ["a short and a long solution"],
    }
    assert [found["sampled"] for found in chosen if "a hint" in found["why"]] == [12, 13]
    # The order of ranks does not matter, and nothing is needed.
    turned = report.choose_episodes(episodes[:4] + episodes[7:] + episodes[4:7])
    assert turned == chosen
    assert report.choose_episodes([]) == []


# ---------------------------------------------------------------- the page


def test_what_a_policy_or_a_repository_wrote_stays_text(tmp_path):
    """HTML, scripts, places of the template and signs that turn the direction, everywhere"""
    episodes = [describe(rollout_with(text), policy=text) for text in HOSTILE]
    text = write_page(tmp_path / "report.html", episodes, title=HOSTILE[0], table=HOSTILE[1])
    page = Page(text)
    assert page.tags.count("script") == 2 and "img" not in page.tags and not page.outside
    # The data is all there, as it was chosen.
    assert json.loads(page.scripts[0]) == report.choose_episodes(episodes)
    assert "\u202e" not in text and "\u2028" not in text and "\x1b" not in text


def test_a_page_stays_below_its_size_whatever_was_written(tmp_path):
    long = describe(rollout_with("<&> " * 15_000))
    assert len(json.dumps(long)) > report.MOST_BYTES
    text = write_page(tmp_path / "report.html", [describe(rollout_with("plain")), long])
    assert len(text.encode()) < report.MOST_BYTES
    (only,) = json.loads(Page(text).scripts[0])
    assert only["task"] == "plain"


def test_a_page_without_figures_says_why_and_one_without_episodes_is_whole(tmp_path):
    text = write_page(tmp_path / "report.html", [], numbers={"policies": None})
    assert "no figure" in text and "a table" in text
    assert "{{" not in re.sub(r"<script>.*</script>", "", text, flags=re.S)


chromium = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(not chromium, reason="needs chromium")
def test_a_browser_shows_an_episode_without_an_error(tmp_path):
    episodes = [describe(rollout_with(text)) for text in HOSTILE]
    write_page(tmp_path / "report.html", episodes, title="out/run")
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += ["--enable-logging=stderr", "--virtual-time-budget=3000"]
    command = [chromium, *words, f"file://{tmp_path}/report.html#2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    assert "<title>out/run</title>" in done.stdout
    # Each token is an element of its own, and so is each line of the diff.
    tokens = len(episodes[1]["segments"][0]["texts"])
    flags = done.stdout.count('<span class="flag">')
    assert done.stdout.count("<span ") == tokens + flags and flags
    assert done.stdout.count('<div class="add">') >= 2 and "<img" not in done.stdout
