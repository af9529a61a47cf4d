"""command/published_model.py: the published model that a run begins from (--init_from), and the way
back (--export).

    build_published(run, saved)  that model, or one of its shape that a checkpoint will fill
    published_config(config)     its sizes, if it has positions for the windows of the stage
    load_published(config)       the model itself, for an evaluation of what was published
    export_run(config, given)    a stage of a run as the folder of a published model

It stands apart from train.py because the recipe is the same whatever model it begins with. The
formats (safetensors, config.json, tokenizers) are published/'s.
"""

from dataclasses import asdict
from pathlib import Path

import torch

import eval
import fast
import hsdp
from command.flags import usage_error
from published.export import export_model
from published.families import read_config
from published.grouped_query import config_of
from published.loading import load_model
from published.tokenizers import make_tokenizer, read_tokenizer


def published_config(config, saved=None):
    """The sizes of the published model, which has positions for windows up to its own. saved: a
    checkpoint of a run from it. ValueError where it does not fit what is asked for"""
    if saved:
        model_config = config_of(saved["model"])
    else:
        model_config = read_config(Path(config.init_from, "config.json"))[0]

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


def build_published(run, saved):
    """-> the tokenizer and the model of --init_from, ready to train. run: train.py's; saved: what
    the checkpoint says of itself that will fill the model, or None"""
    config = run.config
    published = published_config(config, saved)
    torch.manual_seed(config.seed)
    if not saved:
        # The tokenizer first, since it is there that folders differ. Each rank reads its own part
        # of the weights.
        tokenizer = read_tokenizer(config.init_from, published.vocab)
        model = load_model(
            config.init_from,
            getattr(torch, config.weight_dtype),
            run.device,
            lambda model: hsdp.own_parts(run.prepare_model(model)),
        )
        return tokenizer, model
    tokenizer = make_tokenizer(**saved["tokenizer"])
    if run.replicas:
        return tokenizer, run.prepare_model(published.build_model().to(run.device))
    # Where it is cut over ranks nothing is drawn: one rank may not hold it all.
    with torch.device("meta"):
        model = published.build_model()
    model = run.prepare_model(model).to_empty(device=run.device)
    # its table of angles was on the meta device, too
    model.extend_window(published.yarn_factor)
    return tokenizer, model


def load_published(config, device):
    """As eval.load_policy, of the folder of a published model: whole on every rank"""
    try:
        vocab = published_config(config).vocab
        tokenizer = read_tokenizer(config.init_from, vocab)
        model = load_model(config.init_from, getattr(torch, config.weight_dtype), device)
        if not config.plain:
            model = fast.accelerate(model)
        return model.requires_grad_(False), tokenizer, asdict(config)
    except (ValueError, OSError) as error:
        usage_error(str(error))


def export_run(config, given):
    """A stage of the run as the folder of a published model, its weights as the run kept them or in
    --weight_dtype. What else belongs to such a folder comes from where the run began, or, of a run
    from random weights, is its own tokenizer."""
    for name in sorted(set(given) - {"export", "out", "stage", "weight_dtype"}):
        usage_error(
            f"--{name} does nothing beside --export, which takes --out, --stage and --weight_dtype"
        )
    target = Path(config.export)
    try:
        stage = Path(config.out, config.stage)
        if config.stage == "all":
            stage = eval.last_stage(config.out)
        label = eval.unfinished_label(stage)
        model, tokenizer, saved = eval.load_policy(stage)
        dtype = getattr(torch, given.get("weight_dtype", saved["weight_dtype"]))
        source = Path(saved["init_from"]) if saved["init_from"] else None
        export_model(target, model, tokenizer, source, dtype)
    except (ValueError, OSError) as error:
        usage_error(str(error))
    print(f"{target}: " + ", ".join(sorted(path.name for path in target.iterdir())))
    if label:
        print(f"{stage} is {label}")
