"""command/flags.py and command/configuration.py: what follows from the fields of Config. Values,
defaults, refusals, and the configuration in force as --help and as a stage print it."""

from dataclasses import dataclass, fields

import pytest

import train
from command import configuration, flags


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
        assert "feedback=0.15," in text  # a default says no more


def test_help_with_a_stage_and_a_scale_shows_the_values_in_force_there(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--help", "--stage=rl", "--scale=gpu", "--group_size=5"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and text.startswith(train.__doc__)
    text = text.removeprefix(train.__doc__)
    assert all(len(line) <= 100 for line in text.split("\n"))
    flat = " ".join(text.split())
    assert "--dim=640 width of the residual stream [scale gpu; default 128]" in flat
    assert (
        "--optimizer=adamw muon: Muon for matrices" in flat and "[stage rl; default muon]" in flat
    )
    said = "--group_size=5 rollouts per task; their mean reward is the baseline [flag; default 8]"
    assert said in flat
    assert "on one rank [scale gpu; default 4096]" in flat
    assert "--steps=100 optimizer steps" in flat  # that of rl at scale gpu is the default, too
    said = "--feedback=0.15 weight of the targeted textual feedback (distillation); 0: off -"
    assert said in flat


def test_help_alone_shows_the_defaults_and_a_wrong_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    assert "--group_size=8 " in (text := capsys.readouterr().out) and "default 8" not in text
    with pytest.raises(SystemExit) as end:
        train.main(["--help", "--stage=rll"])
    assert end.value.code == 2 and "--stage takes one of all, pretrain" in capsys.readouterr().err


@dataclass(frozen=True)
class Patched(train.Config):
    # ---- an ablation
    noise: float = 0.5  # added to every reward


def test_a_class_derived_from_the_configuration_has_its_own_flags():
    given, wants_help = flags.parse_flags(["--noise=0.25", "--group_size", "4"], Patched)
    assert given == {"noise": 0.25, "group_size": 4} and not wants_help
    text = flags.describe_flags(Patched)
    assert "an ablation\n  --noise=0.5               added to every reward" in text
    assert "  --group_size=8 " in text


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


def test_every_default_passes_the_check_of_its_own_flag():
    for name, rule in flags.rules_of(train.Config).items():
        for value in (getattr(train.Config, name), *rule.defaults.values()):
            flags.check_value(name, rule, value)


def test_a_default_of_a_stage_that_does_not_exist_is_no_configuration():
    @dataclass(frozen=True)
    class Misspelled(train.Config):
        noise: float = flags.flag(0.5, sfft=0.1)

    with pytest.raises(AssertionError, match="noise: {'sfft'}"):
        configuration.Flags(Misspelled, train.SIZES, "")


def test_a_field_that_a_run_on_disk_does_not_know_has_the_default_of_that_run():
    given = {"scale": "gpu", "device": "cpu", "stage": "long", "demos": 7}
    made = vars(train.FLAGS.configure(given, "long"))
    older = {name: value for name, value in made.items() if name not in ("lr", "window", "mtp")}
    assert flags.fill_in(train.Config, older) == made
    assert flags.fill_in(train.Config, made | {"gone": 1}) == made
