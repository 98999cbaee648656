"""Which dimension of a weight is the input, read from the code that multiplies by it.

A layer's weight is ``(out, in)``, but GPT-2's Conv1D and the experts of several models store
``(in, out)``. Only the code of the module tells: ``F.linear(x, w)`` needs the first, ``x @ w`` the
second. What is not understood stays unknown.
"""

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_SAME = frozenset(
    {"to", "type", "type_as", "contiguous", "float", "half", "bfloat16", "clone", "detach"}
    | {"data", "full_tensor", "to_local", "dequantize", "cuda", "cpu"}
)
"""Methods and attributes that keep the order of a tensor's dimensions."""

_SWAPS = frozenset({"transpose", "swapaxes", "swapdims"})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "grouped_mm", "_grouped_mm"})
_SUMS = frozenset({"addmm", "baddbmm"})
_CUTS = frozenset({"chunk", "split", "tensor_split", "glu"})
_FOLDS = frozenset({"view", "reshape", "unflatten"})


_OUTPUTS_FIRST = (
    "torch.nn.modules.linear",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.extensions.transformer_engine",
)
"""Modules of layers whose weights are known to be ``(out, in)``, so their code is not read."""


def inputs_first(module: nn.Module, leaf: str, dims: int) -> bool | None:
    """Whether a module's weight is ``(in, out)``, or ``(experts, in, out)``; None if unknown.

    Args:
        module: The module.
        leaf: Name of the weight there.
        dims: How many dimensions it has.
    """
    if isinstance(module, _ConvNd):
        return isinstance(module, _ConvTransposeNd)
    cls: Any = type(module)
    computed_by = next(base for base in cls.__mro__ if "forward" in vars(base))
    if computed_by.__module__ in _OUTPUTS_FIRST:
        return False
    orders = _reading(cls, dims).orders.get(leaf, ())
    return next(iter(orders)) if len(orders) == 1 else None


def has_halves(module: nn.Module) -> bool:
    """Whether a module is known to cut a product in the middle, such as gate from up.

    Others take each second output, or do what is not understood.
    """
    declared: bool | None = getattr(module, "is_concatenated", None)  # as in transformers
    cls: Any = type(module)
    reading = _reading(cls, 3)
    return reading.has_halves and not reading.has_pairs if declared is None else declared


@cache
def _reading(cls: type, dims: int) -> "_Reader":
    reader = _Reader(cls, dims)
    # a scripted module has none in Python
    reader.read(getattr(cls, "forward", None), [], {}, is_method=True)
    return reader


