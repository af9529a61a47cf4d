"""The same results, sooner: each file is the twin of a plain form in the book."""


def accelerate(model):
    """Replaces every plain module of a model by its fast twin, in place -> the model. See
    fast/model.py."""
    from fast import model as twins

    return twins.accelerate(model)


def compile_blocks(model):
    """torch.compile for every block of a model, in place. On an H100 a step of pretraining takes
    14 % less time, and compiling takes 80 s."""
    import warnings

    import torch

    # Variants (dense or with experts, short windows and long) are counted over the whole process,
    # and from the eighth on torch gives up without a word: each stage begins to count anew.
    torch.compiler.reset()
    # fp32 is for what must not be rounded
    warnings.filterwarnings("ignore", message=".*TensorFloat32.*")
    for block in model.layers:
        block.compile()
