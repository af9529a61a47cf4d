"""command/configuration.py: from the words of a command to the configuration of each of its stages.

What there is to configure stands in train.py's class Config, see command/flags.py. `Flags` answers

    parse(argv)               which flags were given? --help is answered here
    merge(given, stage)       the values in force in a stage, and where each comes from
    configure(given, stage)   the configuration of one stage, checked
    configure_stages(given)   those of all stages of a command

It stands apart from train.py because a reader of the recipe need not see how defaults are laid over
each other. It does not import train.py: Config comes as an argument.
"""

from dataclasses import dataclass
from pathlib import Path

from command import checkpoints, checks, flags, hardware
from command.flags import usage_error


@dataclass(frozen=True)
class Flags:
    """What there is to configure, as train.py says it, and what a command makes of it"""

    Config: type
    sizes: set  # names of the fields that are the model's shape
    about: str  # the head of --help

    @property
    def stages(self):
        """In the order in which they run; eval is the last."""
        return flags.rules_of(self.Config)["stage"].choices[1:]

    @property
    def scales(self):
        return flags.rules_of(self.Config)["scale"].choices[1:]

    def parse(self, argv):
        """--name=value or --name value for every field of Config -> dict of what was given. --help
        prints every flag and ends; with --stage or --scale it prints the values in force there."""
        given = vars(flags.make_config_parser(self.Config).parse_args(argv))
        if not given.pop("help", False):
            return given
        values = self.merge(given, given.get("stage", "all")) if given else (None, None)
        flags.make_config_parser(self.Config, *values, about=self.about).print_help()
        raise SystemExit(0)

    def stages_of(self, given):
        """-> the names of the stages that a command runs"""
        stage = given.get("stage", "all")
        return list(self.stages) if stage == "all" else [stage]

    def default(self, name, given, stage):
        """The default of a field in a stage, at the scale that was given"""
        scale, published = given.get("scale", "auto"), given.get("init_from")
        return flags.default_value(self.Config, name, scale, stage, published)

    def merge(self, given, stage):
        """The values in force in a stage: the defaults there (flags.default_value), then this
        machine, and the command line. -> ({field: value}, {field: where that comes from}). stage
        "all": what all stages have in common"""
        # Without --scale the machine decides: how large a model, and how many tokens at a time.
        fitted, scale = {}, given.get("scale", "auto")
        if scale == "auto":
            most, _ = self.default("micro_tokens", {"scale": "gpu"}, stage)
            scale, fitted = hardware.scale_of_machine(given, most)
            # A flag wins over the machine.
            fitted = {name: value for name, value in fitted.items() if name not in given}
            fitted["scale"] = scale
        given = {**given, "scale": scale}
        # So does it with the dtype, by which a policy is evaluated too, on whatever machine.
        if given.get("dtype", "auto") == "auto":
            dtype = hardware.fast_dtype("cuda" if hardware.uses_card(given) else "cpu")
            fitted["dtype"] = str(dtype).removeprefix("torch.")

        values, sources = {}, {}
        for name in flags.rules_of(self.Config):
            values[name], sources[name] = self.default(name, given, stage)
            if name in given:
                values[name], sources[name] = given[name], "flag"
            if name in fitted:
                values[name], sources[name] = fitted[name], "this machine"

        # These are compared on resume, so one folder must be written in one way.
        for name in ("init_from", "tasks", "data", "start_from"):
            if values[name]:
                values[name] = str(Path(values[name]).resolve())
        return values, sources

    def configure(self, given, stage):
        """The configuration of a stage, checked"""
        config = self.Config(**self.merge(given, stage)[0])
        checks.check_together(config, given, stage, self.sizes)
        return config

    def configure_stages(self, given):
        """-> {stage: its configuration} of all stages of a command, checked"""
        # What began from a published model goes on with it, also where the flag is not said again.
        stages, configs = self.stages_of(given), {}
        for stage in stages:
            if not given.get("init_from"):
                out, start_from = given.get("out", self.Config.out), given.get("start_from")
                start = checkpoints.open_start(stage, out, start_from)
                given["init_from"] = start["config"]["init_from"] if start else ""
            configs[stage] = self.configure({**given, "stage": stage}, stage)

        # Where a later stage began from a published model, the first one would train another.
        for stage, config in configs.items():
            if config.init_from != configs[stages[0]].init_from:
                usage_error(
                    f"{config.out}: its stage {stage} began from {config.init_from}, without "
                    f"{stages[0]}: add --stage={stage}, or another that comes after it"
                )

        # --start_from and --resume say where the command begins. With --start_from, each of
        # several stages would start from that folder and leave the stage before it aside.
        first = configs[stages[0]]
        if first.start_from and first.stage == "pretrain":
            usage_error("--start_from is for one stage: add --stage=long, sft, rl or eval")
        begun = checkpoints.last_stage(first.out) != Path(first.out)
        if first.stage == "pretrain":
            begun = checkpoints.checkpoint_exists(Path(first.out, "pretrain"))
        if first.resume and not begun:
            usage_error(f"--resume: no checkpoint in {first.out} to go on from")
        return configs