@cache
def _parsed(function: Any) -> ast.FunctionDef | None:
    """Return the code of a function, or None if there is none to be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


@dataclass(frozen=True)
class _Tensor:
    """A parameter of a module in the form that code has: of one expert, or transposed."""

    leaf: str  # name of the parameter
    dims: int  # of this form
    flipped: bool = False  # whether the last two dimensions have changed places


@dataclass(frozen=True)
class _Scope:
    """What names mean in a function."""

    globals: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""  # the name of the module itself, usually ``self``
    tensors: dict[str, _Tensor] = field(default_factory=dict)  # local names of parameters


class _Reader(ast.NodeVisitor):
    """Reads what a module's ``forward`` does with its parameters, in the order of the lines."""

    def __init__(self, cls: type, dims: int) -> None:
        self.orders: dict[str, set[bool]] = defaultdict(set)  # whether one is used as ``(in, out)``
        self.has_halves = False  # whether a tensor is cut in its last dimension
        self.has_pairs = False  # whether each second element is taken, or pairs are made
        self._cls, self._dims = cls, dims
        self._scope = _Scope()
        self._seen: set[Any] = set()

    def read(
        self,
        function: Any,
        arguments: Sequence[ast.expr],
        named: Mapping[str, ast.expr],
        *,
        is_method: bool,
    ) -> None:
        """Read a method of the module, or a function that gets one of its parameters."""
        function = inspect.unwrap(function)
        tree = _parsed(function)
        if tree is None:
            return
        names = [item.arg for item in (*tree.args.posonlyargs, *tree.args.args)]
        module = names.pop(0) if is_method and names else ""
        given = {**dict(zip(names, arguments, strict=False)), **named}
        tensors = {name: tensor for name, node in given.items() if (tensor := self._tensor(node))}
        key = (function, frozenset(tensors.items()))
        is_torchs = str(function.__module__).startswith("torch.")
        if key in self._seen or (is_torchs and not tensors and not is_method):
            return
        self._seen.add(key)
        caller, self._scope = self._scope, _Scope(function.__globals__, module, tensors)
        for statement in tree.body:
            self.visit(statement)
        self._scope = caller

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        is_zip = isinstance(node.iter, ast.Call) and _name_of(node.iter.func) == "zip"
        over = node.iter.args if is_zip else [node.iter]  # type: ignore[attr-defined]
        targets = getattr(node.target, "elts", []) if is_zip else [node.target]
        for target, iterable in zip(targets, over, strict=False):
            self._bind(target, ast.Subscript(iterable, ast.Constant(0)))
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp) -> None:
        for item in (*node.generators, node.elt):
            self.visit(item)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        last = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else None
        if isinstance(last, ast.Slice):
            self.has_halves |= last.step is None and bool(last.lower or last.upper)
            self.has_pairs |= _integers(last.step) == [2]

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.MatMult):
            self._product(node.left, node.right)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name, arguments = _name_of(node.func), node.args
        if name == "linear":
            named = [item.value for item in node.keywords if item.arg == "weight"]
            for weight in named or arguments[1:2]:
                self._note(weight, first=False)
        elif name in _PRODUCTS and arguments and isinstance(node.func, ast.Attribute):
            # of two tensors, or a tensor's method
            self._product(*(arguments[:2] if arguments[1:] else (node.func.value, arguments[0])))
        elif name in _SUMS and arguments[1:]:
            self._product(*arguments[-2:])
        elif name == "einsum":
            self._einsum(arguments)
        elif name in _FOLDS:
            self.has_pairs |= any(_integers(node)[-1:] == [2] for node in arguments[-1:])
        elif name in _CUTS:
            dims = [item.value for item in node.keywords if item.arg == "dim"] or arguments[-1:]
            self.has_halves |= name == "glu" or any(dim != 0 for n in dims for dim in _integers(n))
        else:
            self._follow(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        """Note what a name means from here on."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for item, item_value in zip(target.elts, value.elts, strict=False):
                self._bind(item, item_value)
        elif isinstance(target, ast.Name):
            tensor = self._tensor(value)
            self._scope.tensors.pop(target.id, None)
            if tensor is not None:
                self._scope.tensors[target.id] = tensor

    def _tensor(self, node: ast.expr | None) -> _Tensor | None:
        """Return what an expression is, if it is a parameter in some form."""
        match node:
            case ast.Name():
                return self._scope.tensors.get(node.id)
            case ast.Attribute(value=ast.Name(id=self._scope.module)):
                return _Tensor(node.attr, self._dims)
            case ast.Attribute():
                return _changed(self._tensor(node.value), node.attr, ())
            case ast.Subscript(slice=ast.Tuple() | ast.Slice()):
                return None
            case ast.Subscript():
                inner = self._tensor(node.value)
                return inner and replace(inner, dims=inner.dims - 1)
            case ast.Call(func=ast.Attribute() as function):
                if (inner := self._tensor(function.value)) is not None:
                    return _changed(inner, function.attr, node.args)
                first = self._tensor(next(iter(node.args), None))
                return _changed(first, function.attr, node.args[1:])
        return None

    def _product(self, left: ast.expr, right: ast.expr) -> None:
        # a product of two parameters does not say which dimension is an input
        if self._tensor(left) is None or self._tensor(right) is None:
            self._note(left, first=False)
            self._note(right, first=True)

    def _note(self, node: ast.expr, *, first: bool) -> None:
        if (tensor := self._tensor(node)) is not None:
            self.orders[tensor.leaf].add(first != tensor.flipped)

    def _einsum(self, arguments: Sequence[ast.expr]) -> None:
        """Note which dimension of a parameter is summed over, and which one remains."""
        texts = [a.value for a in arguments if isinstance(a, ast.Constant)]
        others = [a for a in arguments if not isinstance(a, ast.Constant)]
        given, _, result = str(texts[0] if texts else "").partition("->")
        for node, letters in zip(others, given.split(","), strict=False):
            axes, tensor = _axes_of(letters), self._tensor(node)
            if tensor is not None and 2 <= len(axes) == tensor.dims:
                before_last, last = (axis in _axes_of(result) for axis in axes[-2:])
                if before_last != last:
                    self._note(node, first=last)

    def _follow(self, node: ast.Call) -> None:
        """Read what is called, if it is found."""
        function: Any = None
        is_method = False
        match node.func:
            case ast.Attribute(value=ast.Name(id=self._scope.module), attr=name):
                function = inspect.getattr_static(self._cls, name, None)
                is_method = isinstance(function, FunctionType)
                function = getattr(function, "__func__", function)
            case ast.Attribute(value=ast.Name(id=home), attr=name):
                function = getattr(self._scope.globals.get(home), name, None)
            case ast.Name(id=name):
                function = self._scope.globals.get(name)
        if isinstance(function, FunctionType):
            named = {item.arg: item.value for item in node.keywords if item.arg}
            self.read(function, node.args, named, is_method=is_method)


def _name_of(function: ast.expr) -> str:
    """Return the last word of what is called."""
    return getattr(function, "attr", getattr(function, "id", ""))


def _axes_of(text: str) -> list[str]:
    """Return the dimensions of a tensor in torch's einsum, letters, or in einops', words."""
    words = text.replace("...", " ").split()
    return words if len(words) > 1 else [*"".join(words)]


def _changed(tensor: _Tensor | None, how: str, arguments: Sequence[ast.expr]) -> _Tensor | None:
    """Return a parameter after a method or an attribute of it; None if that is another tensor."""
    if tensor is None or how in _SAME or tensor.dims < 2:
        return tensor if how in _SAME else None
    order = [*range(tensor.dims)]
    axes = [axis % tensor.dims for node in arguments for axis in _integers(node)]
    is_flip = how in ("mT", "mH") or (how in ("T", "t", "H") and tensor.dims == 2)
    is_flip |= how in _SWAPS and sorted(axes) == order[-2:]
    is_flip |= how == "permute" and axes == [*order[:-2], *order[:-3:-1]]
    return replace(tensor, flipped=not tensor.flipped) if is_flip else None


def _integers(node: ast.expr | None) -> list[int]:
    """Return the integers of an argument, be it one or a sequence."""
    if node is None:
        return []
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return []
    return [n for n in (value if isinstance(value, tuple | list) else [value]) if type(n) is int]
