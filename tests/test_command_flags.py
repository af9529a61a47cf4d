"""command/flags.py and command/configuration.py: what follows from the fields of Config. Values,
defaults, refusals, and the configuration in force as --help and as a stage print it."""

import re
from dataclasses import dataclass, fields

import pytest

import train
from command import checks, flags


def lines_of_stage(given, stage):
    """What a stage prints of its configuration, without the line above it"""
    config = train.FLAGS.configure({**given, "stage": stage}, stage)
    _, sources = train.FLAGS.merge(given, stage)
    return flags.describe_stage(config, sources).split("\n")[1:], config


@pytest.mark.parametrize("stage", [*train.ORDER, "eval"])
@pytest.mark.parametrize("scale", train.FLAGS.scales)
def test_a_stage_prints_the_values_that_it_reads_with_their_sources_on_few_lines(scale, stage):
    given = {"scale": scale, "device": "cpu", "group_size": 3}
    lines, config = lines_of_stage(given, stage)
    assert len(lines) <= 20 and all(len(line) <= 100 for line in lines)
    text = " ".join(line.strip() for line in lines) + ","
    for field in fields(config):
        value = getattr(config, field.name)
        rule = flags.rules_of(train.Config)[field.name]
        read = stage in (rule.stages.split() or [stage]) and value != ""
        said = f" {field.name}={flags.write_value(value)}"
        assert (f"{said}," in text or f"{said} " in text) == read, field.name
    if stage == "rl":
        assert "group_size=3 (flag)" in text
        assert "optimizer=adamw (stage rl)" in text
        assert ("dim=640 (scale gpu)" in text) == (scale == "gpu")
        assert "feedback=0.03," in text  # a default says no more


