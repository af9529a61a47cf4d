"""command/configuration.py: from the words of a command to the configuration of each of its stages.

train.py says what there is to configure: its class Config with the defaults, and tables of what a
scale, a stage or a published model changes in them. `Flags` holds these and answers

    parse(argv)               which flags were given? --help is answered here
    merge(given, stage)       the values in force in a stage, and where each comes from
    configure(given, stage)   the configuration of one stage, checked
    configure_stages(given)   those of all stages of a command. What these will read and write is
                              tried, so that a mistake costs a second and not the hours before it

It stands apart from train.py because a reader of the recipe reads the tables there, and need not
see how they are laid over each other. It does not import train.py: the tables come as arguments.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import hsdp
from command import checkpoints, checks, flags, hardware, old_flags
from command.flags import usage_error


@dataclass(frozen=True)
class Flags:
    """What there is to configure, as train.py says it, and what a command makes of it"""

    Config: type
    sizes: set  # names of the fields that are the model's shape
    scales: dict  # {scale: {field: value}}
    stages: dict  # {stage: {field: value}}, in the order in which they run; eval is the last
    stage_scales: dict  # {(scale, stage): {field: value}}
    fine_tuning: dict  # {stage: {field: value}} of a run that begins from a published model
    about: str  # the head of --help

    def parse(self, argv):
        """--name=value or --name value for every field of Config -> dict of what was given. --help
        prints every flag and ends; with --stage or --scale it prints the values in force there."""
        # A flag of an earlier version is answered with what has become of it.
        for word in argv:
            if explanation := old_flags.explain_old_flag(word):
                usage_error(explanation)
        given, wants_help = flags.parse_flags(argv, self.Config)
        if not wants_help:
            return given

        # --help, with the values in force where other flags stand beside it.
        stage, values, sources = given.get("stage", "all"), None, None
        self.check_stage(stage)
        if given:
            values, sources = self.merge(given, stage)
        print(self.about + flags.describe_flags(self.Config, values, sources))
        raise SystemExit(0)

    def check_stage(self, stage):
        if stage != "all" and stage not in self.stages:
            usage_error(f"unknown stage {stage!r}: all, {', '.join(self.stages)}")

    def stages_of(self, given):
        """-> the names of the stages that a command runs"""
        stage = given.get("stage", "all")
        self.check_stage(stage)
        return list(self.stages) if stage == "all" else [stage]

    def merge(self, given, stage):
        """The values in force in a stage: the defaults, then the scale, the stage, the stage at
        that scale, fine-tuning where the run begins from a published model, this machine, and the
        command line. Each wins over those before it. -> ({field: value}, {field: where that comes
        from}); fields with their default are left out. stage "all": what all stages have in
        common"""
        # Without --scale the machine decides: how large a model, and how many tokens at a time.
        scale, fitted = given.get("scale", "auto"), {}
        chosen = {}
        if scale == "auto":
            at_gpu = self.stage_scales.get(("gpu", stage), {})
            most = at_gpu.get("micro_tokens", self.scales["gpu"]["micro_tokens"])
            scale, fitted = hardware.scale_of_machine(given, most)
            chosen = {"scale": scale}
        if scale not in self.scales:
            usage_error(f"unknown scale {scale!r}: {', '.join(self.scales)}")

        # A scale of "auto" that was typed would hide the one that the machine chose.
        typed = {name: value for name, value in given.items() if (name, value) != ("scale", "auto")}
        # (where values come from, the values): the last layer that has a field decides.
        layers = [
            (f"scale {scale}", self.scales[scale]),
            (f"stage {stage}", self.stages.get(stage, {})),
            (f"stage {stage} at scale {scale}", self.stage_scales.get((scale, stage), {})),
            ("fine-tuning", self.fine_tuning.get(stage, {}) if given.get("init_from") else {}),
            ("this machine", {**fitted, **chosen}),
            ("flag", typed),
        ]
        values, sources = {}, {}
        for source, layer in layers:
            for name, value in layer.items():
                values[name], sources[name] = value, source

        # These are compared on resume, so one folder must be written in one way.
        for name in ("init_from", "tasks", "data"):
            if values.get(name):
                values[name] = str(Path(values[name]).resolve())
        return values, sources

    def configure(self, given, stage, stages=()):
        """The configuration of a stage, checked. stages: all that this command runs (default: this
        one)."""
        values, _ = self.merge(given, stage)
        config = replace(self.Config(), **values)

        # A flag of Muon's is in order if any stage of the command that trains has Muon.
        optimizers = set()
        for other in stages or (stage,):
            if other in self.stages and other != "eval":
                its = {**self.stages[other], **given}
                optimizers.add(its.get("optimizer", self.Config.optimizer))

        checks.check_values(config)
        checks.check_together(config, given, stage, self.sizes)
        checks.check_optimizer_flags(config, given, stage, optimizers)
        return config

    def configure_stages(self, given):
        """-> {stage: its configuration} of all stages of a command, checked. What the stages will
        read and write is tried."""
        # Each process needs a GPU of its own.
        if hardware.uses_card(given):
            try:
                hsdp.check_cards()
            except ValueError as error:
                usage_error(str(error))

        # What began from a published model goes on with it, also where the flag is not said again.
        stages, configs = self.stages_of(given), {}
        for stage in stages:
            folders = given.get("out", self.Config.out), given.get("start_from")
            given["init_from"] = given.get("init_from") or checkpoints.find_init_from(
                stage, *folders
            )
            configs[stage] = self.configure({**given, "stage": stage}, stage, stages)

        # --start_from and --resume say where the command begins. With --start_from, each of
        # several stages would start from that folder and leave the stage before it aside.
        first = configs[stages[0]]
        if first.start_from and first.stage == "pretrain":
            usage_error("--start_from is for one stage: add --stage=long, sft, rl or eval")
        if first.resume and not any(
            hsdp.checkpoint_exists(Path(first.out, stage)) for stage in self.stages
        ):
            usage_error(f"--resume: no checkpoint in {first.out} to go on from")

        # What the stages to come will read and write is tried now, and not when those before are
        # done.
        checks.check_tasks(first)
        checkpoints.check_positions(configs)
        checks.check_outputs(first.out, stages)

        # Where the machine chose the scale, one line says what it chose.
        chosen = given.get("scale", "auto") == "auto" and not first.init_from
        if hardware.uses_card(given) and chosen and flags.is_first_rank():
            print(hardware.describe_card(first))
        return configs
