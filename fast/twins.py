"""fast/twins.py: which twins there are, and whether each still stands for what the book says.

A twin computes what a plain form of the book computes, sooner. Each line of TWINS names the twin,
the plain forms that it stands for, and a digest of their source with all that this source calls in
the book: functions, methods of the same object, constants. Comments, docstrings and layout do not
count. The digest is taken from the functions as they are in this process, edited on disk or
patched by an experiment. Where it reads otherwise the twin steps aside and the plain form runs, in
training and in sampling alike.

    accelerate(model)    the modules of a model get the twins of their methods
    choose(plain)        the twin of a function or class of the book, or itself if that was edited
    describe_edits()     a line for each plain form that was edited

A twin of a method is a subclass that overrides this one method, with the same arguments. So each
can be taken out of TWINS alone, and a subclass that has a method of its own keeps it.

Whoever means a plain form to change for good changes its twin too, and then writes the new digest
here: tests/test_fast_twins.py prints it.
"""

import ast
import functools
import hashlib
import inspect
import pkgutil
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Twin:
    """twin: its module and name; forms: the plain forms that it stands for, the first one is what
    it replaces; digest: of their source; shared: what the twin itself calls for all that it does,
    as the plain form does. An edit of that acts through the twin."""

    twin: str
    forms: tuple
    digest: str
    shared: tuple = ()


BOOK = "moe", "muon", "rollout"  # the files that have plain forms

# The twins of a method stand in the order in which they are put around each other, outermost last.
TWINS = (
    Twin("fast.cpu_kernels:FastRMSNorm", ("moe.RMSNorm.forward",), "075fdb217d231058"),
    Twin("fast.cpu_kernels:FastExperts", ("moe.Experts.forward",), "aaa510d31eeb06bd"),
    Twin("fast.low_precision:LowPrecisionExperts", ("moe.Experts.forward",), "aaa510d31eeb06bd"),
    Twin("fast.cpu_kernels:FastMoE", ("moe.MoE.forward",), "f62bea2bca612f3d"),
    Twin(
        "fast.decode:WideMoE",
        ("moe.MoE.forward", "moe.Experts.forward", "moe.FFN.forward"),
        "8edc03c2a8746e93",
    ),
    Twin(
        "fast.decode:FastAttention",
        ("moe.Attention.forward",),
        "b7cf7b116653a05e",
        shared=("moe.Attention.project_qkv",),
    ),
    Twin("fast.decode:FastProjection", ("moe.Attention.project_qkv",), "c868b05136f870ec"),
    Twin("fast.cpu_kernels:FastModel", ("moe.Model.logprobs",), "9c934187aa38b86d"),
    Twin("fast.gram_newton_schulz:gram_newton_schulz", ("muon.newton_schulz",), "8c34a77c7ebef7c7"),
    Twin(
        "fast.optimizer_graph:GraphMuon",
        ("muon.Muon",),
        "59417770d3991ca9",
        shared=("muon.newton_schulz",),
    ),
    Twin(
        "fast.sampler:Sampler",
        ("rollout.Sampler",),
        "3959d5361926d4fe",
        shared=("moe.Cache", "rollout.sample_from_logits"),
    ),
)


# ---------------------------------------------------------------- the digest of a plain form


def find_form(name):
    """ "moe.MoE.forward" -> (the function or class of that name, the class that it is a method of
    or None)"""
    owner = pkgutil.resolve_name(name.rpartition(".")[0])
    return pkgutil.resolve_name(name), owner if inspect.isclass(owner) else None


@functools.lru_cache(maxsize=None)
def read_source(function):
    """-> (the source of a function without docstrings and layout, {names that it uses}, {attributes
    of self}, {names that it calls}). Kept per function: a file that is edited while a run goes on
    does not change what runs."""
    # What was made by exec has no source: it is no form that a twin stands for.
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return "without source", set(), set(), set()

    names, attributes, calls = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            attributes.add(node.attr)
        elif isinstance(node, ast.Call):
            calls.add(getattr(node.func, "id", ""))
    return repr(flatten_tree(tree)), names, attributes, calls