def test_help_with_a_stage_and_a_scale_shows_the_values_in_force_there(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help", "--stage=rl", "--scale=gpu", "--group_size=5"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith(train.__doc__)
    text = text.removeprefix(train.__doc__)
    assert all(len(line) <= 100 for line in text.split("\n"))
    flat = " ".join(text.split())
    for said in (
        "--dim 640 width of the residual stream [scale gpu; default 128]",
        "--optimizer adamw muon: Muon for matrices",
        "[stage rl; default muon]",
        "--group_size 5 rollouts per task; their mean reward is the baseline [flag; default 8]",
        "on one rank [scale gpu; default 4096]",
        "--steps 100 optimizer steps",  # that of rl at scale gpu is the default, too
        "--feedback 0.03 weight of the targeted textual feedback (distillation); 0: off. AdamW",
    ):
        assert said in flat


def test_help_alone_shows_the_defaults_and_explains_every_flag(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    text = capsys.readouterr().out.removeprefix(train.__doc__)
    assert all(len(line) <= 100 for line in text.split("\n"))
    flat = " ".join(text.split())
    assert "--group_size 8 " in flat and "default 8" not in flat
    for _, group in flags.field_groups(train.Config):
        for name, explanation in group:
            assert explanation and f"--{name} " in flat and explanation in flat


@dataclass(frozen=True)
class Patched(train.Config):
    # ---- an ablation
    noise: float = 0.5  # added to every reward


def test_a_class_derived_from_the_configuration_has_its_own_flags():
    parser = flags.make_config_parser(Patched)
    given = vars(parser.parse_args(["--noise=0.25", "--group_size", "4", "--resume"]))
    assert given == {"noise": 0.25, "group_size": 4, "resume": True}
    text = parser.format_help()
    assert "an ablation:\n  --noise 0.5               added to every reward" in text
    assert "  --group_size 8 " in text


# What the recipe sets apart from the first value of a field, worked out by hand.
DEFAULTS = {
    ("laptop", "pretrain", False): dict(steps=120, lr=0.006, micro_tokens=4096, dim=128),
    ("laptop", "long", False): dict(steps=20, lr=0.004, adam_lr=2e-3, seq_len_warmup=0.0),
    ("laptop", "sft", False): dict(steps=1000, micro_tokens=2048, adam_lr=3e-3, demos=12000),
    ("laptop", "rl", False): dict(steps=40, optimizer="adamw", adam_lr=5e-4, weight_decay=0.0),
    ("tiny", "sft", False): dict(steps=4, demos=64, micro_tokens=2048, dim=64),
    ("gpu", "pretrain", False): dict(steps=300, lr=0.005, adam_lr=1e-3, micro_tokens=32768),
    ("gpu", "long", False): dict(steps=40, lr=0.004, adam_lr=2e-3),
    ("gpu", "rl", False): dict(steps=100, adam_lr=5e-4, micro_tokens=32768, window=4096),
    ("gpu", "sft", True): dict(steps=200, lr=5e-5, adam_lr=1e-5, seq_len_warmup=0.0),
    ("laptop", "rl", True): dict(steps=40, lr=5e-6, adam_lr=1e-6, optimizer="adamw"),
}


@pytest.mark.parametrize("scale, stage, published", DEFAULTS)
def test_defaults_are_laid_over_each_other_in_the_order_that_is_said(scale, stage, published):
    given = {"scale": scale, "device": "cpu", "stage": stage}
    if published:
        given["init_from"] = "published"
    config = train.FLAGS.configure(given, stage)
    expected = DEFAULTS[scale, stage, published]
    assert {name: getattr(config, name) for name in expected} == expected
    # What is typed wins over all of them.
    assert train.FLAGS.configure({**given, "steps": 7}, stage).steps == 7


@pytest.mark.parametrize("scale", ["laptop", "gpu", "tiny"])
def test_a_model_of_every_scale_has_positions_for_the_whole_window_of_its_agent(scale):
    given = {"scale": scale, "device": "cpu"}
    long, rl = (train.FLAGS.configure({**given, "stage": name}, name) for name in ("long", "rl"))
    assert long.text_window == train.model_config(rl, 64).window * rl.yarn == rl.window


def test_every_default_is_a_value_of_its_own_flag_for_a_stage_and_a_scale_that_exist():
    scales = [*train.FLAGS.scales, "published"]
    known = {*train.FLAGS.stages, *scales}
    known |= {f"{scale}_{stage}" for scale in scales for stage in train.FLAGS.stages}
    kinds = {field.name: field.type.__name__ for field in fields(train.Config)}
    for name, rule in flags.rules_of(train.Config).items():
        assert known >= set(rule.defaults), name
        for value in (getattr(train.Config, name), *rule.defaults.values()):
            if value != "":
                assert flags.read_value(flags.write_value(value), kinds[name], rule) == value
        other, _, value = rule.idle_with.partition("=")
        if value:
            flags.read_value(value, kinds[other], flags.rules_of(train.Config)[other])


def test_a_field_that_a_run_on_disk_does_not_know_has_the_default_of_that_run():
    given = {"scale": "gpu", "device": "cpu", "stage": "long", "demos": 7}
    made = vars(train.FLAGS.configure(given, "long"))
    older = {name: value for name, value in made.items() if name not in ("lr", "window", "mtp")}
    assert flags.fill_in(train.Config, older) == made
    assert flags.fill_in(train.Config, made | {"gone": 1}) == made


@pytest.mark.parametrize(
    "words, stage, idle",
    [
        ("--lr=1e-5 --weight_decay=1 --grad_clip=2", "rl", ["lr", "weight_decay"]),
        ("--lr=1e-5 --optimizer=muon", "rl", []),
        ("--lr=1e-5", "all", []),
        ("--optimizer=adamw --lr=1e-5", "all", ["lr"]),
        ("--group_size=4 --demos=3 --context=64", "long", ["group_size", "demos"]),
        ("--tasks=t --levels=3 --trigger=.5", "rl", ["levels"]),
        ("--tasks=t --levels=3", "all", []),
        ("--tasks=t --eval_tasks=3", "eval", ["eval_tasks"]),
        ("--summarize=0 --trigger=.5 --plain --draft=2", "rl", ["trigger", "draft"]),
        ("--staleness=2", "rl", ["staleness"]),
        ("--staleness=2 --workers=1", "rl", []),
        ("--layers=1 --experts=4", "pretrain", ["experts"]),
        ("--mtp", "rl", []),
        ("--mtp", "eval", ["mtp"]),
    ],
)
def test_flags_that_change_nothing_in_any_stage_of_a_command_are_said_in_one_line(
    words, stage, idle, monkeypatch
):
    said = []
    monkeypatch.setattr(checks.tqdm, "write", said.append)
    given = train.FLAGS.parse([*words.split(), "--scale=tiny", "--device=cpu", f"--stage={stage}"])
    configs = {
        name: train.FLAGS.configure({**given, "stage": name}, name)
        for name in train.FLAGS.stages_of(given)
    }
    checks.say_idle_flags(configs, given)
    assert len(said) == bool(idle)
    assert re.findall(r"--(\w+) \(", "".join(said)) == idle


def test_bad_input_is_told_once_on_each_machine(monkeypatch, capsys):
    told = []
    for rank, local_rank in ((0, 0), (1, 1), (8, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        with pytest.raises(SystemExit):
            flags.usage_error("no such file")
        told.append(capsys.readouterr().err)
    assert told == ["train.py: no such file\n", "", "train.py: no such file\n"]

    # What one rank alone has met is told by that rank.
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        flags.usage_error("the disk is full", any_rank=True)
    assert capsys.readouterr().err == "train.py: the disk is full\n"
