"""command/flags.py and command/idle_flags.py: the configuration in force, as --help and as a stage
print it."""

from dataclasses import dataclass, fields

import pytest

import train
from command import flags, idle_flags


def lines_of_stage(given, stage):
    """What a stage prints of its configuration, without the line above it"""
    config = train.FLAGS.configure({**given, "stage": stage}, stage)
    _, sources = train.FLAGS.merge(given, stage)
    idle = {name for name, stages in idle_flags.READ_BY.items() if stage not in stages}
    return flags.describe_configuration(config, sources, idle).split("\n"), config


@pytest.mark.parametrize("stage", [*train.ORDER, "eval"])
@pytest.mark.parametrize("scale", train.SCALES)
def test_a_stage_prints_the_values_that_it_reads_with_their_sources_on_few_lines(scale, stage):
    given = {"scale": scale, "device": "cpu", "group_size": 3}
    lines, config = lines_of_stage(given, stage)
    assert len(lines) <= 20 and all(len(line) <= 100 for line in lines)
    text = " ".join(line.strip() for line in lines) + ","
    for field in fields(config):
        value = getattr(config, field.name)
        read = stage in idle_flags.READ_BY.get(field.name, [stage]) and value != ""
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
        "--optimizer=adamw muon: Muon for matrices" in flat and '[stage rl; default "muon"]' in flat
    )
    said = "--group_size=5 rollouts per task; their mean reward is the baseline [flag; default 8]"
    assert said in flat
    assert "on one rank [stage rl at scale gpu; default 4096]" in flat
    said = "--feedback=0.15 weight of the targeted textual feedback (distillation); 0: off -"
    assert said in flat


def test_help_alone_shows_the_defaults_and_a_wrong_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        train.main(["-h"])
    assert "--group_size=8 " in (text := capsys.readouterr().out) and "default 8" not in text
    with pytest.raises(SystemExit) as end:
        train.main(["--help", "--stage=rll"])
    assert end.value.code == 2 and "unknown stage 'rll'" in capsys.readouterr().err


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
