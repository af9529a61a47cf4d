"""fast/model.py: the one door to the fast twins of a model.

accelerate(model) gives every module of a moe.Model the class of its twin. A twin has the same
parameters, buffers and names, so weights, checkpoints, optimizers and shards do not notice; what it
computes is equal to the plain form, to the bit where the arithmetic is the same and up to the order
of sums elsewhere (tests/test_fast_model.py says how far).

Call it on a model that has not been cut over ranks yet: FSDP derives its own class from a module's.
Left out: a way back. A plain model is built anew and takes the state dict.
"""

import moe
from fast import cpu_kernels, decode, low_precision
from published import grouped_query

TWINS = {
    moe.RMSNorm: cpu_kernels.FastRMSNorm,
    moe.Experts: cpu_kernels.FastExperts,
    moe.MoE: decode.DecodingMoE,
    moe.Attention: decode.DecodingAttention,
    moe.Block: decode.DecodingBlock,
    moe.Model: decode.DecodingModel,
    grouped_query.GroupedQueryAttention: decode.DecodingGroupedQueryAttention,
    grouped_query.VariantModel: decode.DecodingVariantModel,
}


def accelerate(model):
    """Replaces every plain module by its fast twin, in place -> the model. Only the class of a
    module changes; a module without a twin remains as it is."""
    for module in model.modules():
        twin = TWINS.get(type(module))
        if twin is cpu_kernels.FastExperts and module.precision:
            twin = low_precision.LowPrecisionExperts
        if twin is not None:
            module.__class__ = twin
    return model
