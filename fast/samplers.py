"""fast/samplers.py: a sampler with a model of its own, into which weights are loaded: the plain
one, or its twin for this device."""

import torch

import fast
import rollout
from fast.cuda_graphs import GraphSampler


def sampling_model(config, dtype, device="cpu"):
    """A model that only samples, of a configuration: its matrices are stored in the compute dtype.
    Norms, routers and the embedding remain in fp32."""
    model = fast.accelerate(config.build_model()).to(device).compute_in(dtype)
    for name, p in model.named_parameters():
        if not name.endswith(("norm.weight", "router.weight", "embed.weight")):
            p.data = p.data.to(dtype)
    return model.requires_grad_(False).eval()


def make_sampler(config, dtype, device, tokenizer, window, temperature=1.0, plain=False, **options):
    """A sampler with a model of its own, for weights to be loaded into: config is the model's.
    plain: rollout.Sampler with a plain model, else their twins. options: arguments of Sampler
    alone"""
    if plain:
        model = config.build_model().to(device).compute_in(dtype)
        return rollout.Sampler(model, tokenizer, window, temperature)

    # rollout.Sampler itself has a twin, unless it was edited.
    model, kind = sampling_model(config, dtype, device), fast.choose(rollout.Sampler)
    if kind is rollout.Sampler:
        return kind(model, tokenizer, window, temperature)
    # On a GPU its steps are CUDA graphs.
    if torch.device(device).type == "cuda":
        kind = GraphSampler
    return kind(model, tokenizer, window=window, temperature=temperature, **options)