def flatten_tree(node):
    """A syntax tree as nested tuples. Empty fields are left out: later versions of Python have more
    of them."""
    if isinstance(node, list):
        return tuple(flatten_tree(child) for child in node)
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, value in ast.iter_fields(node):
        flat = flatten_tree(value)
        if name != "ctx" and flat not in (None, ()):
            fields.append((name, flat))
    return type(node).__name__, *fields


def is_value(found):
    """Is it a constant, whose value counts?"""
    return isinstance(found, (bool, int, float, str, tuple, list, dict, set))


def is_in_book(found):
    """Is it a function or class of the book's files that have twins?"""
    return (inspect.isfunction(found) or inspect.isclass(found)) and found.__module__ in BOOK


def collect_sources(function, owner, shared, found):
    """Adds to found {name: source or value} a function, or all methods of a class, with all that
    they call in the book. owner: the class whose method it is, or None. shared: names that are left
    out, see Twin"""
    name = f"{function.__module__}.{function.__qualname__}"
    if name in found or name in shared:
        return
    if inspect.isclass(function):
        found[name] = "class"
        # What Python itself has put into a class is another one in each version of Python.
        for method in vars(function).values():
            if inspect.isfunction(method) and is_in_book(method):
                collect_sources(method, function, shared, found)
        return

    function = inspect.unwrap(function)
    found[name], names, attributes, calls = read_source(function)
    for used in names:
        value = function.__globals__.get(used)
        if is_value(value):
            found[f"{name}: {used}"] = repr(value)
        elif is_in_book(value) and (inspect.isfunction(value) or used in calls):
            collect_sources(value, None, shared, found)
    for used in attributes if owner else ():
        value = getattr(owner, used, None)
        if is_value(value):
            found[f"{name}: self.{used}"] = repr(value)
        elif is_in_book(value):
            collect_sources(value, owner, shared, found)


def digest_forms(twin):
    """The digest of a twin's plain forms as they are in this process"""
    found = {}
    for name in twin.forms:
        collect_sources(*find_form(name), twin.shared, found)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


def is_edited(twin):
    return digest_forms(twin) != twin.digest


# ---------------------------------------------------------------- the twins take their places


def choose(plain):
    """The twin of a function or class of the book, or itself if it was edited or has none"""
    name = f"{plain.__module__}.{plain.__qualname__}"
    for twin in TWINS:
        if twin.forms[0] == name and not is_edited(twin):
            return pkgutil.resolve_name(twin.twin)
    return plain


@functools.lru_cache(maxsize=None)
def join_classes(twins, kind):
    """A class whose methods are those of the twins, the last one first, and else those of `kind`"""
    return type(f"Fast{kind.__name__}", (*reversed(twins), kind), {})


def accelerate(model):
    """Gives every module of a model the twins of its methods, in place -> the model. Only the class
    of a module changes: parameters, buffers and names stay, so weights, checkpoints, optimizers and
    shards do not notice.

    Call it on a model that has not been cut over ranks yet: FSDP derives its own class from a
    module's. Left out: a way back. A plain model is built anew and takes the state dict."""
    methods = []
    for twin in TWINS:
        method, owner = find_form(twin.forms[0])
        if owner is not None and not is_edited(twin):
            methods.append((owner, method, pkgutil.resolve_name(twin.twin)))

    for module in model.modules():
        # A class that overrides the plain method, or has its twin already, keeps its own.
        kind, twins = type(module), []
        for owner, method, twin in methods:
            if issubclass(kind, owner) and getattr(kind, method.__name__) is method:
                # Some twins are for some modules alone.
                if not hasattr(twin, "is_for") or twin.is_for(module):
                    twins.append(twin)
        if twins:
            module.__class__ = join_classes(tuple(twins), kind)
    return model


def describe_edits():
    """-> a line for each plain form that was edited, so that its twin steps aside"""
    lines = []
    for twin in TWINS:
        line = (
            f"{twin.forms[0]}, or what it calls, was changed: it runs as it is written, without "
            "its fast twin"
        )
        if line not in lines and is_edited(twin):
            lines.append(line)
    return lines
