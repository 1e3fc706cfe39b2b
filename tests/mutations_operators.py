"""Operators: from an expression of the trainer to other texts for it. Which are there is read from `OPERATORS`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from mutations_source import (
    OPERATORS,
    Proposal,
    Source,
    arguments_of,
    binary,
    is_torch,
    method,
    name_of,
    number_of,
    operator,
)

__all__ = ["OPERATORS"]


@operator("dtype")
def _dtype(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor takes a round trip through a narrower type."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        yield f"{m.atom(node)}.bfloat16().float()"
        yield f"{m.atom(node)}.to(torch.float16).to(torch.float32)"


@operator("cast")
def _cast(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A cast names another type."""
    if (owner := method(node, "float")) is not None and m.tensor(owner):
        yield f"{m.atom(owner)}.bfloat16().float()"
        yield f"{m.atom(owner)}.double()"
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "dtype" and m.text(keyword.value) == "torch.float32":
                for other in ("bfloat16", "float16", "float64"):
                    yield [(keyword.value, f"torch.{other}")]


@operator("wide")
def _wide(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """One function or sum is computed in double precision."""
    functions = ["exp", "expm1", "rsqrt", "sqrt", "cos", "sin", "sum", "mean", "square"]
    if not isinstance(node, ast.Call):
        return
    if (owner := method(node, *functions)) is not None and m.tensor(owner):
        yield f"{m.atom(owner)}.double().{name_of(node)}({arguments_of(node, m)}).float()"
    elif is_torch(node, *functions, "log_softmax", "softmax", "silu"):
        rest = [f"{k.arg}={m.text(k.value)}" for k in node.keywords if k.arg != "dtype"]
        yield f"{m.text(node.func)}({', '.join([f'{m.atom(node.args[0])}.double()', *rest])}).float()"


@operator("epsilon")
def _epsilon(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """An epsilon is scaled where it is used."""
    if isinstance(node, (ast.Name, ast.Attribute)) and re.search(r"(\b|_)eps$", m.text(node), re.IGNORECASE):
        for factor in ("0.0", "10", "1e3", "1e5"):
            yield f"({factor} * {m.text(node)})"


@operator("literal")
def _literal(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A number in a tensor expression is another one."""
    value = number_of(node)
    if value is None:
        return
    if isinstance(m.parents[node], ast.BinOp) and any(map(m.tensor, m.above(node))):
        yield repr(value * 1.001 if value else 0.001)
        yield repr(value * 2 if value else 1)
    elif isinstance(value, float):
        yield repr(value + 0.001)


@operator("sum order")
def _sum_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum or mean runs backwards."""
    if isinstance(node, ast.Call) and (owner := method(node, "sum", "mean")) is not None and m.tensor(owner):
        dims = [*node.args, *(k.value for k in node.keywords if k.arg == "dim")]
        yield f"{m.atom(owner)}.flip({m.text(dims[0]) if dims else 0}).{name_of(node)}({arguments_of(node, m)})"


@operator("sum blocks")
def _sum_blocks(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum is made of partial sums."""
    if isinstance(node, ast.Call) and (owner := method(node, "sum")) is not None and m.tensor(owner):
        if not node.args and not node.keywords:
            for size in (2, 3, 5, 8):
                yield f"torch.stack([block.sum() for block in {m.atom(owner)}.flatten().split({size})]).sum()"
            yield f"{m.atom(owner)}.flatten().cumsum(0)[-1]"
        else:
            yield f"{m.atom(owner)}.cumsum(dim=-1)[..., -1]"


@operator("mean")
def _mean(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sum becomes a mean, or a mean a sum."""
    for name, other in (("sum", "mean"), ("mean", "sum")):
        if isinstance(node, ast.Call) and (owner := method(node, name)) is not None and m.tensor(owner):
            yield f"{m.atom(owner)}.{other}({arguments_of(node, m)})"


@operator("fused")
def _fused(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A fused function is written out, or a plain one computed another way."""
    if not isinstance(node, ast.Call):
        return
    owner = method(node, "exp", "sqrt", "square", "pow", "cos", "sin", "abs")
    if owner is not None and m.tensor(owner) and isinstance(node.func, ast.Attribute):
        name, a = node.func.attr, m.atom(owner)
    elif isinstance(node.func, ast.Attribute) and is_torch(node, node.func.attr) and node.args:
        name, a = node.func.attr, m.atom(node.args[0])
    else:
        return
    plain = {
        "exp": [f"torch.exp2({a} * 1.4426950408889634)", f"(torch.expm1({a}) + 1.0)", f"({a} / 2).exp().square()"],
        "expm1": [f"(torch.exp({a}) - 1)"],
        "silu": [f"({a} * torch.sigmoid({a}))", f"({a} / (1.0 + torch.exp(-{a})))"],
        "rsqrt": [f"(1.0 / torch.sqrt({a}))", f"({a} ** -0.5)"],
        "sqrt": [f"({a} * torch.rsqrt({a}))", f"(0.5 * torch.log({a})).exp()"],
        "square": [f"({a} ** 2)", f"({a}.abs() ** 2.0000001)"],
        "pow": [f"({a} * {a})", f"{a}.abs().log().mul(2).exp()"],
        "cos": [f"torch.sin({a} + 1.5707963267948966)"],
        "sin": [f"torch.cos({a} - 1.5707963267948966)"],
        "log_softmax": [f"({a} - torch.logsumexp({a}, dim=-1, keepdim=True))", f"torch.softmax({a}, dim=-1).log()"],
        "softmax": [f"torch.log_softmax({a}, dim=-1).exp()", f"({a}.exp() / {a}.exp().sum(dim=-1, keepdim=True))"],
    }
    yield from plain.get(name, [])


@operator("reciprocal")
def _reciprocal(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A division becomes a product with the reciprocal."""
    if binary(node, ast.Div) and m.tensor(node) and isinstance(node, ast.BinOp):
        yield f"({m.atom(node.left)} * (1.0 / {m.atom(node.right)}))"


@operator("association")
def _association(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The parentheses of a product or sum of three move."""
    if not isinstance(node, ast.BinOp) or not m.tensor(node):
        return
    left, right = node.left, node.right
    if isinstance(left, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(left.op, (ast.Mult, ast.MatMult)):
        sign = "*" if isinstance(left.op, ast.Mult) else "@"
        yield f"(({m.atom(left.left)} * {m.atom(right)}) {sign} {m.atom(left.right)})"
        yield f"({m.atom(left.left)} {sign} ({m.atom(left.right)} * {m.atom(right)}))"
    if isinstance(left, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(left.op, ast.Add):
        yield f"({m.atom(left.left)} + ({m.atom(left.right)} + {m.atom(right)}))"
    if isinstance(right, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(right.op, ast.Div):
        yield f"({m.atom(left)} * {m.atom(right.left)} / {m.atom(right.right)})"


@operator("clip bound")
def _clip_bound(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """One bound of a clip moves."""
    if isinstance(node, ast.Call) and method(node, "clamp", "clip") is not None:
        bounds = [*node.args, *(k.value for k in node.keywords)]
        for bound in bounds:
            for factor in ("0.99", "1.01", "0.5"):
                yield [(bound, f"{factor} * {m.atom(bound)}")]
        if len(bounds) > 1:
            yield [(bounds[0], m.text(bounds[1]))]


@operator("clip dropped")
def _clip_dropped(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A clip is missing."""
    if (owner := method(node, "clamp", "clip")) is not None:
        yield m.atom(owner)


@operator("clip order")
def _clip_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """What was clipped before a product is clipped after it."""
    if binary(node, ast.Mult, ast.Add, ast.Sub) and isinstance(node, ast.BinOp):
        sign = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-"}[type(node.op)]
        left, right = method(node.left, "clamp"), method(node.right, "clamp")
        if right is not None and isinstance(node.right, ast.Call):
            yield f"({m.text(node.left)} {sign} {m.atom(right)}).clamp({arguments_of(node.right, m)})"
        if left is not None and isinstance(node.left, ast.Call):
            yield f"({m.atom(left)} {sign} {m.atom(node.right)}).clamp({arguments_of(node.left, m)})"


@operator("min max")
def _min_max(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The smaller instead of the larger, or the other way."""
    others = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in others:
        yield f"{m.text(node.func.value)}.{others[node.func.attr]}({arguments_of(node, m)})"


@operator("boundary")
def _boundary(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A comparison is off by one, or takes the boundary to the other side."""
    others = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
    if isinstance(node, ast.Compare) and m.tensor(node):
        yield f"({m.text(node.left)} {others[type(node.ops[0])]} {m.text(node.comparators[0])})"
        for shift in ("+ 1", "- 1", "+ 2"):
            yield [(node.comparators[0], f"({m.text(node.comparators[0])} {shift})")]


@operator("mask")
def _mask(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A mask is missing or the wrong way round."""
    if isinstance(node, ast.Call) and is_torch(node, "where") and len(node.args) == 3:
        keep, yes, no = node.args
        yield m.atom(yes)
        yield f"torch.where(~{m.atom(keep)}, {m.text(yes)}, {m.text(no)})"
    if (owner := method(node, "masked_fill")) is not None:
        yield m.atom(owner)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        yield m.atom(node.left)
        yield m.atom(node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield m.atom(node.operand)
    if is_torch(node, "nonzero") and isinstance(node, ast.Call):
        yield f"torch.nonzero(torch.ones_like({m.text(node.args[0])}))"


@operator("position")
def _position(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Positions, ranges and exponents start one too early or too late."""
    if isinstance(node, ast.Call) and is_torch(node, "arange"):
        bounds = node.args[:2] if len(node.args) > 1 else node.args
        for change in ("+ 1", "- 1"):
            if len(bounds) == 2:
                yield [(bound, f"{m.text(bound)} {change}") for bound in bounds]
            else:
                yield f"({m.text(node)} {change})"
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and m.tensor(node.left):
        shift = number_of(node.right)
        if isinstance(shift, int):
            yield m.atom(node.left)
            yield [(node.right, str(shift + 1))]
    if isinstance(node, ast.Name) and node.id in ("positions", "order", "predictions", "targets") and m.tensor(node):
        yield f"({node.id} + 1)"
        yield f"({node.id} * 2)"


@operator("argument")
def _argument(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A number that is handed over by the configuration arrives as another one."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and re.match(r"(self\.)?(c|config)\.", m.text(node)):
        above = list(m.above(node))
        call = next((o for o in above if isinstance(o, ast.Call)), None)
        statement = next(o for o in above if isinstance(o, ast.stmt))
        # Not to a function that returns plain numbers: what those move lies elsewhere.
        works = any(map(m.tensor, above)) or isinstance(statement, ast.Expr) or (call and any(map(m.tensor, call.args)))
        if works and isinstance(above[0], (ast.keyword, ast.Call, ast.BinOp)):
            for factor in ("1.001", "0.5", "0.0"):
                yield f"({factor} * {m.text(node)})"


@operator("betas")
def _betas(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The other one of a pair of settings."""
    if isinstance(node, ast.Subscript) and isinstance(m.parents[node], ast.keyword):
        place = number_of(node.slice)
        if place is not None and place in (0, 1):
            yield [(node.slice, str(1 - place))]


@operator("decay")
def _decay(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Weight decay enters through the gradient, or twice."""
    if isinstance(node, ast.Call) and len(node.args) > 1:
        for keyword in node.keywords:
            if keyword.arg == "weight_decay":
                weights, grads, decay = m.text(node.args[0]), m.text(node.args[1]), m.text(keyword.value)
                coupled = f"list(torch._foreach_add({grads}, {weights}, alpha={decay}))"
                yield [(node.args[1], coupled), (keyword.value, "0.0")]
                yield [(node.args[1], coupled)]


@operator("state")
def _state(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor that should start at zero starts elsewhere, or one at one."""
    if isinstance(node, ast.Call) and is_torch(node, "zeros", "zeros_like", "ones_like"):
        for start in ("+ 1", "+ 1e-3") if "zeros" in m.text(node.func) else ("* 1.001", "* 2"):
            yield f"({m.text(node)} {start})"


@operator("bessel")
def _bessel(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A count is one more or one fewer."""
    if isinstance(node, ast.Call) and m.text(node.func) == "len" and any(map(m.tensor, m.above(node))):
        owner = m.parents[node]
        if isinstance(owner, ast.BinOp) and isinstance(owner.op, ast.Sub):
            yield [(owner, m.text(node))]
        elif isinstance(owner, ast.BinOp):
            yield f"({m.text(node)} - 1)"
            yield f"({m.text(node)} + 1)"


@operator("term")
def _term(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A term is missing from a sum or difference."""
    if binary(node, ast.Add, ast.Sub) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield m.atom(node.left)
        if isinstance(node.op, ast.Add):
            yield m.atom(node.right)


@operator("factor")
def _factor(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A factor or divisor is missing."""
    if binary(node, ast.Mult, ast.Div) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield m.atom(node.left)
        if isinstance(node.op, ast.Mult):
            yield m.atom(node.right)


@operator("sign")
def _sign(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A sign is lost, or the sides of a difference are exchanged."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and m.tensor(node):
        yield m.atom(node.operand)
    if binary(node, ast.Sub) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield f"({m.text(node.right)} - {m.atom(node.left)})"
    if binary(node, ast.Add) and isinstance(node, ast.BinOp) and m.tensor(node):
        yield f"({m.text(node.left)} - {m.atom(node.right)})"


@operator("swap")
def _swap(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Two arguments of a call are exchanged."""
    if isinstance(node, ast.Call) and not is_torch(node, "maximum", "minimum"):
        places = [a for a in node.args if m.tensor(a)]
        for left, right in pairwise(places):
            yield [(left, m.text(right)), (right, m.text(left))]


@operator("skip")
def _skip(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A function is not called: what goes in comes out."""
    if not isinstance(node, ast.Call) or m.text(node.func).startswith(("torch.", "F.")):
        return
    if node.args and m.tensor(node) and m.tensor(node.args[0]):
        yield m.atom(node.args[0])


@operator("generator")
def _generator(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Another seed, another stream, or one draw more."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        draws = [m.text(k.value) for k in node.keywords if k.arg == "generator"]
        if draws and node.func.attr.endswith("_"):
            yield f"{m.text(node)}.{node.func.attr}({arguments_of(node, m)})"
            for keyword in node.keywords:
                if keyword.arg == "generator":
                    yield [(keyword.value, "torch.Generator().manual_seed(1)")]
            yield f"{m.text(node)}.mul_(torch.empty(1).uniform_(0.5, 1.5, generator={draws[0]}))"
    if isinstance(node, ast.Call) and name_of(node) != "manual_seed":  # which is no operation on a tensor
        for argument in node.args:
            if re.search(r"(\b|_)seed$", m.text(argument)):
                for change in ("+ 1", "* 2", "// 2", "^ 64"):
                    yield [(argument, f"{m.text(argument)} {change}")]


@operator("data order")
def _data_order(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A tensor's first dimension comes in another order."""
    if m.tensor(node):
        yield f"{m.atom(node)}.flip(0)"
        yield f"{m.atom(node)}.roll(1, 0)"


@operator("loop")
def _loop(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """A comprehension that makes tensors runs backwards."""
    whole = isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp))
    if whole and (any(map(m.tensor, ast.walk(node))) or any(map(m.tensor, m.above(node)))):
        assert isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp))
        for generator in node.generators:
            yield [(generator.iter, f"reversed(list({m.text(generator.iter)}))")]


@operator("gradient")
def _gradient(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Values stay, and the gradient is cut off or scaled."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        a = m.atom(node)
        yield f"{a}.detach()"
        yield f"({a} + ({a} - {a}.detach()))"
    if (owner := method(node, "detach")) is not None:
        yield m.atom(owner)


@operator("accumulate")
def _accumulate(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """Adding in place forgets, or adds another amount."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_":
        into = m.text(node.func.value)
        yield f"{into}.copy_({arguments_of(node, m)})"
        yield f"{into}.add_({arguments_of(node, m)}, alpha=0.5)"
        yield f"{into}.mul_(0.5).add_({arguments_of(node, m)}).mul_(1.999)"
        yield f"{into}.add_({arguments_of(node, m)} / 3.0).add_({arguments_of(node, m)} * 2.0 / 3.0)"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "mul_":
        yield f"{m.text(node.func.value)}.div_(1.0 / {arguments_of(node, m)})"
        yield f"{m.text(node.func.value)}.mul_({arguments_of(node, m)}).mul_({arguments_of(node, m)})"


@operator("detour")
def _detour(node: ast.expr, m: Source) -> Iterator[Proposal]:
    """The same number up to rounding."""
    if m.tensor(node) and not isinstance(node, ast.Compare):
        yield f"({m.atom(node)} * 3.0 / 3.0)"
        yield f"({m.atom(node)} + 1.0 - 1.0)"
