"""command/published_model.py: the published model that a run begins from (--init_from), and the way
back (--export).

    build_published(run, saved, ...)  that model, or one of its shape that a checkpoint will fill
    published_config(config)          its sizes, if it has positions for the windows of the stage
    load_published(config)            the model itself, for an evaluation of what was published
    export_run(config, given, ...)    a stage of a run as the folder of a published model

It stands apart from train.py because the recipe is the same whatever model it begins with. The
formats (safetensors, config.json, tokenizers) are published/'s.
"""

from dataclasses import asdict
from pathlib import Path

import torch

import fast
from command import checkpoints
from command.flags import usage_error
from command.output_files import digest_ends
from published.export import export_model
from published.families import read_config
from published.grouped_query import config_of
from published.loading import load_model
from published.tokenizers import make_tokenizer, read_tokenizer


def published_config(config, saved=None):
    """-> the model configuration of --init_from. saved: what a checkpoint of a run from it says, or
    None. ValueError where the stage's window is longer than the model has positions for"""
    # A checkpoint holds the sizes itself; else the published folder does.
    if saved:
        model_config = config_of(saved["model"])
    else:
        model_config = read_config(Path(config.init_from, "config.json"))[0]

    # Each stage has a window of its own, set by other flags.
    flag, window = "--window", config.window
    if config.stage == "pretrain":
        flag, window = "--context", config.context
    elif config.stage == "long":
        flag, window = "--context times --yarn", config.text_window
    if window > model_config.window:
        raise ValueError(
            f"{flag} is {window}, but {config.init_from} has positions for "
            f"{model_config.window} tokens: at most so many"
        )
    return model_config


def check_positions(configs):
    """A published model has positions for a limited number of tokens. The window of each stage is
    compared with it before the first stage begins."""
    for stage, config in configs.items():
        if not config.init_from or stage == "eval":
            continue
        # The sizes are those in the checkpoint, or, before there is one, those of the folder.
        saved = checkpoints.open_start(stage, config.out, config.start_from)
        if saved and saved["config"]["init_from"] != config.init_from:
            # The checkpoint began from another model. The stage itself refuses it, with its name.
            continue
        try:
            published_config(config, saved)
        except (ValueError, OSError) as error:
            usage_error(str(error))


def build_published(run, saved, own_parts):
    """-> the tokenizer and the model of --init_from, ready to train. run: train.py's; saved: what
    the checkpoint says of itself that will fill the model, or None; own_parts: hsdp.py's"""
    # The seed is set before anything may be drawn.
    config = run.config
    published = published_config(config, saved)
    torch.manual_seed(config.seed)
    if not saved:
        # The tokenizer first, since it is there that folders differ. Each rank reads its own part
        # of the weights.
        checkpoints.check_same_on_ranks(
            "published checkpoints (--init_from)", digest_ends(config.init_from)
        )
        tokenizer = read_tokenizer(config.init_from, published.vocab)
        model = load_model(
            config.init_from,
            getattr(torch, config.weight_dtype),
            run.device,
            lambda model: own_parts(run.prepare_model(model)),
        )
        return tokenizer, model

    # From here on a checkpoint fills the model: only its shape is needed.
    tokenizer = make_tokenizer(**saved["tokenizer"])
    if run.replicas:
        return tokenizer, run.prepare_model(published.build_model().to(run.device))

    # A model that is cut over ranks is built without memory: one rank may not be able to hold it
    # all. Then each rank allocates its own part.
    with torch.device("meta"):
        model = published.build_model()
    model = run.prepare_model(model).to_empty(device=run.device)
    # Its table of angles was on the meta device, too, and no checkpoint holds it.
    model.extend_window(published.yarn_factor)
    return tokenizer, model


def load_published(config, device):
    """The published model, whole on every rank -> what eval.load_policy gives for a checkpoint: the
    model, its tokenizer, the configuration"""
    try:
        vocab = published_config(config).vocab
        tokenizer = read_tokenizer(config.init_from, vocab)
        model = load_model(config.init_from, getattr(torch, config.weight_dtype), device)
        if not config.plain:
            model = fast.accelerate(model)
        return model.requires_grad_(False), tokenizer, asdict(config)
    except (ValueError, OSError) as error:
        usage_error(str(error))


def export_run(config, given, load_policy):
    """Writes a stage of the run as the folder of a published model. Its weights have the dtype in
    which the run kept them, or that of --weight_dtype. The other files come from the published
    model from which the run began; a run from random weights has its own tokenizer. load_policy:
    eval.py's"""
    # Any other flag would be ignored: it is refused.
    for name in sorted(set(given) - {"export", "out", "stage", "weight_dtype"}):
        usage_error(
            f"--{name} does nothing beside --export, which takes --out, --stage and --weight_dtype"
        )

    # The stage that was asked for, or the last one.
    target = Path(config.export)
    try:
        stage = Path(config.out, config.stage)
        if config.stage == "all":
            stage = checkpoints.last_stage(config.out)
        label = checkpoints.unfinished_label(stage)
        model, tokenizer, saved = load_policy(stage)
        dtype = getattr(torch, given.get("weight_dtype", saved["weight_dtype"]))
        source = Path(saved["init_from"]) if saved["init_from"] else None
        export_model(target, model, tokenizer, source, dtype)
    except (ValueError, OSError) as error:
        usage_error(str(error))

    # What was written, and a warning where the stage was not at its end.
    print(f"{target}: " + ", ".join(sorted(path.name for path in target.iterdir())))
    if label:
        print(f"{stage} is {label}")
